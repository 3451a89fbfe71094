//! Fine-tuning defaults: for keys that are not set in a run that starts from a trained model.

use megaburn_models::DecoderConfig;
use toml::Table;

use super::{TrainConfig, schedule::tenth};

/// Learning rate at the end of the warm-up, as is usual when all weights are fine-tuned.
const LR: f64 = 2e-5;
/// The warm-up as a fraction of the decay (the `warmup_ratio` of Transformers' recipes).
const WARMUP_FRACTION: f64 = 0.03;
/// The most tokens of a sample, even if the model supports longer sequences.
const MAX_SEQ_LEN: usize = 2048;

/// The largest power of two that is at most 2048 and at most the model's maximum sequence length.
fn seq_len(model: &DecoderConfig) -> usize {
    let most = model.max_seq_len.clamp(1, MAX_SEQ_LEN);
    1 << most.ilog2()
}

/// Sets the fine-tuning defaults of keys that are absent from `given`, the merged layers.
pub(super) fn set_defaults(config: &mut TrainConfig, given: &Table, model: &DecoderConfig) {
    let is_given = |section: &str, keys: &[&str]| {
        let section = given.get(section).and_then(|section| section.as_table());
        section.is_some_and(|section| keys.iter().any(|key| section.contains_key(*key)))
    };
    if !is_given("optimizer", &["lr"]) {
        config.optimizer.lr = LR;
    }
    if !is_given("optimizer", &["min_lr"]) {
        config.optimizer.min_lr = tenth(config.optimizer.lr);
    }
    if !is_given(
        "optimizer",
        &["warmup_steps", "warmup_samples", "warmup_fraction"],
    ) {
        config.optimizer.warmup_fraction = Some(WARMUP_FRACTION);
    }
    if !is_given("data", &["seq_len"]) {
        config.data.seq_len = seq_len(model);
    }
}

impl TrainConfig {
    /// The keys that have a fine-tuning default, as text for the console; `None` if the run starts
    /// from fresh weights or sets all of them differently.
    pub(crate) fn fine_tuning(&self, model: &DecoderConfig) -> Option<String> {
        self.model.init.as_ref()?;
        let optimizer = &self.optimizer;
        let keys = [
            (optimizer.lr == LR, format!("optimizer.lr {LR:e}")),
            (
                optimizer.min_lr == tenth(optimizer.lr),
                format!("optimizer.min_lr {:e}", optimizer.min_lr),
            ),
            (
                optimizer.warmup_fraction == Some(WARMUP_FRACTION),
                format!("optimizer.warmup_fraction {WARMUP_FRACTION}"),
            ),
            (
                self.data.seq_len == seq_len(model),
                format!("data.seq_len {}", self.data.seq_len),
            ),
        ];
        let set: Vec<String> = keys
            .into_iter()
            .filter(|(is_set, _)| *is_set)
            .map(|(_, text)| text)
            .collect();
        (!set.is_empty()).then(|| set.join(", "))
    }
}
