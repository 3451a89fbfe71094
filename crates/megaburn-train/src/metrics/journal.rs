//! The metrics of a run in progress: a failed write never ends the training.

use std::{
    sync::Arc,
    thread::sleep,
    time::{Duration, Instant},
};

use serde::Serialize;

use super::{FoundLines, MetricsRecord, MetricsWriter};
use crate::{TrainError, run_folder::RunFolder};

/// Writing is given up after failing for longer than this and for at least [`TRIES`] tries.
const PATIENCE: Duration = Duration::from_secs(60);
const TRIES: u64 = 20;

/// Pause between tries at the end of a run.
const PAUSE: Duration = Duration::from_secs(1);

/// Writes `metrics.jsonl`. Lines that cannot be written wait in memory and are retried with the
/// next line.
#[derive(Debug)]
pub(crate) struct Journal {
    folder: Arc<RunFolder>,
    writer: MetricsWriter,
    failing: Option<Failing>,
}

#[derive(Clone, Copy, Debug)]
struct Failing {
    since: Instant,
    tries: u64,
}

impl Journal {
    pub(crate) fn new(folder: Arc<RunFolder>, writer: MetricsWriter) -> Self {
        Self {
            folder,
            writer,
            failing: None,
        }
    }

    /// What the file contained when it was opened.
    pub(crate) fn found(&self) -> FoundLines {
        self.writer.found()
    }

    /// Appends a step or an evaluation.
    ///
    /// # Errors
    /// The folder no longer belongs to the run. A line that cannot be written is only a warning.
    pub(crate) fn write(&mut self, record: impl Into<MetricsRecord>) -> Result<(), TrainError> {
        self.write_line(&record.into())
    }

    /// Appends a line of any kind.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub(crate) fn write_line(&mut self, line: &impl Serialize) -> Result<(), TrainError> {
        self.folder.check()?;
        let written = self.writer.write_line(line);
        self.note(written);
        Ok(())
    }

    /// Makes all lines so far durable against a power loss, as far as they can be written. Call it
    /// before a checkpoint is committed.
    ///
    /// # Errors
    /// The folder no longer belongs to the run.
    pub(crate) fn sync(&mut self) -> Result<(), TrainError> {
        self.folder.check()?;
        let synced = self.writer.sync();
        self.note(synced);
        Ok(())
    }

    /// Whether writing has failed for so long that the run should save and stop.
    pub(crate) fn should_give_up(&self) -> bool {
        self.failing
            .is_some_and(|Failing { since, tries }| tries >= TRIES && since.elapsed() >= PATIENCE)
    }

    /// Writes the waiting lines at the end of a run, retrying as long as during training. The run
    /// is already saved, so lines that cannot be written are only a warning.
    ///
    /// # Errors
    /// The folder no longer belongs to the run.
    pub(crate) fn finish(&mut self) -> Result<(), TrainError> {
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
    fn note(&mut self, result: Result<(), TrainError>) {
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

    use megaburn_collective::Group;

    use super::*;
    use crate::{
        ConfigLayers,
        metrics::{example_step, read_metrics},
        run_folder::{RunShare, names::METRICS},
    };

    fn journal(dir: &std::path::Path) -> Journal {
        let mut config = ConfigLayers::new().load().unwrap();
        config.run.dir = dir.display().to_string();
        let run = RunShare::take(&Group::single(0), &config).unwrap();
        let writer = MetricsWriter::open(dir.join(METRICS), 0, &run.id).unwrap();
        Journal::new(run.folder.unwrap(), writer)
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
    fn nothing_is_written_into_another_runs_folder() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("run");
        let mut first = journal(&run);
        fs::rename(&run, dir.path().join("gone")).unwrap();
        let _second = journal(&run);
        let error = first.write(example_step(1, 1.0)).unwrap_err();
        assert!(
            error.to_string().contains("no longer owns its folder"),
            "{error}"
        );
        assert!(first.sync().is_err() && first.finish().is_err());
        assert_eq!(read_metrics(run.join(METRICS)).unwrap(), []);
    }
}
