//! `megaburn info`: what a path holds, and how far it is.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use clap::Args;
use megaburn_checkpoint::{Checkpoint, CheckpointState, TensorSource, list_checkpoints};
use megaburn_models::source::ModelSource;
use megaburn_report::metrics::{MetricsRecord, read_metrics};
use megaburn_train::{RunInfo, TrainError};
use serde::Serialize;
use serde_json::{Value, json};

use super::{
    checkpoint::{Place, describe, open, size},
    print,
};

#[derive(Args)]
pub(super) struct InfoArgs {
    /// A run, a checkpoint, a folder of checkpoints, or a model of Hugging Face or torchtitan.
    #[arg(value_name = "PATH")]
    path: PathBuf,
    /// Print one JSON object instead of text.
    #[arg(long)]
    json: bool,
}

/// What a path holds.
#[derive(Debug, Default, Serialize)]
pub(super) struct Info {
    /// `run`, `checkpoint` or `model`.
    kind: &'static str,
    path: String,
    /// The id of the run, or of the run that wrote the checkpoint.
    run_id: Option<String>,
    /// `running`, `stopped`, `finished` or `failed`.
    pub(super) state: Option<String>,
    /// Why it stopped.
    pub(super) reason: Option<String>,
    /// The last step in the metrics, or the step of the checkpoint.
    pub(super) step: Option<u64>,
    /// The steps of the full run.
    steps: Option<u64>,
    /// The loss of that step.
    pub(super) loss: Option<f64>,
    /// The last validation loss, and its step.
    pub(super) eval_loss: Option<f64>,
    eval_step: Option<u64>,
    pub(super) tokens_per_second: Option<f64>,
    /// The steps of the complete checkpoints.
    checkpoints: Vec<u64>,
    layout: Option<String>,
    /// The model, in words.
    model: Option<String>,
    pub(super) parameters: Option<u64>,
    /// The types in which the weights are stored.
    dtypes: Vec<String>,
    /// Bytes of all files.
    bytes: u64,
}

impl InfoArgs {
    /// Prints what the path holds.
    ///
    /// # Errors
    /// It is none of these, or cannot be read.
    pub(super) fn run(self) -> Result<(), TrainError> {
        let info = Info::of(&self.path)?;
        if self.json {
            return print::result(json!(info));
        }
        info.lines().into_iter().try_for_each(print::result)
    }
}

impl Info {
    /// What the path holds.
    ///
    /// # Errors
    /// It is neither a run, a checkpoint nor a model, or cannot be read.
    pub(super) fn of(path: &Path) -> Result<Self, TrainError> {
        if let Some(run) = RunInfo::read(path)? {
            return Self::of_run(path, run);
        }
        // Neither a run nor a checkpoint: a model, if it has a configuration of one.
        if path.is_dir()
            && ["config.json", ".metadata"]
                .iter()
                .any(|name| path.join(name).is_file())
        {
            return Self::of_model(path);
        }
        match Place::of(path)? {
            Place::Checkpoint(path) => Self::of_checkpoint(&open(&path)?),
            Place::Folder { checkpoints, .. } => {
                let newest = Self::of_checkpoint(&open(path)?)?;
                Ok(Self {
                    checkpoints: steps_in(&checkpoints)?,
                    bytes: bytes_of(path),
                    ..newest
                })
            }
        }
    }

    fn of_run(path: &Path, run: RunInfo) -> Result<Self, TrainError> {
        let checkpoints = path.join("checkpoints");
        let steps = if checkpoints.is_dir() {
            steps_in(&checkpoints)?
        } else {
            Vec::new()
        };
        let newest = match steps.is_empty() {
            true => Self::default(),
            false => Self::of_checkpoint(&open(path)?)?,
        };
        let state = fs::read_to_string(path.join("state.json")).ok();
        let state: Value = state
            .and_then(|text| serde_json::from_str(&text).ok())
            .unwrap_or_default();
        let word = |key: &str| state[key].as_str().map(str::to_string);
        let mut info = Self {
            kind: "run",
            path: path.display().to_string(),
            run_id: Some(run.run_id),
            state: match (run.holder, word("state")) {
                (Some(holder), _) => Some(format!("running on {holder}")),
                // A run that was killed leaves this word.
                (None, Some(word)) if word == "running" => Some("killed".to_string()),
                (None, word) => word,
            },
            reason: word("reason"),
            steps: state["steps"].as_u64(),
            checkpoints: steps,
            bytes: bytes_of(path),
            ..newest
        };
        let metrics = path.join("metrics.jsonl");
        if metrics.is_file() {
            info.add_metrics(&read_metrics(&metrics)?);
        }
        Ok(info)
    }

    fn add_metrics(&mut self, records: &[MetricsRecord]) {
        for record in records {
            match record {
                MetricsRecord::Step(step) => {
                    self.step = Some(step.step);
                    self.loss = Some(step.loss).filter(|loss| loss.is_finite());
                    self.tokens_per_second = Some(step.tokens_per_second);
                }
                MetricsRecord::Eval(eval) => {
                    self.eval_loss = Some(eval.eval_loss);
                    self.eval_step = Some(eval.step);
                }
            }
        }
    }

    fn of_checkpoint(checkpoint: &Checkpoint) -> Result<Self, TrainError> {
        let manifest = checkpoint.manifest();
        let weights = checkpoint.headers().into_iter();
        let weights: Vec<_> = weights
            .filter(|header| header.name.starts_with("model."))
            .collect();
        let elements = |shape: &[usize]| shape.iter().product::<usize>() as u64;
        let dtypes: BTreeSet<_> = weights
            .iter()
            .map(|header| header.dtype.name().to_string())
            .collect();
        Ok(Self {
            kind: "checkpoint",
            path: checkpoint.path().display().to_string(),
            run_id: manifest.run_id.clone(),
            step: Some(manifest.step),
            layout: Some(manifest.layout.clone()),
            model: Some(describe(&manifest.model)),
            parameters: Some(weights.iter().map(|header| elements(&header.shape)).sum()),
            dtypes: dtypes.into_iter().collect(),
            bytes: manifest.files.iter().map(|file| file.bytes).sum(),
            ..Self::default()
        })
    }

    fn of_model(path: &Path) -> Result<Self, TrainError> {
        let source = ModelSource::open(path)?;
        let dtypes = source.params().map(|param| source.dtype(&param.path));
        let dtypes: BTreeSet<_> = dtypes
            .map(|dtype| Ok::<_, TrainError>(dtype?.name().to_string()))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            kind: "model",
            path: path.display().to_string(),
            model: Some(describe(&json!(source.config()))),
            parameters: Some(source.num_params() as u64),
            dtypes: dtypes.into_iter().collect(),
            bytes: bytes_of(path),
            ..Self::default()
        })
    }

    /// What was found, as lines of text.
    fn lines(&self) -> Vec<String> {
        let mut lines = vec![format!("{:9}{}", self.kind, self.path)];
        let mut add = |title: &str, text: Option<String>| {
            lines.extend(text.map(|text| format!("{title:9}{text}")));
        };
        let reason = self.reason.as_ref().map(|reason| format!(": {reason}"));
        add(
            "state",
            self.state
                .as_ref()
                .map(|state| format!("{state}{}", reason.unwrap_or_default())),
        );
        let steps = self.steps.map(|steps| format!(" of {steps}"));
        let loss = self.loss.map(|loss| format!(", loss {loss:.4}"));
        let rate = self
            .tokens_per_second
            .map(|rate| format!(", {rate:.0} tokens/s"));
        add(
            "step",
            self.step.map(|step| {
                let rest = [steps, loss, rate]
                    .into_iter()
                    .flatten()
                    .collect::<String>();
                format!("{step}{rest}")
            }),
        );
        let eval = self.eval_loss.zip(self.eval_step);
        add(
            "eval",
            eval.map(|(loss, step)| format!("loss {loss:.4} after step {step}")),
        );
        add("model", self.model.clone());
        add(
            "weights",
            (!self.dtypes.is_empty()).then(|| {
                format!(
                    "{} parameters in {}",
                    self.parameters.unwrap_or(0),
                    self.dtypes.join(" and ")
                )
            }),
        );
        add("layout", self.layout.clone());
        add(
            "saved",
            (!self.checkpoints.is_empty()).then(|| {
                let steps = self.checkpoints.iter().map(u64::to_string);
                format!("steps {}", steps.collect::<Vec<_>>().join(", "))
            }),
        );
        add("size", Some(size(self.bytes)));
        add("id", self.run_id.clone());
        lines
    }
}

/// The steps of the checkpoints in a folder, ascending.
fn steps_in(folder: &Path) -> Result<Vec<u64>, TrainError> {
    let listed = list_checkpoints(folder)?;
    let whole = listed
        .iter()
        .filter(|listed| listed.state == CheckpointState::Whole);
    let steps: BTreeSet<u64> = whole.filter_map(|listed| listed.step).collect();
    Ok(steps.into_iter().collect())
}

/// The bytes of all files below a folder. What cannot be read is left out, and links are not
/// followed.
fn bytes_of(path: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(path) else {
        return 0;
    };
    let bytes = entries
        .filter_map(Result::ok)
        .map(|entry| match entry.metadata() {
            Ok(found) if found.is_dir() => bytes_of(&entry.path()),
            Ok(found) if found.is_file() => found.len(),
            _ => 0,
        });
    bytes.sum()
}
