use burn::{config::Config, prelude::Int, tensor::Tensor};
use megaburn_collective::{Group, region::gather_from_sequence_to_replicas};
use megaburn_kernels::{CrossEntropyOptions, cross_entropy};

use crate::ParallelError;

/// Configuration of a [`CrossEntropy`].
#[derive(Config, Debug)]
pub struct CrossEntropyConfig {
    /// Tokens of the vocabulary, without padding.
    pub vocab: usize,
    /// Share of the target's probability that is spread over the other tokens.
    #[config(default = 0.0)]
    pub label_smoothing: f64,
    /// Labels with this value take no part.
    #[config(default = -100)]
    pub ignore_index: i64,
}

impl CrossEntropyConfig {
    /// The loss over logits whose columns are split over `group`.
    ///
    /// # Errors
    /// A smoothing outside of `[0, 1)`, or a vocabulary without tokens.
    pub fn init(&self, group: &Group) -> Result<CrossEntropy, ParallelError> {
        let Self { vocab, label_smoothing, .. } = *self;
        let refuse = |why| {
            let (layer, name) = ("CrossEntropy", format!("vocab {vocab}"));
            Err(ParallelError::Config { layer, name, why })
        };
        if !(0.0..1.0).contains(&label_smoothing) {
            return refuse(format!("`label_smoothing` {label_smoothing} is not in [0, 1)"));
        }
        if vocab == 0 {
            return refuse("there is no token to predict".into());
        }
        Ok(CrossEntropy { config: self.clone(), group: group.clone() })
    }
}

/// Cross entropy of vocabulary-parallel logits, without ever gathering them.
///
/// Columns of the padded vocabulary that belong to no token are left out of the softmax, so the
/// loss does not depend on the padding (Megatron-LM counts them). Label smoothing takes its mean
/// over the real vocabulary, with Megatron's factor `K / (K - 1)`.
///
/// Source: Megatron-LM `megatron/core/tensor_parallel/cross_entropy.py`.
/// # Collective
/// Forward: one small all-gather (four numbers a token of each member). Backward: none.
#[derive(Clone, Debug)]
pub struct CrossEntropy {
    config: CrossEntropyConfig,
    group: Group,
}

impl CrossEntropy {
    /// The loss of each token, in nats; 0 where the label is ignored. Computed in f32 (f64 for f64
    /// logits), whatever the logits' dtype.
    ///
    /// # Shapes
    /// - logits: `[seq, batch, padded vocabulary / n]`, this rank's columns
    /// - labels: `[seq, batch]`, the same on every member; each a token of the vocabulary or
    ///   `ignore_index` (the loss of any other label is meaningless)
    /// - output: `[seq, batch]`, the same on every member
    ///
    /// # Panics
    /// If the members' columns are fewer than the vocabulary's tokens.
    pub fn forward(&self, logits: Tensor<3>, labels: Tensor<2, Int>) -> Tensor<2> {
        let CrossEntropyConfig { vocab, label_smoothing, ignore_index } = self.config;
        let (ranks, columns) = (self.group.size(), logits.dims()[2]);
        assert!(columns * ranks >= vocab, "{ranks} x {columns} logits for {vocab} tokens");
        let options = CrossEntropyOptions {
            vocab,
            part: self.group.rank(),
            smoothing: label_smoothing * vocab as f64 / (vocab as f64 - 1.0).max(1.0),
            ignore_index,
        };
        cross_entropy(logits, labels, options, |statistics| {
            gather_from_sequence_to_replicas(statistics, &self.group)
        })
    }
}
