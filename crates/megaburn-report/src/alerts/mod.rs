//! Alerts: a command or a webhook hears of spikes of the loss, of numbers that are not finite, of
//! runs that stall, finish or fail.
//!
//! A thread delivers them, so that training never waits for it. A delivery that fails is a warning.

mod command;
mod delivery;
mod options;
mod spike;
mod webhook;

use std::{
    io,
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    thread,
    time::{Duration, Instant},
};

use serde_json::{Map, Value, json};

pub use options::{AlertEvent, AlertOptions};
pub use webhook::Webhook;

use crate::metrics::StepMetrics;
use delivery::Delivery;
use spike::Spikes;

/// How long the end of a run waits for the alerts that are being delivered.
const PATIENCE: Duration = Duration::from_secs(25);
/// The characters of an error that an alert has at most.
const LONGEST_ERROR: usize = 4000;

/// What the thread hears of.
enum Notice {
    /// The run makes progress.
    Progress { step: u64, at: Instant },
    /// Something happened.
    Alert {
        event: AlertEvent,
        step: u64,
        what: String,
        details: Map<String, Value>,
    },
}

/// The alerts of a run.
#[derive(Debug)]
pub struct Alerts {
    notices: Option<Sender<Notice>>,
    /// Disconnected once the thread has ended.
    ended: Receiver<()>,
    on: Vec<AlertEvent>,
    spikes: Spikes,
    step: u64,
}

impl Alerts {
    /// Starts the thread that delivers alerts. Without a command and a webhook there is none.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn start(options: AlertOptions) -> io::Result<Self> {
        let (notices, heard) = channel();
        let (ends, ended) = channel();
        let on = options.on.clone();
        let spikes = Spikes::new(options.loss_spike);
        let has_listener = options.command.is_some() || options.webhook.is_some();
        if has_listener {
            let deliver = move || {
                // Dropped at the end of the thread.
                let _ends = ends;
                watch(&heard, &Delivery::new(options));
            };
            thread::Builder::new()
                .name("alerts".into())
                .spawn(deliver)?;
        }
        Ok(Self {
            notices: has_listener.then_some(notices),
            ended,
            on,
            spikes,
            step: 0,
        })
    }

    /// A step has ended.
    pub fn step(&mut self, metrics: &StepMetrics) {
        self.step = metrics.step;
        self.progress();
        if metrics.skipped {
            return;
        }
        if let Some(mean) = self.spikes.check(metrics.loss) {
            let loss = metrics.loss;
            let what = format!(
                "the loss of step {} is {loss:.4}, after a mean of {mean:.4} over the 16 steps before",
                metrics.step
            );
            self.alert(
                AlertEvent::Spike,
                what,
                json!({"value": loss, "mean": mean}),
            );
        }
    }

    /// The run makes progress: it has evaluated, or saved a checkpoint.
    pub fn progress(&self) {
        self.notify(Notice::Progress {
            step: self.step,
            at: Instant::now(),
        });
    }

    /// The loss or the gradient of a step is not finite.
    pub fn not_finite(&mut self, step: u64, loss: f64, grad_norm: f64) {
        self.step = step;
        let what = format!("step {step} is not finite: loss {loss}, gradient norm {grad_norm}");
        self.alert(AlertEvent::Nan, what, json!({}));
    }

    /// The run has done its last step. Waits until the alerts are delivered, or at most 25 seconds.
    pub fn finish(self, loss: Option<f64>) {
        let loss_text = loss.map_or(String::new(), |loss| format!(", validation loss {loss:.4}"));
        let what = format!("finished after step {}{loss_text}", self.step);
        self.alert(AlertEvent::Finish, what, json!({"value": loss}));
        self.wait();
    }

    /// The run ends with an error and this exit code. Waits as [`finish`](Self::finish) does.
    pub fn fail(self, error: &str, exit_code: u8) {
        // A command that reads nothing is given what fits into a pipe.
        let error: String = error.chars().take(LONGEST_ERROR).collect();
        let what = format!("failed after step {}: {error}", self.step);
        let details = json!({"error": error, "exit_code": exit_code});
        self.alert(AlertEvent::Failure, what, details);
        self.wait();
    }

    /// The run was stopped on request, of which there is no alert. Waits as
    /// [`finish`](Self::finish) does.
    pub fn stop(self) {
        self.wait();
    }

    fn alert(&self, event: AlertEvent, what: String, details: Value) {
        if !self.on.contains(&event) {
            return;
        }
        let details = match details {
            Value::Object(details) => details,
            _ => Map::new(),
        };
        self.notify(Notice::Alert {
            event,
            step: self.step,
            what,
            details,
        });
    }

    fn notify(&self, notice: Notice) {
        if let Some(notices) = &self.notices {
            // The thread ends only after this sender is dropped.
            let _ = notices.send(notice);
        }
    }

    fn wait(mut self) {
        if self.notices.take().is_some() {
            let _ = self.ended.recv_timeout(PATIENCE);
        }
    }
}

impl Drop for Alerts {
    fn drop(&mut self) {
        if thread::panicking() && self.notices.is_some() {
            let what = format!("failed after step {}: a panic, which is a bug", self.step);
            self.alert(AlertEvent::Failure, what, json!({}));
            self.notices = None;
            let _ = self.ended.recv_timeout(PATIENCE);
        }
    }
}

/// Delivers alerts, and notices when there is no progress. A run stalls once until it makes
/// progress again, and not before its first step, because kernels may be compiled then.
fn watch(heard: &Receiver<Notice>, delivery: &Delivery) {
    let limit = delivery.stall_limit();
    let mut last: Option<(u64, Instant)> = None;
    loop {
        let left = last.map(|(_, at)| limit.saturating_sub(at.elapsed()));
        let notice = match left {
            Some(left) => heard.recv_timeout(left),
            None => heard.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match notice {
            Ok(Notice::Progress { step, at }) => last = (step > 0).then_some((step, at)),
            Ok(Notice::Alert {
                event,
                step,
                what,
                details,
            }) => delivery.send(event, step, &what, details),
            Err(RecvTimeoutError::Timeout) => {
                if let Some((step, at)) = last.take() {
                    let seconds = at.elapsed().as_secs_f64();
                    let what = format!("no step has ended for {seconds:.0} s, after step {step}");
                    let details = Map::from_iter([("value".to_string(), json!(seconds))]);
                    delivery.send(AlertEvent::Stall, step, &what, details);
                }
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}
