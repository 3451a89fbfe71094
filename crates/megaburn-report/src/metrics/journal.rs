//! The metrics of a run in progress: a failed write never ends the training.

use std::{
    fmt,
    thread::sleep,
    time::{Duration, Instant},
};

use serde::Serialize;

use super::{FoundLines, MetricsRecord, MetricsWriter};
use crate::error::ReportError;

/// Writing is given up after failing for longer than this and for at least [`TRIES`] tries.
const PATIENCE: Duration = Duration::from_secs(60);
const TRIES: u64 = 20;

/// Pause between tries at the end of a run.
const PAUSE: Duration = Duration::from_secs(1);

/// Writes `metrics.jsonl`. Lines that cannot be written wait in memory and are retried with the
/// next line.
///
/// Before each write it checks that the run still owns the file; `E` is the error if it does not.
pub struct Journal<E> {
    check_owner: Box<dyn Fn() -> Result<(), E> + Send>,
    writer: MetricsWriter,
    failing: Option<Failing>,
}

impl<E> fmt::Debug for Journal<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Journal")
            .field("writer", &self.writer)
            .field("failing", &self.failing)
            .finish_non_exhaustive()
    }
}

#[derive(Clone, Copy, Debug)]
struct Failing {
    since: Instant,
    tries: u64,
}

impl<E> Journal<E> {
    /// A journal that writes through `writer` as long as `check_owner` returns no error.
    pub fn new(
        writer: MetricsWriter,
        check_owner: impl Fn() -> Result<(), E> + Send + 'static,
    ) -> Self {
        Self {
            check_owner: Box::new(check_owner),
            writer,
            failing: None,
        }
    }

    /// What the file contained when it was opened.
    pub fn found(&self) -> FoundLines {
        self.writer.found()
    }

    /// Appends a step or an evaluation.
    ///
    /// # Errors
    /// The run no longer owns the file. A line that cannot be written is only a warning.
    pub fn write(&mut self, record: impl Into<MetricsRecord>) -> Result<(), E> {
        self.write_line(&record.into())
    }

    /// Appends a line of any kind.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn write_line(&mut self, line: &impl Serialize) -> Result<(), E> {
        (self.check_owner)()?;
        let written = self.writer.write_line(line);
        self.note(written);
        Ok(())
    }

    /// Makes all lines so far durable against a power loss, as far as they can be written. Call it
    /// before a checkpoint is committed.
    ///
    /// # Errors
    /// The run no longer owns the file.
    pub fn sync(&mut self) -> Result<(), E> {
        (self.check_owner)()?;
        let synced = self.writer.sync();
        self.note(synced);
        Ok(())
    }

    /// Whether writing has failed for so long that the run should save and stop.
    pub fn should_give_up(&self) -> bool {
        self.failing
            .is_some_and(|Failing { since, tries }| tries >= TRIES && since.elapsed() >= PATIENCE)
    }

    /// Writes the waiting lines at the end of a run, retrying as long as during training. The run
    /// is already saved, so lines that cannot be written are only a warning.
    ///
    /// # Errors
    /// The run no longer owns the file.
    pub fn finish(&mut self) -> Result<(), E> {
        loop {
            self.sync()?;
            match self.failing {
                None => return Ok(()),
                Some(Failing { since, .. }) if since.elapsed() >= PATIENCE => {
                    tracing::warn!(
                        "the last {} lines of `{}` could not be written and are lost; the \
                        checkpoints are intact",
                        self.writer.num_waiting(),
                        self.writer.path().display()
                    );
                    return Ok(());
                }
                Some(_) => sleep(PAUSE),
            }
        }
    }

    /// Warns once when writing begins to fail, and once when all lines are written.
    fn note(&mut self, result: Result<(), ReportError>) {
        match (result, &mut self.failing) {
            (Ok(()), None) => {}
            (Ok(()), failing) => {
                tracing::warn!(
                    "`{}` is writable again; no line was lost",
                    self.writer.path().display()
                );
                *failing = None;
            }
            (Err(_), Some(failing)) => failing.tries += 1,
            (Err(error), failing) => {
                tracing::warn!(
                    "{error}; training continues, and the lines are written as soon as possible"
                );
                *failing = Some(Failing {
                    since: Instant::now(),
                    tries: 1,
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::metrics::{example_step, read_metrics};

    const METRICS: &str = "metrics.jsonl";

    fn journal(dir: &std::path::Path) -> Journal<()> {
        let writer = MetricsWriter::open(dir.join(METRICS), 0, "1f").unwrap();
        Journal::new(writer, || Ok(()))
    }

    #[test]
    fn lines_that_cannot_be_written_end_nothing_and_come_later() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(METRICS);
        let mut journal = journal(dir.path());
        journal.write(example_step(1, 1.0)).unwrap();
        // A folder at the path of the file is one way to make writing fail.
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        for step in 2..=30 {
            journal.write(example_step(step, 1.0)).unwrap();
        }
        journal.sync().unwrap();
        assert!(!journal.should_give_up(), "it has not lasted");
        journal.failing.as_mut().unwrap().since -= PATIENCE;
        assert!(journal.should_give_up());
        journal.finish().unwrap();
        fs::remove_dir(&path).unwrap();
        journal.write(example_step(31, 1.0)).unwrap();
        assert!(!journal.should_give_up());
        let steps: Vec<_> = read_metrics(&path)
            .unwrap()
            .iter()
            .map(|line| line.step())
            .collect();
        assert_eq!(steps, (1..=31).collect::<Vec<_>>());
    }

    #[test]
    fn the_end_of_a_run_waits_for_its_last_lines() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(METRICS);
        let mut journal = journal(dir.path());
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        journal.write(example_step(1, 1.0)).unwrap();
        let in_the_way = path.clone();
        let ends = std::thread::spawn(move || {
            sleep(Duration::from_millis(200));
            fs::remove_dir(in_the_way).unwrap();
        });
        journal.finish().unwrap();
        ends.join().unwrap();
        assert_eq!(read_metrics(&path).unwrap().len(), 1);
    }

    #[test]
    fn a_run_that_lost_its_file_writes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(METRICS);
        let writer = MetricsWriter::open(&path, 0, "1f").unwrap();
        let mut journal = Journal::new(writer, || Err("lost"));
        assert_eq!(journal.write(example_step(1, 1.0)), Err("lost"));
        assert_eq!(
            (journal.sync(), journal.finish()),
            (Err("lost"), Err("lost"))
        );
        assert_eq!(read_metrics(&path).unwrap(), []);
    }
}
