//! The result of a campaign, as a table.

use std::{collections::BTreeMap, env, fmt::Write, fs, sync::Mutex};

/// Passed and failed cases by kind, and faults after which a run came back by itself.
#[derive(Default)]
pub(crate) struct Report {
    kinds: Mutex<BTreeMap<&'static str, Row>>,
    recoveries: Mutex<Vec<Recovery>>,
    /// Why cases failed.
    failures: Mutex<Vec<String>>,
}

/// A run that came back after a fault.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Recovery {
    pub(crate) fault: &'static str,
    pub(crate) restarts: u64,
    /// Seconds from the end of the fault to the first new step.
    pub(crate) seconds: f64,
    /// The number of steps that were done again.
    pub(crate) lost: u64,
}

#[derive(Default)]
struct Row {
    right: usize,
    wrong: usize,
    /// Seconds from the fault to the end of the last process that it ended.
    worst: f64,
}

impl Report {
    pub(crate) fn add(
        &self,
        kind: &'static str,
        seconds: f64,
        result: &Result<(), String>,
        recoveries: Vec<Recovery>,
    ) {
        self.recoveries.lock().unwrap().extend(recoveries);
        let mut kinds = self.kinds.lock().unwrap();
        let row = kinds.entry(kind).or_default();
        match result {
            Ok(()) => row.right += 1,
            Err(what) => {
                row.wrong += 1;
                self.failures
                    .lock()
                    .unwrap()
                    .push(format!("{kind}: {what}"));
            }
        }
        row.worst = row.worst.max(seconds);
    }

    /// Writes the table into the file that `MEGABURN_FAULT_REPORT` names, if it is set.
    pub(crate) fn write(&self, cases: u64, seed: u64) {
        let Some(path) = env::var_os("MEGABURN_FAULT_REPORT") else {
            return;
        };
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
        text += &recovered(&self.recoveries.lock().unwrap());
        for what in self.failures.lock().unwrap().iter() {
            writeln!(text, "\n{what}").unwrap();
        }
        fs::write(&path, text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }
}

/// A table of the faults after which runs came back.
fn recovered(recoveries: &[Recovery]) -> String {
    let mut faults: BTreeMap<&str, Vec<&Recovery>> = BTreeMap::new();
    for recovery in recoveries {
        faults.entry(recovery.fault).or_default().push(recovery);
        faults.entry("~ all").or_default().push(recovery);
    }
    if faults.is_empty() {
        return String::new();
    }
    let mut text = "\n| fault in a run that is started again | faults | restarts | \
        back after, s: median | 90% | slowest | most steps done again |\n|---|---|---|---|---|---|---|\n"
        .to_string();
    for (fault, of) in faults {
        let mut seconds: Vec<f64> = of.iter().map(|one| one.seconds).collect();
        seconds.sort_by(f64::total_cmp);
        let part = |part: f64| seconds[((seconds.len() - 1) as f64 * part).round() as usize];
        let restarts: u64 = of.iter().map(|one| one.restarts).sum();
        let lost = of.iter().map(|one| one.lost).max().unwrap_or(0);
        writeln!(
            text,
            "| {} | {} | {restarts} | {:.1} | {:.1} | {:.1} | {lost} |",
            fault.trim_start_matches("~ "),
            of.len(),
            part(0.5),
            part(0.9),
            part(1.0)
        )
        .unwrap();
    }
    text
}
