//! What is usual where a run starts from a trained model, for keys that the configuration leaves out.

use megaburn_models::DecoderConfig;
use toml::Table;

use super::{TrainConfig, schedule::tenth};

/// Learning rate at the end of the warm-up, as is usual for the fine-tuning of all weights.
const LR: f64 = 2e-5;
/// Part of the decay that warms up (the `warmup_ratio` of Transformers' recipes).
const WARMUP_FRACTION: f64 = 0.03;
/// Tokens of a sample at most, however long the model's sequences may be.
const MAX_SEQ_LEN: usize = 2048;

/// The largest power of two that is no longer than the model's sequences, and at most 2048.
fn seq_len(model: &DecoderConfig) -> usize {
    let most = model.max_seq_len.clamp(1, MAX_SEQ_LEN);
    1 << most.ilog2()
}

/// Sets what `given`, the configuration's layers, leaves out.
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
    /// Which keys have the values that a run from another model takes where they are left out, for
    /// people; none where there is no other model or all were set otherwise.
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
