use burn::{
    config::Config,
    prelude::{Bool, Int},
    tensor::{DType, Tensor},
};
use megaburn_collective::{
    Group,
    region::{max_over, reduce_from},
};

use crate::{ParallelError, known_gradient::attach_gradient};

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
/// Forward: two small all-reduces (the rows' maxima; their sums). Backward: none.
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
        let rows = self.rows(logits.clone().inner(), labels.inner());
        if !logits.device().is_autodiff() {
            return rows.loss();
        }
        let jacobian = rows.jacobian().cast(logits.dtype());
        attach_gradient(logits, rows.loss(), jacobian)
    }

    /// What loss and derivative have in common.
    fn rows(&self, logits: Tensor<3>, labels: Tensor<2, Int>) -> Rows {
        let CrossEntropyConfig { vocab, label_smoothing, ignore_index } = self.config;
        let [seq, batch, columns] = logits.dims();
        let ranks = self.group.size();
        assert!(columns * ranks >= vocab, "{ranks} x {columns} logits for {vocab} tokens");
        let dtype = if logits.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let start = self.group.rank() * columns;
        let tokens = vocab.saturating_sub(start).min(columns);
        let device = logits.device();
        let column = Tensor::<1, Int>::arange(0..columns as i64, &device).reshape([1, 1, columns]);
        let padding = (tokens < columns).then(|| {
            column.clone().greater_equal_elem(tokens as i64).expand([seq, batch, columns])
        });

        let logits = hide(logits.cast(dtype), &padding, f64::NEG_INFINITY);
        let max = max_over(logits.clone().max_dim(2), &self.group);
        let logits = logits - max;
        let local = (labels.clone() - start as i64).reshape([seq, batch, 1]);
        let target: Tensor<3, Bool> =
            local.expand([seq, batch, columns]).equal(column.expand([seq, batch, columns]));
        let exp = logits.clone().exp();
        let nothing = target.clone().bool_not();
        let mut sums =
            vec![exp.clone().sum_dim(2), logits.clone().mask_fill(nothing, 0.0).sum_dim(2)];
        let smoothing = label_smoothing * vocab as f64 / (vocab as f64 - 1.0).max(1.0);
        if smoothing > 0.0 {
            sums.push(hide(logits, &padding, 0.0).sum_dim(2));
        }
        let sums = reduce_from(Tensor::cat(sums, 2), &self.group);
        let ignored = labels.equal_elem(ignore_index);
        Rows { exp, target, padding, ignored, sums, smoothing, per_token: smoothing / vocab as f64 }
    }
}

/// `x` with `value` in the columns that belong to no token.
fn hide(x: Tensor<3>, padding: &Option<Tensor<3, Bool>>, value: f64) -> Tensor<3> {
    match padding {
        Some(padding) => x.mask_fill(padding.clone(), value),
        None => x,
    }
}

/// This rank's columns of some tokens' softmax. Logits `x` are relative to their row's maximum.
struct Rows {
    /// `exp(x)`, `[seq, batch, columns]`.
    exp: Tensor<3>,
    target: Tensor<3, Bool>,
    padding: Option<Tensor<3, Bool>>,
    /// `[seq, batch]`.
    ignored: Tensor<2, Bool>,
    /// Over the whole vocabulary: sum of `exp(x)`, the target's `x` and, if smoothed, the sum of `x`.
    sums: Tensor<3>,
    smoothing: f64,
    per_token: f64,
}

impl Rows {
    fn sum(&self, index: usize) -> Tensor<3> {
        self.sums.clone().narrow(2, index, 1)
    }

    /// `log(sum exp) - (1 - s) x_target - s mean(x)`.
    fn loss(&self) -> Tensor<2> {
        let mut loss = self.sum(0).log() - self.sum(1) * (1.0 - self.smoothing);
        if self.smoothing > 0.0 {
            loss = loss - self.sum(2) * self.per_token;
        }
        let [seq, batch] = self.ignored.dims();
        loss.reshape([seq, batch]).mask_fill(self.ignored.clone(), 0.0)
    }

    /// Its derivative by this rank's logits.
    fn jacobian(&self) -> Tensor<3> {
        let target = self.target.clone().float().cast(self.exp.dtype());
        let mut jacobian = self.exp.clone() / self.sum(0) - target * (1.0 - self.smoothing);
        if self.smoothing > 0.0 {
            jacobian = hide(jacobian - self.per_token, &self.padding, 0.0);
        }
        let ignored = self.ignored.clone().unsqueeze_dim::<3>(2).expand(self.exp.dims());
        jacobian.mask_fill(ignored, 0.0)
    }
}
