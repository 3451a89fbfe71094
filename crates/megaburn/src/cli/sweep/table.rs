//! The runs of a sweep as a table.

use super::{file::Sweep, outcome::Outcome};

/// The run with the smallest metric among those that are finished.
pub(super) fn best(outcomes: &[Outcome]) -> Option<&Outcome> {
    let finished = outcomes.iter().filter(|outcome| outcome.is_finished());
    let known = finished.filter(|outcome| outcome.metric.is_some());
    known.min_by(|one, other| {
        let [one, other] = [one, other].map(|outcome| outcome.metric.unwrap_or(f64::INFINITY));
        one.total_cmp(&other)
    })
}

/// A line for each run, those with the smallest metric first, below the names of the columns.
pub(super) fn lines(sweep: &Sweep, outcomes: &[Outcome]) -> Vec<String> {
    let mut sorted: Vec<&Outcome> = outcomes.iter().collect();
    let key = |outcome: &&Outcome| outcome.metric.unwrap_or(f64::INFINITY);
    sorted.sort_by(|one, other| key(one).total_cmp(&key(other)));
    let mut head: Vec<String> = vec!["run".into()];
    head.extend(sweep.keys.iter().cloned());
    head.extend(
        [
            "state",
            "step",
            "loss",
            "eval loss",
            "parameters",
            "tokens/s",
        ]
        .map(String::from),
    );
    let mut rows = vec![head];
    for outcome in &sorted {
        let setting = |key: &String| {
            let value = outcome.settings.get(key);
            value.map_or("-".into(), |value| match value.as_str() {
                Some(text) => text.to_string(),
                None => value.to_string(),
            })
        };
        let mut row = vec![outcome.name.clone()];
        row.extend(sweep.keys.iter().map(setting));
        let loss = |loss: Option<f64>| loss.map_or("-".into(), |loss| format!("{loss:.4}"));
        let whole = |number: Option<u64>| number.map_or("-".into(), |number| number.to_string());
        row.extend([
            outcome.state.clone(),
            whole(outcome.step),
            loss(outcome.loss),
            loss(outcome.eval_loss),
            whole(outcome.parameters),
            outcome
                .tokens_per_second
                .map_or("-".into(), |rate| format!("{rate:.0}")),
        ]);
        rows.push(row);
    }
    let mut lines = aligned(&rows);
    if let Some(best) = best(outcomes) {
        let metric = best.metric.unwrap_or_default();
        lines.push(format!("best     {} with a loss of {metric:.4}", best.name));
    }
    let failed = sorted.iter().filter_map(|outcome| {
        let why = outcome.why.as_ref()?;
        Some(format!("failed   {}: {why}", outcome.name))
    });
    lines.extend(failed);
    lines
}

/// Rows of equally many cells, each column as wide as its widest cell.
fn aligned(rows: &[Vec<String>]) -> Vec<String> {
    let columns = rows.first().map_or(0, Vec::len);
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths);
        let cells = cells.map(|(cell, width)| format!("{cell:<width$}"));
        let text = cells.collect::<Vec<_>>().join("  ");
        text.trim_end().to_string()
    };
    rows.iter().map(line).collect()
}
