//! The layout matrix: models, and the layouts under which each must train as one rank does.

use std::collections::BTreeMap;

use megaburn::{
    mesh::Layout,
    train::{ConfigLayers, TrainConfig},
};
use serde::Deserialize;

/// Steps that a row trains.
pub(crate) const STEPS: u64 = 3;
/// Adam's first updates are g / (|g| + epsilon): with a tiny epsilon, an element whose gradient is
/// little more than rounding moves as far as any other, in a direction that rounding decides.
pub(crate) const EPSILON: f64 = 1e-5;

/// `layouts.toml`.
#[derive(Deserialize)]
pub(crate) struct Matrix {
    pub(crate) rows: Vec<Row>,
    pub(crate) models: BTreeMap<String, Model>,
}

#[derive(Deserialize)]
pub(crate) struct Row {
    pub(crate) model: String,
    pub(crate) layout: Layout,
    pub(crate) global_batch: usize,
    pub(crate) micro_batch: usize,
    /// `parallel.zero` and `parallel.zero_ranks`.
    #[serde(default)]
    pub(crate) zero: u8,
    pub(crate) zero_ranks: Option<usize>,
}

impl Row {
    /// The run of this row.
    pub(crate) fn config(&self, model: &Model, data: &str) -> TrainConfig {
        let mut config = model.config(data, self.global_batch, self.micro_batch);
        (config.parallel.zero, config.parallel.zero_ranks) = (self.zero, self.zero_ranks);
        // Several buckets, and parameters that ranks cut.
        config.parallel.bucket_size = Some(3000);
        config
    }

    /// What tells it from others, for messages.
    pub(crate) fn name(&self) -> String {
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

#[derive(Deserialize)]
pub(crate) struct Model {
    pub(crate) seq_len: usize,
    rope_factor: Option<f64>,
    /// Keys of `[model]` in a run's configuration.
    #[serde(flatten)]
    pub(crate) sizes: toml::Table,
}

impl Matrix {
    pub(crate) fn read() -> Self {
        toml::from_str(include_str!("../layouts.toml")).unwrap()
    }
}

impl Model {
    pub(crate) fn config(
        &self,
        data: &str,
        global_batch: usize,
        micro_batch: usize,
    ) -> TrainConfig {
        let scaling = self.rope_factor.map(|factor| {
            format!(
                "[model.rope_scaling]\nfactor = {factor}\noriginal_max_position_embeddings = 16"
            )
        });
        let text = format!(
            "[model]\n{}{}
            [data]\npath = {data:?}\nseq_len = {}
            [train]\nsteps = {STEPS}\nglobal_batch = {global_batch}\nmicro_batch = {micro_batch}
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
