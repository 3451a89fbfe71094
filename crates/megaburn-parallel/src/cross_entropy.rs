use burn::{config::Config, prelude::Int, tensor::Tensor};
use megaburn_collective::{Group, region::gather_from_sequence_to_replicas};
use megaburn_kernels::{CrossEntropyOptions, LinearOptions, cross_entropy, linear_cross_entropy};

use crate::error::ParallelError;

/// Configuration of a [`CrossEntropy`].
#[derive(Config, Debug)]
pub struct CrossEntropyConfig {
    /// Tokens of the vocabulary, without padding.
    pub vocab: usize,
    /// Share of the target's probability that is spread over the other tokens.
    #[config(default = 0.0)]
    pub label_smoothing: f64,
    /// Factor of the squared logarithm of the softmax's denominator, which is added to each loss
    /// (PaLM's z-loss; 1e-4 there).
    #[config(default = 0.0)]
    pub z_loss: f64,
    /// The logits become `cap * tanh(logit / cap)` before the softmax (Gemma 2); `None` leaves them
    /// as they are.
    pub soft_cap: Option<f64>,
    /// Labels with this value are ignored.
    #[config(default = -100)]
    pub ignore_index: i64,
}

impl CrossEntropyConfig {
    /// The loss over logits whose columns are split over `group`.
    ///
    /// # Errors
    /// `label_smoothing` is outside of `[0, 1)`, `z_loss` is negative, `soft_cap` is not positive, or
    /// the vocabulary is empty.
    pub fn init(&self, group: &Group) -> Result<CrossEntropy, ParallelError> {
        let Self {
            vocab,
            label_smoothing,
            z_loss,
            soft_cap,
            ..
        } = *self;
        let refuse = |why| {
            let layer = "CrossEntropy";
            let name = format!("vocab {vocab}");
            Err(ParallelError::Config { layer, name, why })
        };
        if !(0.0..1.0).contains(&label_smoothing) {
            return refuse(format!(
                "`label_smoothing` {label_smoothing} is not in [0, 1)"
            ));
        }
        if !(z_loss >= 0.0 && z_loss.is_finite()) {
            return refuse(format!("`z_loss` {z_loss} must be at least 0 and finite"));
        }
        if let Some(cap) = soft_cap.filter(|cap| !(*cap > 0.0 && cap.is_finite())) {
            return refuse(format!("`soft_cap` {cap} must be positive and finite"));
        }
        if vocab == 0 {
            return refuse("there are no tokens to predict".into());
        }
        Ok(CrossEntropy {
            config: self.clone(),
            group: group.clone(),
        })
    }
}

/// Cross-entropy of vocabulary-parallel logits, which are never gathered.
///
/// Padding columns of the vocabulary are left out of the softmax, so the loss does not depend on
/// the padding (Megatron-LM counts them). Label smoothing averages over the unpadded vocabulary,
/// with Megatron's factor `K / (K - 1)`.
///
/// Source: Megatron-LM `megatron/core/tensor_parallel/cross_entropy.py`.
/// # Collective
/// Forward: one small all-gather (four numbers per token from each member). Backward: none.
#[derive(Clone, Debug)]
pub struct CrossEntropy {
    config: CrossEntropyConfig,
    group: Group,
}

impl CrossEntropy {
    /// The same loss without label smoothing and z-loss, as evaluations report it.
    #[must_use]
    pub fn plain(&self) -> Self {
        let config = CrossEntropyConfig {
            label_smoothing: 0.0,
            z_loss: 0.0,
            ..self.config.clone()
        };
        Self {
            config,
            group: self.group.clone(),
        }
    }

    /// The loss of each token, in nats; 0 where the label is ignored. Computed in f32 (f64 for f64
    /// logits), whatever the dtype of the logits.
    ///
    /// # Shapes
    /// - logits: `[seq, batch, padded vocabulary / n]`, this rank's columns
    /// - labels: `[seq, batch]`, the same on every member; each a token of the vocabulary or
    ///   `ignore_index` (the loss of any other label is NaN)
    /// - output: `[seq, batch]`, the same on every member
    ///
    /// # Panics
    /// If the members together have fewer columns than the vocabulary has tokens.
    pub fn forward(&self, logits: Tensor<3>, labels: Tensor<2, Int>) -> Tensor<2> {
        let options = self.options(logits.dims()[2]);
        cross_entropy(logits, labels, options, |statistics| {
            self.exchanged(statistics)
        })
    }

    /// The losses of the logits `x W`, computed for a chunk of tokens at a time. Only the logits of
    /// one chunk, about as large as `x`, are in memory at once, and they are recomputed for the
    /// gradient.
    ///
    /// Source: Hsu et al., "Liger Kernel" (2024), <https://arxiv.org/abs/2410.10989>, section 3.2,
    /// from which the number of tokens per chunk is taken. Liger computes the gradients in the
    /// forward pass.
    /// # Shapes
    /// - x: `[seq, batch, d_model]`, the same on every member; its gradient is this rank's partial
    ///   sum
    /// - weight: `[padded vocabulary / n, d_model]`, this rank's tokens (transposed without
    ///   `out_in`)
    /// - labels and output as [`forward`](Self::forward)
    ///
    /// # Panics
    /// As [`forward`](Self::forward), or if `x` holds no token.
    pub fn forward_linear(
        &self,
        x: Tensor<3>,
        weight: Tensor<2>,
        labels: Tensor<2, Int>,
        linear: LinearOptions,
    ) -> Tensor<2> {
        let [seq, batch, d_model] = x.dims();
        let columns = weight.shape().num_elements() / d_model;
        let chunk = (seq * batch)
            .div_ceil(columns.div_ceil(d_model))
            .next_power_of_two();
        let exchange = |statistics| self.exchanged(statistics);
        let options = self.options(columns);
        linear_cross_entropy(x, weight, labels, linear, options, chunk, exchange)
    }

    /// The kernel options for this rank's `columns` of the logits.
    fn options(&self, columns: usize) -> CrossEntropyOptions {
        let CrossEntropyConfig {
            vocab,
            label_smoothing,
            z_loss,
            soft_cap,
            ignore_index,
        } = self.config;
        let ranks = self.group.size();
        assert!(
            columns * ranks >= vocab,
            "{ranks} x {columns} logits are too few for a vocabulary of {vocab}"
        );
        CrossEntropyOptions {
            vocab,
            part: self.group.rank(),
            smoothing: label_smoothing * vocab as f64 / (vocab as f64 - 1.0).max(1.0),
            z_loss,
            soft_cap,
            ignore_index,
        }
    }

    fn exchanged(&self, statistics: Tensor<3>) -> Tensor<3> {
        gather_from_sequence_to_replicas(statistics, &self.group)
    }
}
