//! `state.json`: the state of a run, for supervisors and scripts.

use std::{sync::Arc, thread};

use serde::Serialize;

use crate::{
    error::TrainError,
    run_folder::{RunFolder, names::STATE},
    stop::StopReason,
    time::now,
};

/// A state, as it is written to the file.
#[derive(Debug, Serialize)]
struct RunState<'a> {
    /// `running`, `stopped`, `finished` or `failed`.
    state: &'a str,
    /// Steps that are done and saved; during a run, the step of the newest checkpoint.
    step: u64,
    /// Steps of the full run.
    steps: u64,
    /// What stopped the run, or its error.
    reason: Option<String>,
    /// When the file was written, in UTC.
    time: String,
}

/// Keeps `state.json` up to date. A run that is killed leaves `running` in it. A failed write is
/// only a warning.
#[derive(Debug)]
pub(crate) struct StateFile {
    folder: Arc<RunFolder>,
    step: u64,
    /// The value of `step` before the newest checkpoint was saved.
    before: u64,
    steps: u64,
    ended: bool,
}

impl StateFile {
    /// The run starts, or continues after `step` of `steps` steps.
    pub(crate) fn begin(folder: Arc<RunFolder>, step: u64, steps: u64) -> Self {
        let this = Self {
            folder,
            step,
            before: step,
            steps,
            ended: false,
        };
        this.write("running", None);
        this
    }

    /// A checkpoint of this step was committed.
    pub(crate) fn saved(&mut self, step: u64) {
        self.before = std::mem::replace(&mut self.step, step);
        self.write("running", None);
    }

    /// The checkpoint of this step was set aside, if it is the newest.
    pub(crate) fn set_aside(&mut self, step: u64) {
        if self.step == step {
            self.step = self.before;
        }
    }

    /// The run stopped, and its last step is saved.
    pub(crate) fn stopped(&mut self, reason: StopReason) {
        self.end("stopped", Some(reason.to_string()));
    }

    /// The run has done all its steps.
    pub(crate) fn finished(&mut self) {
        self.end("finished", None);
    }

    /// The run failed; it can be resumed from the newest checkpoint.
    pub(crate) fn failed(&mut self, error: &TrainError) {
        self.end("failed", Some(error.to_string()));
    }

    /// The first end counts; later calls change nothing.
    fn end(&mut self, state: &str, reason: Option<String>) {
        if !self.ended {
            self.ended = true;
            self.write(state, reason);
        }
    }

    fn write(&self, state: &str, reason: Option<String>) {
        let state = RunState {
            state,
            step: self.step,
            steps: self.steps,
            reason,
            time: now(),
        };
        let text = serde_json::to_string(&state).expect("the state is serializable") + "\n";
        if let Err(error) = self.folder.write(STATE, text.as_bytes()) {
            tracing::warn!("cannot write the run's state: {error}");
        }
    }
}

impl Drop for StateFile {
    fn drop(&mut self) {
        if !self.ended {
            let why = if thread::panicking() {
                "a panic, which is a bug"
            } else {
                "it did not begin"
            };
            self.end("failed", Some(why.into()));
        }
    }
}
