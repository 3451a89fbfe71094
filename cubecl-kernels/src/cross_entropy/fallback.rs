//! The steps composed of tensor operations.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::prelude::Bool;
use burn::tensor::{DType, Int, Tensor, TensorData};
use megaburn_autograd::IntoPrimitive;
use megaburn_autograd::backend_ops::compute_dtype;
use megaburn_autograd::on_composed_backends;

use super::op::VocabParallelLoss;
use super::options::CrossEntropyOptions;

on_composed_backends! {
    impl VocabParallelLoss {
        fn statistics(
            logits: FloatTensor<Self>,
            labels: IntTensor<Self>,
            options: CrossEntropyOptions,
        ) -> FloatTensor<Self> {
            let labels = Tensor::from_primitive::<Self>(labels);
            Self::unwrap(statistics(Self::wrap(logits), labels, options))
        }

        fn combined(
            statistics: FloatTensor<Self>,
            labels: IntTensor<Self>,
            columns: usize,
            options: CrossEntropyOptions,
        ) -> FloatTensor<Self> {
            Self::unwrap(combined(
                Self::wrap(statistics),
                Tensor::from_primitive::<Self>(labels),
                columns,
                options,
            ))
        }

        fn logit_gradient(
            logits: FloatTensor<Self>,
            labels: IntTensor<Self>,
            rows: FloatTensor<Self>,
            grad: FloatTensor<Self>,
            options: CrossEntropyOptions,
        ) -> FloatTensor<Self> {
            let rows = Self::wrap(rows);
            let grad = Self::wrap(grad);
            Self::unwrap(logit_gradient(
                Self::wrap(logits),
                Tensor::from_primitive::<Self>(labels),
                rows,
                grad,
                options,
            ))
        }
    }
}

/// The lower bound of a row's maximum: the maximum of a part without tokens, whose sum of
/// exponentials is 0. It is finite, because the difference of two infinities is NaN.
pub(super) const LOWEST: f32 = -3.0e38;

/// See [`VocabParallelLoss::statistics`].
pub(super) fn statistics(
    logits: Tensor<3>,
    labels: Tensor<2, Int>,
    options: CrossEntropyOptions,
) -> Tensor<3> {
    let columns = Columns::new(&logits, labels, options);
    let x = columns.only_tokens(columns.wide(logits), f64::NEG_INFINITY);
    let max = x.clone().max_dim(1).clamp_min(LOWEST);
    let [rows, _] = x.dims();
    let target = x
        .clone()
        .gather(1, columns.local.clone())
        .mask_fill(columns.elsewhere(), 0.0);
    let x = x - max.clone();
    let sum = x.clone().exp().sum_dim(1);
    let excess = columns.only_tokens(x, 0.0).sum_dim(1);
    Tensor::cat(vec![max, sum, target, excess], 1)
        .transpose()
        .reshape([1, 4, rows])
}

/// See [`VocabParallelLoss::combined`].
pub(super) fn combined(
    statistics: Tensor<3>,
    labels: Tensor<2, Int>,
    columns: usize,
    options: CrossEntropyOptions,
) -> Tensor<2> {
    let [parts, _, rows] = statistics.dims();
    let of = |which| {
        statistics
            .clone()
            .narrow(1, which, 1)
            .reshape([parts, rows])
    };
    let max = of(0).max_dim(0);
    let above = of(0) - max.clone();
    let labels = labels.reshape([1, rows]);
    let is_token = labels.clone().greater_equal_elem(0);
    let is_token = is_token.bool_and(labels.clone().lower_elem(options.vocab as i64));
    let sum = (of(1) * above.clone().exp())
        .sum_dim(0)
        .mask_fill(is_token.bool_not(), f64::NAN);
    let target = of(2).sum_dim(0) - max.clone();
    let log_sum = sum.clone().log();
    let mut loss = log_sum.clone() - target * options.on_target();
    if options.smoothing > 0.0 {
        let tokens = (0..parts)
            .map(|part| options.tokens_of(part, columns) as f64)
            .collect();
        let tokens = TensorData::new::<f64, _>(tokens, [parts, 1]);
        let tokens = Tensor::from_data(tokens, (&loss.device(), loss.dtype()));
        let excess = (of(3) + above * tokens).sum_dim(0);
        loss = loss - excess * options.on_each();
    }
    if options.z_loss > 0.0 {
        let whole = log_sum + max.clone();
        loss = loss + whole.clone() * whole * options.z_loss;
    }
    let ignored = labels.equal_elem(options.ignore_index);
    Tensor::cat(vec![max, sum, loss.mask_fill(ignored, 0.0)], 0)
}

/// See [`VocabParallelLoss::logit_gradient`].
pub(super) fn logit_gradient(
    logits: Tensor<3>,
    labels: Tensor<2, Int>,
    rows: Tensor<2>,
    grad: Tensor<2>,
    options: CrossEntropyOptions,
) -> Tensor<3> {
    let shape = logits.dims();
    let dtype = logits.dtype();
    let columns = Columns::new(&logits, labels, options);
    let x = columns.only_tokens(columns.wide(logits), f64::NEG_INFINITY);
    let [num_rows, width] = x.dims();
    let of = |which| rows.clone().narrow(0, which, 1).reshape([num_rows, 1]);
    // The probabilities, times the growth of the z-loss with the logarithm of their sum.
    let p = (x - of(0)).exp() / of(1);
    let p = if options.z_loss > 0.0 {
        p * ((of(0) + of(1).log()) * (2.0 * options.z_loss) + 1.0)
    } else {
        p
    };
    let target = columns
        .local
        .clone()
        .expand([num_rows, width])
        .equal(columns.index());
    let target = target.bool_and(columns.elsewhere().bool_not().expand([num_rows, width]));
    let wanted = p.zeros_like().mask_fill(target, options.on_target());
    let wanted = columns.only_tokens(wanted.add_scalar(options.on_each()), 0.0);
    let grad = grad.cast(p.dtype()).reshape([num_rows, 1]);
    let ignored = columns.ignored.clone().expand([num_rows, width]);
    ((p - wanted) * grad)
        .mask_fill(ignored, 0.0)
        .cast(dtype)
        .reshape(shape)
}

/// The columns of this part, and where the labels are among them.
struct Columns {
    shape: [usize; 2],
    /// The number of columns that belong to tokens; they come first.
    tokens: usize,
    /// The label's column, `[rows, 1]`; 0 if it is in another part.
    local: Tensor<2, Int>,
    here: Tensor<2, Bool>,
    ignored: Tensor<2, Bool>,
}

impl Columns {
    fn new(logits: &Tensor<3>, labels: Tensor<2, Int>, options: CrossEntropyOptions) -> Self {
        let [s, b, columns] = logits.dims();
        let tokens = options.tokens_of(options.part, columns);
        let labels = labels.reshape([s * b, 1]);
        let ignored = labels.clone().equal_elem(options.ignore_index);
        let local = labels - options.first(columns) as i64;
        let here = local.clone().greater_equal_elem(0);
        let here = here.bool_and(local.clone().lower_elem(tokens as i64));
        let local = local.mask_fill(here.clone().bool_not(), 0);
        Self {
            shape: [s * b, columns],
            tokens,
            local,
            here,
            ignored,
        }
    }

    fn wide(&self, logits: Tensor<3>) -> Tensor<2> {
        let dtype: DType = compute_dtype(logits.dtype()).into();
        logits.cast(dtype).reshape(self.shape)
    }

    fn elsewhere(&self) -> Tensor<2, Bool> {
        self.here.clone().bool_not()
    }

    /// The index of each column.
    fn index(&self) -> Tensor<2, Int> {
        let index = Tensor::<1, Int>::arange(0..self.shape[1] as i64, &self.local.device());
        index.unsqueeze::<2>().expand(self.shape)
    }

    /// `x` with `value` in the padding columns.
    fn only_tokens(&self, x: Tensor<2>, value: f64) -> Tensor<2> {
        if self.tokens < self.shape[1] {
            x.mask_fill(self.index().greater_equal_elem(self.tokens as i64), value)
        } else {
            x
        }
    }
}
