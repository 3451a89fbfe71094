//! The layout grid: models, and the layouts under which each must train as one rank does.

use std::collections::BTreeMap;

use megaburn::{
    mesh::Layout,
    train::{ConfigLayers, TrainConfig},
};
use serde::Deserialize;

/// The number of steps that a row trains.
pub const STEPS: u64 = 3;
/// Adam's first updates are g / (|g| + epsilon): with a tiny epsilon, an element whose gradient is
/// little more than rounding moves as far as any other, in a direction that rounding decides.
pub const EPSILON: f64 = 1e-5;

/// The contents of `layouts.toml`.
#[derive(Debug, Deserialize)]
pub struct Matrix {
    /// The runs.
    pub rows: Vec<Row>,
    /// The models by the name that rows refer to.
    pub models: BTreeMap<String, Model>,
}

/// One run of the grid.
#[derive(Debug, Deserialize)]
pub struct Row {
    /// A key of [`Matrix::models`].
    pub model: String,
    /// The layout of the ranks.
    pub layout: Layout,
    /// `train.global_batch`, which is padded if the layout does not split it.
    pub global_batch: usize,
    /// `train.micro_batch`.
    pub micro_batch: usize,
    /// `parallel.zero`.
    #[serde(default)]
    pub zero: u8,
    /// `parallel.zero_ranks`.
    pub zero_ranks: Option<usize>,
}

impl Row {
    /// The configuration of this row's run.
    pub fn config(&self, model: &Model, data: &str) -> TrainConfig {
        let mut config = model.config(data, self.global_batch, self.micro_batch);
        config.parallel.zero = self.zero;
        config.parallel.zero_ranks = self.zero_ranks;
        let samples = self.micro_batch * self.layout.dp;
        config.train.pad_batch = !self.global_batch.is_multiple_of(samples);
        // Several buckets, and parameters that are split over ranks.
        config.parallel.bucket_size = Some(3000);
        config
    }

    /// The model, the layout and the ZeRO stage, for messages.
    pub fn name(&self) -> String {
        let Self {
            model,
            layout,
            zero,
            zero_ranks,
            ..
        } = self;
        let zero = if *zero > 0 {
            format!(", zero {zero} {zero_ranks:?}")
        } else {
            String::new()
        };
        format!("{model}, {layout}{zero}")
    }
}

/// A model of the grid and the length of its sequences.
#[derive(Debug, Deserialize)]
pub struct Model {
    /// `data.seq_len`.
    pub seq_len: usize,
    rope_factor: Option<f64>,
    /// Keys of `[model]` in a run's configuration.
    #[serde(flatten)]
    pub sizes: toml::Table,
}

impl Matrix {
    /// Reads `layouts.toml`.
    ///
    /// # Panics
    /// If the file has an unknown form.
    pub fn read() -> Self {
        toml::from_str(include_str!("../../layouts.toml")).unwrap()
    }
}

impl Model {
    /// The configuration of a run of this model on the text at `data`.
    pub fn config(&self, data: &str, global_batch: usize, micro_batch: usize) -> TrainConfig {
        let scaling = self.rope_factor.map(|factor| {
            format!(
                "[model.rope_scaling]\nfactor = {factor}\noriginal_max_position_embeddings = 16"
            )
        });
        let pad_batch = !global_batch.is_multiple_of(micro_batch);
        let text = format!(
            "[model]\n{}{}
            [data]\npath = {data:?}\nseq_len = {}
            [train]\nsteps = {STEPS}\nglobal_batch = {global_batch}\nmicro_batch = {micro_batch}\npad_batch = {pad_batch}
            [optimizer]\nlr = 1e-3\neps = {EPSILON}\nwarmup_steps = 0",
            self.sizes,
            scaling.unwrap_or_default(),
            self.seq_len,
        );
        ConfigLayers::new()
            .with_text("layouts.toml", &text)
            .unwrap()
            .load()
            .unwrap()
    }
}
