//! The list of all tests: their names, the share of the machine that they take, and which are
//! quick.

use megaburn::collective::Group;
use megaburn_kernel_tests as kernels;

use crate::{
    collectives, contexts, disagreements, doctor, experts, failures, fixtures, fp8, held, interop,
    launches, layouts, offload, pipelines, profiles, ranks, regions, saves, steps, zero,
};
use megaburn_test_support::task_pool::TaskSize;

/// A test on one GPU, or on none; the error is a text.
pub(crate) type Test = (&'static str, fn() -> Result<(), String>);
/// A test that every rank of a group runs.
pub(crate) type GroupTest = (&'static str, GroupBody);
type GroupBody = fn(&Group) -> Result<(), String>;

const TESTS: [(&str, &[Test]); 11] = [
    ("doctor", doctor::TESTS),
    ("interop", interop::TESTS),
    ("fixtures", fixtures::TESTS),
    ("fp8", fp8::TESTS),
    ("held", held::TESTS),
    ("launches", launches::TESTS),
    ("steps", steps::TESTS),
    ("offload", offload::TESTS),
    ("profiles", profiles::TESTS),
    ("saves", saves::TESTS),
    ("failures", failures::TESTS),
];
const GROUP_TESTS: [(&str, &[GroupTest]); 11] = [
    ("doctor", doctor::GROUP_TESTS),
    ("collectives", collectives::GROUP_TESTS),
    ("regions", regions::GROUP_TESTS),
    ("contexts", contexts::GROUP_TESTS),
    ("disagreements", disagreements::GROUP_TESTS),
    ("experts", experts::GROUP_TESTS),
    ("fixtures", fixtures::GROUP_TESTS),
    ("fp8", fp8::GROUP_TESTS),
    ("layouts", layouts::GROUP_TESTS),
    ("pipelines", pipelines::GROUP_TESTS),
    ("zero", zero::GROUP_TESTS),
];

/// Tests that measure time limits or the total memory of the GPUs, by prefix of their names.
const ALONE: [&str; 3] = ["failures::", "disagreements::", "profiles::"];

/// Tests whose cases are distributed over several processes: prefix of their names, and number of
/// processes. They compile hundreds of kernels or train dozens of models, and call `kernels::part`
/// for each case.
const PARTS: [(&str, usize); 19] = [
    ("kernels::attention::attention_of_every_kind", 15),
    ("kernels::attention::fused_attention_of_every_head_size", 16),
    ("kernels::attention::fused_attention_drops", 6),
    ("kernels::attention::fused_attention_reads_views", 4),
    ("kernels::cross_entropy::", 2),
    ("kernels::grouped::stretches_times", 3),
    ("kernels::grouped::stretches_are", 3),
    ("kernels::norms::norms", 3),
    ("kernels::pointwise::", 2),
    ("fixtures::every_fixture_on_one_gpu", 8),
    ("steps::what_is_computed_again", 6),
    ("steps::a_step_that_is_not_finite", 4),
    ("offload::steps_are_the_same", 4),
    ("saves::", 3),
    ("contexts::", 4),
    ("experts::every_grid", 4),
    ("fixtures::every_fixture_under_every_layout", 4),
    ("layouts::", 3),
    ("pipelines::", 4),
];

/// The tests of `--quick` next to those of [`kernels::QUICK`]: at least one per module, chosen for
/// coverage per time.
const QUICK: [&str; 13] = [
    "saves::",
    "interop::",
    "fixtures::every_fixture_on_one_gpu_in_bf16",
    "held::",
    "launches::",
    "steps::clipped_steps_are_those_of_the_cpu",
    "steps::a_loss_without_all_logits_is_that_of_the_cpu_with_them",
    "offload::host_memory_gives_back_what_it_took",
    "failures::more_ranks_than_gpus_are_refused_with_the_numbers",
    "collectives::agree_with_the_host_in_every_type_and_shape::2",
    "regions::give_what_they_give_on_the_cpu::2",
    "disagreements::another_shape_is_named_with_both::2",
    "zero::every_stage_trains_as_none_that_sends_at_the_end::2",
];

/// How a test is run.
#[derive(Clone, Debug)]
pub(crate) enum Run {
    /// As a function on the first GPU.
    Here(fn() -> Result<(), String>),
    /// As a group's test on this number of ranks.
    Ranks(String, usize),
}

/// A test case.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) run: Run,
}

/// Returns all test cases.
pub(crate) fn cases() -> Vec<Case> {
    let kernels = kernels::tests().map(|(name, test)| Case {
        name,
        run: Run::Here(test),
    });
    let mut cases: Vec<Case> = kernels.collect();
    for (module, tests) in TESTS {
        cases.extend(tests.iter().map(|&(name, test)| Case {
            name: format!("{module}::{name}"),
            run: Run::Here(test),
        }));
    }
    for (module, tests) in GROUP_TESTS {
        let of_ranks = tests
            .iter()
            .flat_map(|(name, _)| [2, 4].map(|ranks| (name, ranks)));
        cases.extend(of_ranks.map(|(name, ranks)| Case {
            name: format!("{module}::{name}::{ranks}"),
            run: Run::Ranks(format!("{module}::{name}"), ranks),
        }));
    }
    cases
}

/// The test of a group, by the name that its ranks get.
pub(crate) fn group_test(name: &str) -> Option<GroupBody> {
    let (module, test) = name.split_once("::")?;
    let (_, tests) = GROUP_TESTS.iter().find(|(known, _)| *known == module)?;
    tests
        .iter()
        .find(|(known, _)| *known == test)
        .map(|(_, test)| *test)
}

impl Case {
    /// The number of processes that its cases are distributed over.
    pub(crate) fn parts(&self) -> usize {
        let known = PARTS
            .iter()
            .filter(|(start, _)| self.name.starts_with(start));
        known.map(|(_, parts)| *parts).max().unwrap_or(1)
    }

    /// The number of `places` that it takes; at most four groups run concurrently.
    pub(crate) fn room(&self, places: usize) -> TaskSize {
        match &self.run {
            _ if ALONE.iter().any(|start| self.name.starts_with(start)) => TaskSize::Alone,
            Run::Here(_) => TaskSize::Places(1),
            Run::Ranks(_, ranks) => TaskSize::Places((*ranks).max(places.div_ceil(4))),
        }
    }

    pub(crate) fn is_quick(&self) -> bool {
        let is = |start: &&str| self.name.starts_with(start);
        QUICK.iter().any(is) || kernels::QUICK.iter().any(is)
    }

    /// Runs it in this process.
    ///
    /// # Errors
    /// The failure as a text.
    pub(crate) fn run(&self, ranks_per_gpu: usize) -> Result<(), String> {
        match &self.run {
            Run::Here(test) => {
                megaburn::cuda::start().map_err(|error| error.to_string())?;
                test()
            }
            Run::Ranks(name, ranks) => ranks::launch_test(name, *ranks, ranks_per_gpu),
        }
    }
}

/// The entries of the lists above that match no test.
pub(crate) fn unknown(cases: &[Case]) -> Vec<&'static str> {
    let starts = ALONE
        .into_iter()
        .chain(QUICK)
        .chain(kernels::QUICK)
        .chain(PARTS.map(|(start, _)| start));
    starts
        .filter(|start| !cases.iter().any(|case| case.name.starts_with(start)))
        .collect()
}
