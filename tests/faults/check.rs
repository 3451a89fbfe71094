//! Checks that must hold after every fault.

use std::{
    fs,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::job::processes_of;

/// Step, loss and gradient norm of each step, in order.
pub(crate) type Numbers = Vec<(u64, f64, f64)>;

/// How far losses and gradient norms may differ.
pub(crate) type Bounds = [f64; 2];
/// Not at all.
pub(crate) const SAME: Bounds = [0.0; 2];
/// After some steps whose sums have another order.
pub(crate) const ROUNDING: Bounds = [1e-3; 2];
/// After hundreds of such steps. Losses of other samples differ by more than this.
pub(crate) const DRIFT: Bounds = [0.02, 0.3];

/// Reads the steps of `metrics.jsonl`; every line must be complete.
pub(crate) fn numbers(run: &Path) -> Result<Numbers, String> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).map_err(|error| error.to_string())?;
    let mut numbers = Vec::new();
    for line in text.lines() {
        let value: Value = serde_json::from_str(line)
            .map_err(|error| format!("metrics.jsonl has the line `{line}`: {error}"))?;
        let number = |key: &str| value.get(key).and_then(Value::as_f64);
        if let (Some(step), Some(loss)) =
            (value.get("step").and_then(Value::as_u64), number("loss"))
        {
            numbers.push((step, loss, number("grad_norm").unwrap_or(f64::NAN)));
        }
    }
    Ok(numbers)
}

/// The last step in the metrics.
pub(crate) fn last_step(run: &Path) -> u64 {
    let text = fs::read(run.join("metrics.jsonl")).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let step = |line: &str| {
        let value: Value = serde_json::from_str(line).ok()?;
        value.get("loss")?;
        value.get("step")?.as_u64()
    };
    whole.lines().rev().find_map(step).unwrap_or(0)
}

/// The steps of the checkpoints that have their final names, ascending.
pub(crate) fn checkpoint_steps(run: &Path) -> Vec<u64> {
    let entries = fs::read_dir(run.join("checkpoints"))
        .into_iter()
        .flatten()
        .flatten();
    let step = |name: &str| name.strip_prefix("step-")?.parse().ok();
    let mut steps: Vec<u64> = entries
        .filter_map(|entry| step(entry.file_name().to_str()?))
        .collect();
    steps.sort_unstable();
    steps
}

pub(crate) fn last_checkpoint(run: &Path) -> u64 {
    checkpoint_steps(run).last().copied().unwrap_or(0)
}

/// Checks that each step is there once and in order, with the numbers of the reference as far as it
/// goes, within bounds.
pub(crate) fn same_numbers(
    found: &Numbers,
    reference: &Numbers,
    steps: u64,
    bounds: Bounds,
) -> Result<(), String> {
    let order: Vec<u64> = found.iter().map(|(step, ..)| *step).collect();
    if order != (1..=steps).collect::<Vec<_>>() {
        return Err(format!(
            "metrics.jsonl has the steps {order:?}, expected 1 to {steps}"
        ));
    }
    for (found, expected) in found.iter().zip(reference) {
        let far = [found.1 - expected.1, found.2 - expected.2].map(f64::abs);
        let is_near = far.iter().zip(bounds).all(|(far, bound)| *far <= bound);
        if !is_near {
            return Err(format!(
                "step {}: loss {} and gradient norm {}, but {} and {} without a fault",
                found.0, found.1, found.2, expected.1, expected.2
            ));
        }
    }
    Ok(())
}

/// Checks that no file of an incomplete save or replacement is left in the run.
pub(crate) fn no_leftovers(run: &Path) -> Result<(), String> {
    no_leftovers_in(run)?;
    no_leftovers_in(&run.join("checkpoints"))
}

/// Checks that no file of an incomplete save or replacement is left in a folder.
pub(crate) fn no_leftovers_in(folder: &Path) -> Result<(), String> {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name().display().to_string();
        if [".tmp", ".trash-", ".replaced-", ".seen-", ".host-probe"]
            .iter()
            .any(|mark| name.contains(mark))
        {
            return Err(format!("`{name}` was left in {}", folder.display()));
        }
    }
    Ok(())
}

/// Checks that after a moment no process names the case's folder any more.
pub(crate) fn no_processes(folder: &Path, limit: Duration) -> Result<(), String> {
    let from = Instant::now();
    loop {
        let left = processes_of(folder);
        if left.is_empty() {
            return Ok(());
        }
        if from.elapsed() > limit {
            return Err(format!(
                "processes {left:?} are still there after {limit:?}"
            ));
        }
        thread::sleep(Duration::from_millis(10));
    }
}
