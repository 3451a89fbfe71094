//! Profiles of runs on GPUs.

use std::time::Duration;

use megaburn::{
    cuda::libraries::num_gpus,
    report::{
        metrics::StepMetrics,
        profile::{CallPlace, KernelClass, RankTrace, Summary, Trace, read_chrome},
    },
};

use crate::{
    Test,
    runs::{Ended, Folder},
};

pub(crate) const TESTS: &[Test] = &[
    (
        "kernels_are_inside_the_steps_and_add_up_to_their_time",
        one_gpu,
    ),
    ("collectives_of_two_gpus_are_kernels_of_nccl", two_gpus),
];

/// The time for loading libraries, compiling kernels and the steps.
const PATIENCE: Duration = Duration::from_secs(240);
const STEPS: u64 = 12;

/// Trains with a profile of steps 8 to 10.
fn profiled(layout: &str, sets: &[&str]) -> Result<(Trace, Ended, Vec<StepMetrics>), String> {
    let folder = Folder::new();
    let sets = [&["profile.steps=\"8-10\"", "train.dtype=bf16"], sets].concat();
    let ended = folder.train(layout, STEPS, &sets).wait(PATIENCE)?;
    if ended.code != Some(0) {
        return Err(format!("{ended:?}"));
    }
    let path = folder.path("run/profile/steps-8-10.trace.json");
    let trace = read_chrome(&path).map_err(|error| format!("{error}: {ended:?}"))?;
    Ok((trace, ended, folder.steps()))
}

fn check(ok: bool, what: impl FnOnce() -> String) -> Result<(), String> {
    if ok { Ok(()) } else { Err(what()) }
}

/// The time in which at least one of these intervals is, inside `step`.
fn covered(intervals: impl Iterator<Item = (u64, u64)>, step: [u64; 2]) -> u64 {
    let mut inside: Vec<(u64, u64)> = intervals
        .map(|(start, end)| (start.max(step[0]), end.min(step[1])))
        .filter(|(start, end)| start < end)
        .collect();
    inside.sort_unstable();
    let mut until = step[0];
    let mut sum = 0;
    for (start, end) in inside {
        sum += end.saturating_sub(start.max(until));
        until = until.max(end);
    }
    sum
}

/// What must hold for the kernels of a rank.
fn check_rank(rank: &RankTrace, summary: &Summary) -> Result<(), String> {
    let number = rank.rank;
    let steps: Vec<[u64; 2]> = rank.steps().map(|(_, step)| step).collect();
    check(steps.len() == 3, || format!("rank {number}: {steps:?}"))?;
    let kernels = rank.gpu.iter().filter(|work| !work.is_copy);
    let total: u64 = kernels.clone().map(|work| work.end - work.start).sum();
    let inside: u64 = kernels
        .filter(|work| {
            steps
                .iter()
                .any(|step| work.start >= step[0] && work.end <= step[1])
        })
        .map(|work| work.end - work.start)
        .sum();
    check(inside as f64 > 0.95 * total as f64, || {
        format!("rank {number}: {inside} of {total} ns of kernels are inside the steps")
    })?;
    let times = summary.rank(number).ok_or("the rank has times")?;
    let gpu = times
        .gpu
        .ok_or_else(|| format!("no kernels: {:?}", summary.notes))?;
    // Independent of how the table is computed.
    let busy: u64 = steps
        .iter()
        .map(|step| covered(rank.gpu.iter().map(|work| (work.start, work.end)), *step))
        .sum();
    let busy = busy as f64 / 1e6 / steps.len() as f64;
    let sum = busy + gpu.idle + gpu.host;
    check((sum - times.step).abs() < 0.01 * times.step, || {
        format!(
            "rank {number}: kernels {busy} ms and {gpu:?} are not {} ms",
            times.step
        )
    })?;
    for (name, time) in [("products", gpu.products), ("optimizer", gpu.optimizer)] {
        check(time > 0.0, || {
            format!("rank {number}: no {name}: {summary:?}")
        })?;
    }
    // Attention of the small model is a kernel of cuDNN or ours.
    check(gpu.attention > 0.0, || {
        format!("rank {number}: no attention among {:?}", rank.names)
    })
}

fn one_gpu() -> Result<(), String> {
    let (trace, ended, with) = profiled("tp1", &[])?;
    check(trace.notes.is_empty(), || format!("{:?}", trace.notes))?;
    let summary = Summary::of(&trace);
    check_rank(&trace.ranks[0], &summary)?;
    check(summary.kernels.len() == 10, || {
        format!("{:?}", summary.kernels)
    })?;
    check(ended.stdout.contains("kernels with the most time"), || {
        ended.stdout.clone()
    })?;
    // The numbers are those without a profile.
    let folder = Folder::new();
    let sets = ["train.dtype=bf16"];
    let plain = folder.train("tp1", STEPS, &sets).wait(PATIENCE)?;
    check(plain.code == Some(0), || format!("{plain:?}"))?;
    let numbers = |steps: Vec<StepMetrics>| -> Vec<[u64; 2]> {
        let bits = |step: StepMetrics| [step.loss.to_bits(), step.grad_norm.to_bits()];
        steps.into_iter().map(bits).collect()
    };
    let [with, without] = [with, folder.steps()].map(numbers);
    check(with == without, || format!("{with:?}\n{without:?}"))
}

fn two_gpus() -> Result<(), String> {
    if num_gpus() < 2 {
        return Ok(());
    }
    let (trace, ..) = profiled("tp2-sp", &[])?;
    check(trace.ranks.len() == 2, || {
        format!("{} ranks", trace.ranks.len())
    })?;
    check(trace.notes.is_empty(), || format!("{:?}", trace.notes))?;
    let summary = Summary::of(&trace);
    for rank in &trace.ranks {
        check_rank(rank, &summary)?;
        let of_nccl = rank.names.iter();
        let of_nccl = of_nccl.filter(|name| KernelClass::of(name) == KernelClass::Communication);
        check(of_nccl.count() > 0, || format!("{:?}", rank.names))?;
        let on_gpu = rank
            .calls
            .iter()
            .filter(|call| call.place == CallPlace::Gpu && call.bytes > 0);
        check(on_gpu.count() > 10, || format!("{:?}", rank.calls))?;
        // Clocks agree: ranks do each step together.
        for ((_, mine), (_, theirs)) in trace.ranks[0].steps().zip(rank.steps()) {
            check(mine[0] < theirs[1] && theirs[0] < mine[1], || {
                format!("{mine:?} and {theirs:?}")
            })?;
        }
    }
    Ok(())
}
