//! Small runs, each with a configuration, a text and a folder.

use std::{
    fs,
    path::{Path, PathBuf},
};

use megaburn::{
    report::metrics::{MetricsRecord, StepMetrics, read_metrics},
    train::{ConfigLayers, TrainConfig},
};
use tempfile::TempDir;

use crate::text::{fresh_seed, write_random_text};

/// The number of steps of a run that is resumed half-way.
pub const STEPS: u64 = 20;

const CONFIG: &str = "
[model]
hidden = 32
ffn = 48
layers = 2
heads = 4
kv_heads = 2

[data]
seq_len = 16

[train]
global_batch = 8
micro_batch = 1
eval_interval = 7
eval_batches = 1
log_interval = 1000000
checkpoint_interval = 0

[optimizer]
lr = 1e-2
warmup_steps = 3
decay_steps = 20

[generate]
tokens = 0
";

/// A run in a temporary folder, which is removed when the value is dropped.
#[derive(Debug)]
pub struct Run {
    dir: TempDir,
}

impl Default for Run {
    fn default() -> Self {
        Self::new()
    }
}

impl Run {
    /// A new run. All runs of a process read the same text.
    pub fn new() -> Self {
        let run = Self {
            dir: tempfile::tempdir().unwrap(),
        };
        write_random_text(&run.path("text.txt"), 10_000, fresh_seed());
        let paths = format!(
            "[data]\npath = {:?}\n[run]\ndir = {:?}",
            run.path("text.txt"),
            run.path("run")
        );
        let config = ConfigLayers::new().with_text("run.rs", CONFIG).unwrap();
        let config = config.with_text("run.rs", &paths).unwrap().load().unwrap();
        fs::write(run.path("config.toml"), config.to_toml()).unwrap();
        run
    }

    /// The path of a file next to the run's folder, which is `run`. The configuration is
    /// `config.toml`.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The configuration of this run under `layout`, with `steps` steps.
    pub fn config(&self, layout: &str, steps: u64) -> TrainConfig {
        let layers = ConfigLayers::new()
            .with_file(self.path("config.toml"))
            .unwrap();
        let layers = layers
            .with_layout(layout)
            .and_then(|layers| layers.with_steps(steps));
        layers.and_then(ConfigLayers::load).unwrap()
    }

    /// The command line of this run, with `sets` as further `--set KEY=VALUE` arguments.
    pub fn args(&self, layout: &str, steps: u64, sets: &[&str]) -> Vec<String> {
        let config = self.path("config.toml").display().to_string();
        let steps = steps.to_string();
        let mut args = vec!["--config", &config, "--layout", layout, "--steps", &steps];
        args.extend(sets.iter().flat_map(|set| ["--set", set]));
        args.into_iter().map(String::from).collect()
    }

    /// The folder of checkpoints.
    pub fn checkpoints(&self) -> PathBuf {
        self.path("run/checkpoints")
    }

    /// The bytes of all tensors in the checkpoint of `step`, file by file.
    pub fn tensors(&self, step: u64) -> Vec<Vec<u8>> {
        let mut files = tensor_files(&self.checkpoints().join(format!("step-{step:08}")));
        files.sort();
        files.iter().map(|file| fs::read(file).unwrap()).collect()
    }

    /// The step records of `metrics.jsonl`; empty if there is no such file yet.
    pub fn steps(&self) -> Vec<StepMetrics> {
        let path = self.path("run/metrics.jsonl");
        let records = if path.exists() {
            read_metrics(path).unwrap()
        } else {
            Vec::new()
        };
        let step = |record| match record {
            MetricsRecord::Step(step) => Some(step),
            MetricsRecord::Eval(_) => None,
        };
        records.into_iter().filter_map(step).collect()
    }

    /// The bits of everything in [`steps`](Self::steps) that does not depend on the clock.
    pub fn numbers(&self) -> Vec<[u64; 5]> {
        let numbers = |s: StepMetrics| {
            [
                s.step,
                s.loss.to_bits(),
                s.grad_norm.to_bits(),
                s.lr.to_bits(),
                s.tokens,
            ]
        };
        self.steps().into_iter().map(numbers).collect()
    }
}

/// The files of a checkpoint that contain tensors.
pub fn tensor_files(checkpoint: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(checkpoint)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    files
        .filter(|path| path.extension().is_some_and(|end| end == "safetensors"))
        .collect()
}
