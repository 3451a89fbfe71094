//! Tests on GPUs, and the executable of `.ci/bundle`: one file that is several programs, by the name
//! it is called by or by its first argument.
//!
//! ```sh
//! cargo test --release -p megaburn-tests --features cuda --test gpu -- [NAME]
//! ```
//!
//! Tests of one GPU run in this process, one after the other; tests of several start it again as a
//! rank for each GPU, or, with `MEGABURN_RANKS_PER_GPU=N` in the environment, as `N` ranks for each.

mod collectives;
mod contexts;
mod disagreements;
#[path = "../suite/expert_matrix.rs"]
mod expert_matrix;
mod experts;
mod failures;
mod fixtures;
#[path = "../suite/gather.rs"]
mod gather;
mod held;
mod interop;
#[path = "../../cubecl-kernels/tests/gpu/ops/mod.rs"]
mod kernels;
mod layouts;
#[path = "../suite/matrix.rs"]
mod matrix;
mod offload;
mod pipelines;
mod ranks;
mod regions;
mod rows;
mod runs;
mod steps;
#[path = "../suite/text.rs"]
mod text;
mod zero;

use std::{
    ffi::{OsStr, OsString},
    path::{Path, PathBuf},
    process::ExitCode,
};

use libtest_mimic::{Arguments, Failed, Trial};
use megaburn::collective::Group;

/// How many ranks of a test have a GPU together.
const RANKS_PER_GPU: &str = "MEGABURN_RANKS_PER_GPU";

/// A program with its command line, its name first.
type Program = fn(Vec<OsString>) -> ExitCode;
/// A test of one GPU, or of none: what is wrong is a text.
type Test = (&'static str, fn() -> Result<(), String>);
/// A test that every rank of a group runs.
type GroupTest = (&'static str, fn(&Group) -> Result<(), String>);

const TESTS: [(&str, &[Test]); 6] = [
    ("interop", interop::TESTS),
    ("fixtures", fixtures::TESTS),
    ("held", held::TESTS),
    ("steps", steps::TESTS),
    ("offload", offload::TESTS),
    ("failures", failures::TESTS),
];
const GROUP_TESTS: [(&str, &[GroupTest]); 9] = [
    ("collectives", collectives::GROUP_TESTS),
    ("regions", regions::GROUP_TESTS),
    ("contexts", contexts::GROUP_TESTS),
    ("disagreements", disagreements::GROUP_TESTS),
    ("experts", experts::GROUP_TESTS),
    ("fixtures", fixtures::GROUP_TESTS),
    ("layouts", layouts::GROUP_TESTS),
    ("pipelines", pipelines::GROUP_TESTS),
    ("zero", zero::GROUP_TESTS),
];

/// What this file can be.
fn programs() -> impl Iterator<Item = (&'static str, Program)> {
    let own: [(&str, Program); 3] = [
        ("megaburn", megaburn::cli::run),
        ("llama_pretrain", megaburn_examples::llama_pretrain),
        ("gpu-tests", tests),
    ];
    own.into_iter().chain(megaburn_benches::PROGRAMS.iter().copied())
}

fn program(name: &OsStr) -> Option<Program> {
    programs().find(|(known, _)| name == *known).map(|(_, program)| program)
}

fn main() -> ExitCode {
    let command: Vec<OsString> = std::env::args_os().collect();
    let called = command.first().and_then(|path| Path::new(path).file_stem());
    if let Some(program) = called.and_then(program) {
        return program(command);
    }
    match command.get(1) {
        // What `.ci/bundle` asks for.
        Some(name) if name == "programs" => {
            programs().for_each(|(name, _)| println!("{name}"));
            ExitCode::SUCCESS
        }
        // How `megaburn launch` starts its ranks.
        Some(name) if name == "launch-child" => megaburn::cli::run(command),
        Some(name) => match program(name) {
            Some(program) => program(command[1..].to_vec()),
            None => tests(command),
        },
        None => tests(command),
    }
}

fn tests(command: Vec<OsString>) -> ExitCode {
    if let Some(name) = ranks::test_of_this_rank(&command) {
        let mut known = GROUP_TESTS.iter().flat_map(|(module, tests)| {
            tests.iter().map(move |(name, test)| (format!("{module}::{name}"), *test))
        });
        let (_, test) = known.find(|(known, _)| *known == name).expect("the launcher knows it");
        return ranks::run(test);
    }
    let mut arguments = Arguments::from_iter(command);
    // Each test has the GPUs to itself.
    arguments.test_threads = Some(1);
    let gpus = match megaburn::cuda::start() {
        Ok(gpus) => gpus,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
    };
    let ranks_per_gpu = std::env::var(RANKS_PER_GPU).map_or(Ok(1), |number| number.parse());
    let Some(ranks_per_gpu) = ranks_per_gpu.ok().filter(|&number| number > 0) else {
        eprintln!("error: {RANKS_PER_GPU} is no number of ranks, 1 or more");
        return ExitCode::FAILURE;
    };
    let mut trials: Vec<Trial> = kernels::tests()
        .map(|(name, test)| Trial::test(name, move || test().map_err(Failed::from)))
        .collect();
    for (module, tests) in TESTS {
        trials.extend(tests.iter().map(|&(name, test)| {
            Trial::test(format!("{module}::{name}"), move || test().map_err(Failed::from))
        }));
    }
    for (module, tests) in GROUP_TESTS {
        for (name, _) in tests {
            for ranks in [2, 4] {
                let (name, full) =
                    (format!("{module}::{name}"), format!("{module}::{name}::{ranks}"));
                let trial = Trial::test(full, move || {
                    ranks::launch_test(&name, ranks, ranks_per_gpu).map_err(Failed::from)
                });
                trials.push(trial.with_ignored_flag(gpus * ranks_per_gpu < ranks));
            }
        }
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// The repository, or the folder that a bundle was unpacked into.
fn root() -> PathBuf {
    match std::env::var_os("MEGABURN_BUNDLE") {
        Some(bundle) => bundle.into(),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join(".."),
    }
}
