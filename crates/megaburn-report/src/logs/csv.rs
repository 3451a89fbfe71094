//! Tables of comma-separated values: `metrics.csv` has a row for each step, `evaluations.csv` one
//! for each evaluation.
//!
//! The first record of a start decides on the columns: those that every table has, those of earlier
//! records of the run, and those of the record itself. A table is then written as a whole, and
//! later records are appended.

use std::{
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
};

use megaburn_checkpoint::write_atomic;

use super::{append_file::AppendFile, log::Log, values::Values};
use crate::{error::ReportError, metrics::MetricsRecord};

/// The table of steps in a run's folder.
pub const STEPS_CSV: &str = "metrics.csv";
/// The table of evaluations in a run's folder.
pub const EVALUATIONS_CSV: &str = "evaluations.csv";

/// The columns that every table of steps has.
const OF_STEPS: &[&str] = &[
    "step",
    "wall_time",
    "start_number",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "consumed_tokens",
    "tokens_per_second",
    "tflops",
    "mfu",
    "memory_bytes",
    "loss_scale",
    "skipped",
];
/// The columns that every table of evaluations has.
const OF_EVALUATIONS: &[&str] = &[
    "step",
    "wall_time",
    "start_number",
    "data",
    "eval_loss",
    "consumed_tokens",
];
/// Whether the file at `path` is a table that a run wrote, or does not exist. Other programs write
/// tables of this name too, with other columns.
pub fn is_table_or_absent(path: &Path) -> bool {
    let file = match File::open(path) {
        Err(error) => return error.kind() == io::ErrorKind::NotFound,
        Ok(file) => file,
    };
    let mut head = Vec::new();
    // The columns that every table has take less.
    if file.take(1024).read_to_end(&mut head).is_err() {
        return false;
    }
    [OF_STEPS, OF_EVALUATIONS].iter().any(|columns| {
        let columns = columns.join(",");
        let rest = head.strip_prefix(columns.as_bytes());
        rest.is_some_and(|rest| rest.starts_with(b",") || rest.starts_with(b"\n"))
    })
}

/// What only some steps have is in no column.
const OF_SOME_STEPS: &str = "precision/";

/// A table.
#[derive(Debug)]
pub(super) struct Csv {
    path: PathBuf,
    is_of_steps: bool,
    columns: Vec<String>,
    /// All records until the table is written.
    history: Vec<MetricsRecord>,
    file: Option<AppendFile>,
    /// Whether a warning has said that the table cannot be written.
    is_failing: bool,
}

/// The two tables of a run.
///
/// # Errors
/// Another program wrote a file with the name of one.
pub(super) fn both(dir: &Path, history: Vec<MetricsRecord>) -> Result<[Csv; 2], ReportError> {
    for name in [STEPS_CSV, EVALUATIONS_CSV] {
        let path = dir.join(name);
        if !is_table_or_absent(&path) {
            return Err(ReportError::NotATable { path });
        }
    }
    let is_step = |record: &MetricsRecord| matches!(record, MetricsRecord::Step(_));
    let (steps, evals) = history.into_iter().partition(is_step);
    let table = |name: &str, history, is_of_steps| Csv {
        path: dir.join(name),
        is_of_steps,
        columns: Vec::new(),
        history,
        file: None,
        is_failing: false,
    };
    Ok([
        table(STEPS_CSV, steps, true),
        table(EVALUATIONS_CSV, evals, false),
    ])
}

impl Csv {
    fn fixed(&self) -> &'static [&'static str] {
        match self.is_of_steps {
            true => OF_STEPS,
            false => OF_EVALUATIONS,
        }
    }

    /// Writes the table with all records so far.
    fn begin(&mut self) -> io::Result<AppendFile> {
        let mut columns: Vec<String> = self.fixed().iter().map(|name| name.to_string()).collect();
        for record in &self.history {
            for (name, _) in Values::of(record).numbers {
                if !name.starts_with(OF_SOME_STEPS) && !columns.contains(&name) {
                    columns.push(name);
                }
            }
        }
        self.columns = columns;
        let mut text = row(self.columns.iter().map(String::as_str));
        for record in &self.history {
            text += &self.row_of(record);
        }
        write_atomic(&self.path, text.as_bytes())?;
        let file = File::options().append(true).open(&self.path)?;
        self.history = Vec::new();
        Ok(AppendFile::new(self.path.clone(), file))
    }

    fn row_of(&self, record: &MetricsRecord) -> String {
        let values = Values::of(record);
        let cell = |column: &String| match column.as_str() {
            "step" => values.step.to_string(),
            "wall_time" => values
                .wall_time
                .map_or(String::new(), |time| format!("{time:.3}")),
            "start_number" => values.start_number.map_or(String::new(), |n| n.to_string()),
            "data" => values.evaluated.clone().unwrap_or_default(),
            name => {
                let found = values.numbers.iter().find(|(known, _)| known == name);
                found.map_or(String::new(), |(_, number)| number.to_string())
            }
        };
        let cells: Vec<String> = self.columns.iter().map(cell).collect();
        row(cells.iter().map(String::as_str))
    }
}

impl Log for Csv {
    fn write(&mut self, record: &MetricsRecord) {
        if self.is_of_steps != matches!(record, MetricsRecord::Step(_)) {
            return;
        }
        let text = self.row_of(record);
        if let Some(file) = &mut self.file {
            return file.append(text.as_bytes());
        }
        self.history.push(record.clone());
        match self.begin() {
            Ok(file) => self.file = Some(file),
            Err(error) if !self.is_failing => {
                self.is_failing = true;
                tracing::warn!(
                    "cannot write `{}`: {error}; training continues, and each record tries again",
                    self.path.display()
                );
            }
            Err(_) => {}
        }
    }

    fn end(&mut self, _: u8) {}

    fn file(&mut self) -> Option<&mut AppendFile> {
        self.file.as_mut()
    }
}

/// A row of cells; those with commas, quotes or line ends are quoted.
fn row<'a>(cells: impl Iterator<Item = &'a str>) -> String {
    let quoted = |cell: &str| match cell.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", cell.replace('"', "\"\"")),
        false => cell.to_string(),
    };
    cells.map(quoted).collect::<Vec<_>>().join(",") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_of_another_program_is_not_a_runs() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(STEPS_CSV);
        assert!(is_table_or_absent(&path));
        for (head, is_ours) in [
            (OF_STEPS.join(",") + "\n", true),
            (OF_EVALUATIONS.join(",") + ",more\n1,2\n", true),
            (OF_STEPS.join(",") + "x\n", false),
            ("step,loss\n1,2\n".into(), false),
            (String::new(), false),
        ] {
            std::fs::write(&path, &head).unwrap();
            assert_eq!(is_table_or_absent(&path), is_ours, "{head:?}");
            assert_eq!(both(dir.path(), Vec::new()).is_ok(), is_ours);
        }
    }
}
