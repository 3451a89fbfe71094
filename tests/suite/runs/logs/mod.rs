//! What runs record.

mod metrics;

use megaburn_test_support::run::Run;
use nix::sys::signal::Signal;

use super::child::{Ended, Ranks};

/// More steps than any test waits for.
const ENDLESS: u64 = 1_000_000;

/// Trains to `steps` steps with further settings.
fn train(run: &Run, steps: u64, sets: &[&str]) -> Ended {
    Ranks::threads(&run.args("tp1", steps, sets))
        .finish()
        .remove(0)
}

/// A run that was killed some steps after its last checkpoint, and resumed for a few steps more.
/// Returns the number of steps.
fn killed_and_resumed(run: &Run, sets: &[&str]) -> u64 {
    let sets = [
        sets,
        &["train.checkpoint_interval=3", "train.keep_checkpoints=1"],
    ]
    .concat();
    let mut ranks = Ranks::threads(&run.args("tp1", ENDLESS, &sets));
    ranks.wait_until(|| run.steps().len() >= 8);
    ranks.signal(0, Signal::SIGKILL);
    ranks.wait_all();
    let steps = run.steps().last().unwrap().step + 4;
    train(run, steps, &sets);
    assert_eq!(run.steps().last().unwrap().step, steps);
    steps
}
