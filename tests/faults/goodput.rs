//! How much of its time a run trains while faults end it every two minutes.

use std::{
    env, fs, thread,
    time::{Duration, Instant},
};

use crate::{
    case::Case,
    kinds::Fault,
    restarted::{JobShape, Restarted},
};

/// Seconds between faults.
const BETWEEN: u64 = 120;

const JOB: JobShape = JobShape {
    layout: "tp2-dp2-sp",
    num_hosts: 2,
    spares: 1,
    pause_ms: 150,
    in_place: true,
    is_elastic: false,
    sets: &["train.checkpoint_interval=2", "train.timeout_seconds=2"],
};

const FAULTS: [Fault; 5] = [
    Fault::KillRank,
    Fault::AbortRank,
    Fault::StopRank,
    Fault::KillLauncher,
    Fault::KillHost,
];

/// Trains for some seconds with a fault every two minutes, next to the same run without faults. The
/// goodput is the ratio of the steps that both have done.
pub(crate) fn measure(seconds: u64, seed: u64) -> Result<(), String> {
    let case = |number| {
        let mut case = Case::new("goodput", seed, number);
        case.layout = JOB.layout;
        case.is_async = true;
        case
    };
    let (with, without) = (case(0), case(1));
    let mut run = Restarted::start(&with, JOB)?;
    let undisturbed = Restarted::start(&without, JOB)?;
    let from = Instant::now();
    let begun = [run.progress(), undisturbed.progress()];
    let mut text = "| second | fault | back after, s |\n|---|---|---|\n".to_string();
    for number in 1.. {
        // Each fault has its time within its two minutes.
        let at = (number - 1) * BETWEEN + 30 + with.below(BETWEEN - 60);
        if at > seconds {
            break;
        }
        sleep_until(from, at);
        let fault = with.one_of(&FAULTS);
        let before = run.progress();
        fault.happen(&mut run)?;
        let back = run.wait(fault.name(), |now| {
            now.starts.len() > before.starts.len() && now.step > before.step
        })?;
        text += &format!("| {at} | {} | {back:.1} |\n", fault.name());
    }
    sleep_until(from, seconds);
    let [done, possible] = [run.progress(), undisturbed.progress()];
    let steps = [done.step - begun[0].step, possible.step - begun[1].step];
    let goodput = steps[0] as f64 / steps[1] as f64;
    text += &format!(
        "\n{seconds} s, seed {seed}: {} steps with {} restarts, {} without a fault at the same time. \
        Goodput {goodput:.4}.\n",
        steps[0],
        done.starts.len() - begun[0].starts.len(),
        steps[1]
    );
    report(&text)?;
    run.finish()?;
    undisturbed.finish()
}

fn sleep_until(from: Instant, seconds: u64) {
    let until = Duration::from_secs(seconds);
    thread::sleep(until.saturating_sub(from.elapsed()));
}

/// Prints the table, and writes it into the file that `MEGABURN_FAULT_REPORT` names.
fn report(text: &str) -> Result<(), String> {
    println!("{text}");
    match env::var_os("MEGABURN_FAULT_REPORT") {
        Some(path) => fs::write(path, text).map_err(|error| error.to_string()),
        None => Ok(()),
    }
}
