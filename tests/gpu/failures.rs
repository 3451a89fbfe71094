//! Failures of runs on GPUs: every rank ends with a message that names the cause, in time, and no
//! process or memory remains.

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use megaburn::cuda::libraries::num_gpus;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{
    Test,
    runs::{ENDLESS, Folder, is_alive, memory_used},
};

pub(crate) const TESTS: &[Test] = &[
    (
        "a_killed_rank_ends_the_run_and_it_goes_on_from_its_checkpoint",
        || lost(Signal::SIGKILL),
    ),
    ("a_stopped_rank_ends_the_run_within_the_timeout", || {
        lost(Signal::SIGSTOP)
    }),
    ("a_killed_launcher_leaves_no_rank", killed_launcher),
    (
        "more_ranks_than_gpus_are_refused_with_the_numbers",
        too_many,
    ),
    (
        "a_rank_with_another_configuration_is_named",
        other_configuration,
    ),
    (
        "memory_that_is_not_there_is_an_error_on_every_rank",
        out_of_memory,
    ),
    (
        "a_thousand_steps_take_no_more_memory_than_the_first_hundred",
        thousand_steps,
    ),
];

/// The time for loading libraries and compiling kernels.
const START: Duration = Duration::from_secs(180);
/// `train.timeout_seconds` of the runs.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The time from the first failure to the end of the last process: the launcher's settling and
/// grace.
const END: Duration = Duration::from_secs(10);

/// The largest layout of up to four ranks that fits the machine.
fn layout() -> (&'static str, usize) {
    match num_gpus() {
        0 | 1 => ("tp1", 1),
        2 | 3 => ("tp2-sp", 2),
        _ => ("tp2-dp2-sp", 4),
    }
}

/// Waits until the GPUs hold at most as much memory as before, with some slack.
fn memory_is_free(before: &[u64]) -> Result<(), String> {
    const SLACK_MIB: u64 = 64;
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        let now = memory_used()?;
        if now
            .iter()
            .zip(before)
            .all(|(now, before)| *now <= before + SLACK_MIB)
        {
            return Ok(());
        }
        if Instant::now() > until {
            return Err(format!(
                "GPU memory in MiB: {now:?}, before the run {before:?}"
            ));
        }
        thread::sleep(Duration::from_millis(200));
    }
}

fn all_are_gone(ranks: &[Pid]) -> Result<(), String> {
    let until = Instant::now() + Duration::from_secs(10);
    while let Some(left) = ranks.iter().find(|pid| is_alive(**pid)) {
        if Instant::now() > until {
            return Err(format!("process {left} is still there"));
        }
        thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

fn lost(signal: Signal) -> Result<(), String> {
    let (layout, ranks) = layout();
    if ranks == 1 {
        println!("needs two GPUs");
        return Ok(());
    }
    let before = memory_used()?;
    let folder = Folder::new();
    let mut run = folder.train(layout, ENDLESS, &[]);
    run.wait_until(START, || folder.steps().len() >= 12)?;
    let pids = run.ranks();
    let victim = ranks - 1;
    if pids.len() != ranks {
        return Err(format!("{} ranks were found, not {ranks}", pids.len()));
    }
    kill(pids[victim], signal).map_err(|error| error.to_string())?;
    let ended = run.wait(TIMEOUT + END)?;
    let expected = match signal {
        Signal::SIGKILL => {
            vec![
                format!("rank {victim} was killed by SIGKILL"),
                format!("lost rank {victim}"),
            ]
        }
        _ => vec!["timed out after".to_string()],
    };
    for text in expected {
        if !ended.stderr.contains(&text) {
            return Err(format!("the errors do not say `{text}`: {ended:?}"));
        }
    }
    if ended.code == Some(0) {
        return Err(format!("it ended as if nothing had happened: {ended:?}"));
    }
    all_are_gone(&pids)?;
    memory_is_free(&before)?;
    let steps = folder.steps().len() as u64;
    let again = folder.train(layout, steps + 3, &[]).wait(START)?;
    if again.code != Some(0) || !again.stdout.contains("resumed  after step") {
        return Err(format!("it does not go on: {again:?}"));
    }
    Ok(())
}

fn killed_launcher() -> Result<(), String> {
    let (layout, ranks) = layout();
    if ranks == 1 {
        println!("needs two GPUs");
        return Ok(());
    }
    let before = memory_used()?;
    let folder = Folder::new();
    let mut run = folder.train(layout, ENDLESS, &[]);
    run.wait_until(START, || folder.steps().len() >= 2)?;
    let pids = run.ranks();
    kill(run.launcher(), Signal::SIGKILL).map_err(|error| error.to_string())?;
    run.wait(END)?;
    all_are_gone(&pids)?;
    memory_is_free(&before)
}

fn too_many() -> Result<(), String> {
    let gpus = num_gpus();
    let folder = Folder::new();
    let ended = folder
        .train(&format!("dp{}", gpus + 1), 1, &[])
        .wait(START)?;
    let message = format!(
        "needs {} GPUs, one per rank, but this host has {gpus}",
        gpus + 1
    );
    if ended.code != Some(2) || !ended.stderr.contains(&message) {
        return Err(format!("expected: {message}; found: {ended:?}"));
    }
    Ok(())
}

fn other_configuration() -> Result<(), String> {
    let (layout, ranks) = layout();
    if ranks == 1 {
        println!("needs two GPUs");
        return Ok(());
    }
    let folder = Folder::new();
    let ended = folder.train_at_odds(layout, ranks).wait(START)?;
    let message = "rank 1 was started with a different configuration";
    if ended.code != Some(2) || !ended.stderr.contains(message) {
        return Err(format!("expected: {message}; found: {ended:?}"));
    }
    Ok(())
}

/// A micro-batch whose activations exceed the memory of any GPU.
fn out_of_memory() -> Result<(), String> {
    let (layout, ranks) = layout();
    let before = memory_used()?;
    let folder = Folder::new();
    // Each tensor is small enough for any kernel's indices; all together take hundreds of GiB.
    let sets = [
        "train.global_batch=131072",
        "train.micro_batch=65536",
        "model.layers=8",
    ];
    let ended = folder.train(layout, 2, &sets).wait(START)?;
    if ended.code != Some(1) {
        return Err(format!("it should exit with 1: {ended:?}"));
    }
    for text in ["out of GPU memory", "train.micro_batch", "GiB allocated"] {
        if !ended.stderr.contains(text) {
            return Err(format!("the error does not say `{text}`: {ended:?}"));
        }
    }
    let told = ended.stderr.matches("error: ").count();
    if told < ranks {
        return Err(format!("{told} of {ranks} ranks told of it: {ended:?}"));
    }
    if fs::read_dir(folder.path("run/checkpoints"))
        .is_ok_and(|mut entries| entries.next().is_some())
    {
        return Err("a checkpoint was written".into());
    }
    memory_is_free(&before)
}

fn thousand_steps() -> Result<(), String> {
    let (layout, _) = layout();
    let folder = Folder::new();
    let ended = folder
        .train(layout, 1000, &["train.checkpoint_interval=0"])
        .wait(START * 2)?;
    let steps = folder.steps();
    if ended.code != Some(0) || steps.len() != 1000 {
        return Err(format!("{} steps: {ended:?}", steps.len()));
    }
    let [early, late] = [steps[99].memory_bytes, steps[999].memory_bytes];
    println!("{early} bytes after 100 steps, {late} after 1000");
    if late > early + early / 50 {
        return Err(format!("{early} bytes after 100 steps, {late} after 1000"));
    }
    Ok(())
}
