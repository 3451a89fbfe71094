//! How far the runs of a sweep are, and what they reached.

use std::{collections::BTreeMap, fs, path::PathBuf};

use megaburn_report::metrics::{MetricsRecord, read_metrics};
use megaburn_train::{RunPaths, TrainError};
use serde::Serialize;
use serde_json::Value as Json;

use super::{
    file::{Metric, Sweep, SweepRun},
    paths::{LOGS, failed_to_write},
};
use crate::cli::info::Info;

/// A run that failed, and its error.
pub(super) struct FailedRun {
    pub(super) name: String,
    pub(super) why: String,
}

/// A run of a sweep, as its folder shows it.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Outcome {
    pub(super) name: String,
    /// The settings by which it differs from others.
    pub(super) settings: BTreeMap<String, Json>,
    /// `waiting`, `running`, `stopped`, `killed`, `finished` or `failed`.
    pub(super) state: String,
    /// Why it failed.
    pub(super) why: Option<String>,
    pub(super) step: Option<u64>,
    pub(super) loss: Option<f64>,
    pub(super) eval_loss: Option<f64>,
    /// What the runs are compared by.
    pub(super) metric: Option<f64>,
    pub(super) parameters: Option<u64>,
    /// The tokens that it trained on.
    pub(super) tokens: Option<u64>,
    pub(super) tokens_per_second: Option<f64>,
}

impl Outcome {
    /// The outcomes of all runs, in the order of the file.
    pub(super) fn of_all(sweep: &Sweep, failed: &[FailedRun]) -> Vec<Self> {
        let of = |run: &SweepRun| {
            let mut found = Self::of(sweep, run);
            if let Some(failed) = failed.iter().find(|failed| failed.name == run.name) {
                found.state = "failed".into();
                found.why = Some(failed.why.clone());
            }
            found
        };
        sweep.runs.iter().map(of).collect()
    }

    fn of(sweep: &Sweep, run: &SweepRun) -> Self {
        let settings = run.settings.iter();
        let settings = settings.filter(|(key, _)| sweep.keys.contains(key));
        let as_json = |value: &toml::Value| serde_json::to_value(value).unwrap_or_default();
        let mut found = Self {
            name: run.name.clone(),
            settings: settings
                .map(|(key, value)| (key.clone(), as_json(value)))
                .collect(),
            state: "waiting".into(),
            ..Self::default()
        };
        let dir = sweep.dir.join(&run.name);
        // A folder that is no run yet, or was damaged, has nothing to show.
        let Ok(info) = Info::of(&dir) else {
            return found;
        };
        found.state = info.state.unwrap_or_else(|| "waiting".into());
        found.why = info.reason.filter(|_| found.state == "failed");
        found.step = info.step;
        found.loss = info.loss;
        found.eval_loss = info.eval_loss.filter(|loss| loss.is_finite());
        found.metric = match sweep.metric {
            Metric::EvalLoss => found.eval_loss.or(found.loss),
            Metric::Loss => found.loss,
        };
        found.parameters = info.parameters;
        found.tokens_per_second = info.tokens_per_second;
        let records = read_metrics(RunPaths::of(&dir).metrics).unwrap_or_default();
        let steps = || {
            records.iter().filter_map(|record| match record {
                MetricsRecord::Step(step) => Some(step),
                MetricsRecord::Eval(_) => None,
            })
        };
        let last = steps().next_back().and_then(|step| step.consumed_tokens);
        let sum = || steps().map(|step| step.tokens).sum();
        found.tokens = steps().next().map(|_| last.unwrap_or_else(sum));
        found
    }

    pub(super) fn is_finished(&self) -> bool {
        self.state == "finished"
    }
}

/// Whether a run is finished with the settings that the file has now. A run whose settings changed
/// is started again, and `megaburn train` says whether it can continue with them.
pub(super) fn is_done(sweep: &Sweep, run: &SweepRun) -> bool {
    let state = fs::read_to_string(RunPaths::of(&sweep.dir.join(&run.name)).state);
    let state: Json = state
        .ok()
        .and_then(|text| serde_json::from_str(&text).ok())
        .unwrap_or_default();
    let finished_with = fs::read_to_string(record_of(sweep, run)).ok();
    state["state"] == "finished" && finished_with == Some(description(sweep, run))
}

/// Remembers with which settings a run ended.
///
/// # Errors
/// The file cannot be written.
pub(super) fn remember(sweep: &Sweep, run: &SweepRun) -> Result<(), TrainError> {
    let path = record_of(sweep, run);
    fs::write(&path, description(sweep, run)).map_err(failed_to_write(&path))
}

fn record_of(sweep: &Sweep, run: &SweepRun) -> PathBuf {
    sweep.dir.join(LOGS).join(format!("{}.toml", run.name))
}

/// The files and settings of a run, as text.
fn description(sweep: &Sweep, run: &SweepRun) -> String {
    let files = sweep.config.iter().map(|file| {
        let text = fs::read_to_string(file).unwrap_or_default();
        format!("# {}\n{text}\n", file.display())
    });
    let settings = run
        .settings
        .iter()
        .map(|(key, value)| format!("{key} = {value}\n"));
    files.chain(settings).collect()
}
