//! The result of a campaign, as a table.

use std::{collections::BTreeMap, fmt::Write, fs, path::Path, sync::Mutex};

/// Passed and failed cases by kind.
#[derive(Default)]
pub(crate) struct Report {
    kinds: Mutex<BTreeMap<&'static str, Row>>,
}

#[derive(Default)]
struct Row {
    right: usize,
    wrong: usize,
    /// Seconds from the fault to the end of the last process that it ended.
    worst: f64,
}

impl Report {
    pub(crate) fn add(&self, kind: &'static str, seconds: f64, result: &Result<(), String>) {
        let mut kinds = self.kinds.lock().unwrap();
        let row = kinds.entry(kind).or_default();
        match result {
            Ok(()) => row.right += 1,
            Err(_) => row.wrong += 1,
        }
        row.worst = row.worst.max(seconds);
    }

    pub(crate) fn write(&self, path: &Path, cases: u64, seed: u64) {
        let kinds = self.kinds.lock().unwrap();
        let mut text = format!("{cases} cases, seed {seed}\n\n");
        text.push_str("| fault | right | wrong | slowest end after the fault, s |\n");
        text.push_str("|---|---|---|---|\n");
        for (
            kind,
            Row {
                right,
                wrong,
                worst,
            },
        ) in kinds.iter()
        {
            writeln!(text, "| {kind} | {right} | {wrong} | {worst:.1} |").unwrap();
        }
        let (right, wrong) = kinds.values().fold((0, 0), |(right, wrong), row| {
            (right + row.right, wrong + row.wrong)
        });
        writeln!(text, "| all | {right} | {wrong} | |").unwrap();
        fs::write(path, text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }
}
