//! The metrics of a run in the formats of other programs: TensorBoard, CSV, Weights & Biases and
//! Prometheus.
//!
//! A thread of its own writes them, so that training never waits for it. `metrics.jsonl` remains
//! the record of the run: what it holds when a run starts is where these files continue from.

mod append_file;
mod csv;
mod log;
mod options;
mod prometheus;
mod protobuf;
mod tensorboard;
mod values;
mod wandb;

use std::{fmt, io, time::Duration};

use megaburn_launch::{Output, OutputQueue};

pub use csv::{EVALUATIONS_CSV, STEPS_CSV, is_table_or_absent};
pub use options::{LogOptions, WandbOptions};
pub use prometheus::MetricsServer;
pub use tensorboard::{TENSORBOARD, is_event_file};
pub use wandb::{WANDB, is_run_file, is_run_folder};

use crate::{error::ReportError, metrics::MetricsRecord};
use log::Log;

/// Records that may wait while the disk does not answer.
const WAITING: usize = 4096;
/// How long the end of a run waits for a disk that does not answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// What the thread is asked to do.
enum Task {
    Write(Box<MetricsRecord>),
    End(u8),
}

/// The logs of a run for other programs.
///
/// A file that cannot be written never ends the run: a warning says so once, and what is waiting is
/// written as soon as possible.
pub struct Logs {
    tasks: Option<OutputQueue<Task>>,
    /// Serves until it is dropped.
    server: Option<MetricsServer>,
}

impl fmt::Debug for Logs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Logs")
            .field("tasks", &self.tasks)
            .field("server", &self.server)
            .finish()
    }
}

impl Logs {
    /// Opens the logs that `options` ask for. `history` is what `metrics.jsonl` holds of the run;
    /// it is only read if a log needs it.
    ///
    /// # Errors
    /// A file cannot be written, or `history` cannot be read.
    pub fn open(
        options: LogOptions,
        history: impl FnOnce() -> Result<Vec<MetricsRecord>, ReportError>,
    ) -> Result<Self, ReportError> {
        let mut logs: Vec<Box<dyn Log>> = Vec::new();
        let history = match options.has_files() {
            true => history()?,
            false => Vec::new(),
        };
        if options.tensorboard {
            let log = tensorboard::TensorBoard::open(&options, &history);
            logs.push(Box::new(log.map_err(options.cannot_write(TENSORBOARD))?));
        }
        if let Some(wandb) = &options.wandb {
            let log = wandb::Wandb::open(&options, wandb, &history);
            logs.push(Box::new(log.map_err(options.cannot_write(WANDB))?));
        }
        if options.csv {
            let tables = csv::both(&options.dir, history)?;
            logs.extend(tables.map(|csv| Box::new(csv) as Box<dyn Log>));
        }
        if let Some(server) = &options.server {
            logs.push(Box::new(server.page(&options.run_name)));
        }
        let tasks = (!logs.is_empty()).then(|| OutputQueue::spawn("logs", WAITING, writer(logs)));
        let no_thread = |source: io::Error| ReportError::Thread { source };
        Ok(Self {
            tasks: tasks.transpose().map_err(no_thread)?,
            server: options.server,
        })
    }

    /// Passes a step or an evaluation on to all logs. Never waits.
    pub fn write(&self, record: impl Into<MetricsRecord>) {
        if let Some(tasks) = &self.tasks {
            tasks.push(Task::Write(Box::new(record.into())));
        }
    }

    /// Writes all that is waiting, and what ends a run whose process exits with `exit_code`. Gives
    /// up after ten seconds without progress.
    pub fn finish(self, exit_code: u8) {
        let Some(tasks) = &self.tasks else { return };
        tasks.push_within(Task::End(exit_code), PATIENCE);
        if !tasks.flush(PATIENCE) {
            tracing::warn!(
                "the last lines of the logs could not be written, because the disk does not answer; \
                metrics.jsonl has them"
            );
        }
    }
}

/// Writes records to all logs; runs on the thread.
fn writer(mut logs: Vec<Box<dyn Log>>) -> impl FnMut(Output<Task>) {
    move |output| match output {
        Output::Item(Task::Write(record)) => logs.iter_mut().for_each(|log| log.write(&record)),
        Output::Item(Task::End(exit_code)) => {
            for log in &mut logs {
                log.end(exit_code);
                if let Some(file) = log.file() {
                    file.finish();
                }
            }
        }
        Output::Dropped(lines) => tracing::warn!(
            "the disk is slow: {lines} lines were dropped from the logs; metrics.jsonl has them"
        ),
    }
}
