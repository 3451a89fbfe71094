//! Console output of a run: a progress bar on a terminal, plain lines elsewhere.

mod format;
mod screen;
#[cfg(test)]
mod tests;

use std::{
    fmt,
    io::{self, IsTerminal, Write},
    time::{Duration, Instant},
};

use indicatif::ProgressDrawTarget;
use megaburn_launch::OutputQueue;

pub use format::{human_duration, human_number};

use crate::metrics::{EvalMetrics, StepMetrics};
use format::{brief, step_line};
use screen::{Screen, Show};

/// Number of lines that may be queued while the output is blocked.
const WAITING: usize = 1024;
/// How long dropping the console waits for the output to accept a line before it gives up.
const PATIENCE: Duration = Duration::from_secs(2);

/// Prints the progress of a run. Only one rank has a console.
///
/// Lines go to the output. If both output and error are terminals, a coloured bar is drawn below
/// them. A separate thread writes them, so a reader that pauses (Ctrl-S, a pager) does not block
/// the run. Lines that do not fit into the queue are dropped, and a line reports their number.
/// Output that cannot be written (a closed pipe) is ignored: the run continues without its reader.
///
/// Queued lines are written when the console is dropped, as far as the reader accepts them.
pub struct Console {
    screen: OutputQueue<Show>,
    has_bar: bool,
    steps: u64,
    log_interval: u64,
    first_step: u64,
    started: Instant,
    /// What a loss is a mean over.
    unit: &'static str,
}

impl fmt::Debug for Console {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Console")
            .field("has_bar", &self.has_bar)
            .field("steps", &self.steps)
            .finish()
    }
}

impl Console {
    /// A console on standard output for a run of `steps` steps, `first_step` of which are done,
    /// with a line every `log_interval` steps.
    pub fn new(steps: u64, first_step: u64, log_interval: u64) -> Self {
        let terminal = io::stdout().is_terminal() && io::stderr().is_terminal();
        let target = if terminal {
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        };
        Self::with_target(
            Box::new(io::stdout()),
            target,
            steps,
            first_step,
            log_interval,
        )
    }

    /// A console that prints plain lines to `out`.
    pub fn plain(
        out: impl Write + Send + 'static,
        steps: u64,
        first_step: u64,
        log_interval: u64,
    ) -> Self {
        let target = ProgressDrawTarget::hidden();
        Self::with_target(Box::new(out), target, steps, first_step, log_interval)
    }

    fn with_target(
        out: Box<dyn Write + Send>,
        target: ProgressDrawTarget,
        steps: u64,
        first_step: u64,
        log_interval: u64,
    ) -> Self {
        let has_bar = !target.is_hidden();
        let mut screen = Screen::new(out, target, steps, first_step);
        let screen = OutputQueue::spawn("console", WAITING, move |output| screen.show(output))
            .expect("the system can start a thread");
        let log_interval = log_interval.max(1);
        Self {
            screen,
            has_bar,
            steps,
            log_interval,
            first_step,
            started: Instant::now(),
            unit: "tokens",
        }
    }

    /// Sets what a loss is a mean over, in place of `tokens`.
    #[must_use]
    pub fn with_unit(mut self, unit: &'static str) -> Self {
        self.unit = unit;
        self
    }

    /// Prints any text, above the bar.
    pub fn line(&mut self, text: impl AsRef<str>) {
        self.screen.push(Show::Line(text.as_ref().to_string()));
    }

    /// Reports a step. The bar moves at each step. A line is printed for the first step, every
    /// multiple of the interval, the last step, and steps that were skipped.
    pub fn step(&mut self, metrics: &StepMetrics) {
        let step = metrics.step;
        if self.has_bar {
            self.screen.push_if_room(Show::Bar {
                step,
                message: brief(metrics, self.unit),
            });
        }
        let first = step == self.first_step + 1;
        if first || metrics.skipped || step.is_multiple_of(self.log_interval) || step == self.steps
        {
            let done = step.saturating_sub(self.first_step).max(1);
            let left = self.steps.saturating_sub(step);
            let eta = self.started.elapsed().mul_f64(left as f64 / done as f64);
            self.line(step_line(metrics, self.steps, eta, self.unit));
        }
    }

    /// Reports an evaluation.
    pub fn eval(&mut self, metrics: &EvalMetrics) {
        let EvalMetrics {
            step,
            data,
            eval_loss,
            mtp_losses,
            sop_loss,
            task,
            ..
        } = metrics;
        let data = data.as_deref().unwrap_or("unseen data");
        let further = mtp_losses
            .iter()
            .map(|loss| format!("{loss:.4}"))
            .collect::<Vec<_>>();
        let further = if further.is_empty() {
            String::new()
        } else {
            format!("; MTP {}", further.join(", "))
        };
        let further = match sop_loss {
            Some(loss) => format!("{further}; sentence order {loss:.4}"),
            None => further,
        };
        let means = task
            .iter()
            .map(|(name, mean)| format!("; {name} {mean:.4}"));
        let further = further + &means.collect::<String>();
        self.line(format!(
            "evaluation after step {step}: loss {eval_loss:.4} on {data}{further}"
        ));
    }

    /// Writes all queued lines and removes the bar.
    pub fn finish(self) {}
}

impl Drop for Console {
    fn drop(&mut self) {
        self.screen.push_if_room(Show::End);
        self.screen.flush(PATIENCE);
    }
}
