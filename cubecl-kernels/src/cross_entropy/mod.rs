//! Cross entropy of logits whose columns may be split over several ranks.
//!
//! 1. Each rank reads its columns once: a row's maximum, its sum of exponentials, the target's logit.
//! 2. The ranks exchange these four numbers a row, and each combines all ranks'.
//! 3. Backward reads the columns again and writes the gradient, over them where nobody else holds
//!    them: nothing as large as the logits is kept besides.

mod chunked;
mod composed;
#[cfg(feature = "cuda")]
mod cube;
#[cfg(feature = "cuda")]
mod kernels;
mod op;
pub(crate) mod reference;

use burn::tensor::{Int, Tensor};

pub use chunked::linear_cross_entropy;

/// What is predicted, and which columns of the logits are here.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CrossEntropyOptions {
    /// Tokens of the vocabulary. Columns behind them are padding and take no part.
    pub vocab: usize,
    /// Which of the equal parts of the columns is here, from 0.
    pub part: usize,
    /// Share of the target's probability that is spread evenly over the whole vocabulary, the
    /// target included.
    pub smoothing: f64,
    /// Labels with this value take no part.
    pub ignore_index: i64,
}

impl CrossEntropyOptions {
    /// All columns here, no smoothing, -100 ignored.
    pub fn new(vocab: usize) -> Self {
        Self { vocab, part: 0, smoothing: 0.0, ignore_index: -100 }
    }

    /// Those of a part's columns that are tokens.
    fn tokens_of(&self, part: usize, columns: usize) -> usize {
        self.vocab.saturating_sub(part * columns).min(columns)
    }

    /// The token of the first column.
    fn first(&self, columns: usize) -> usize {
        self.part * columns
    }

    /// What a label asks of its own token beyond what it asks of each.
    fn on_target(&self) -> f64 {
        1.0 - self.smoothing
    }

    /// What a label asks of every token.
    fn on_each(&self) -> f64 {
        self.smoothing / self.vocab as f64
    }
}

/// `-log softmax(logits)[label]` of each token, smoothed if asked for; 0 where the label is ignored.
/// Computed in f32 (f64 for f64), whatever the logits' dtype; the gradient comes in theirs.
///
/// `exchange` joins the parts' statistics along the first dimension, in the order of the parts; with
/// all columns here it is the identity. Labels must be the same for all parts, each a token or
/// `ignore_index` (the loss of any other is meaningless).
///
/// On GPUs backward overwrites the logits with their gradient unless somebody else holds them.
///
/// # Shapes
/// - logits: `[s, b, columns]`, labels and result: `[s, b]`
/// - `exchange`: `[1, 4, s * b]` to `[parts, 4, s * b]`
///
/// # Panics
/// For logits of f64 on a GPU.
/// # Determinism
/// The same bits each time, and the same on all parts.
pub fn cross_entropy(
    logits: Tensor<3>,
    labels: Tensor<2, Int>,
    options: CrossEntropyOptions,
    exchange: impl FnOnce(Tensor<3>) -> Tensor<3>,
) -> Tensor<2> {
    let labels = labels.inner();
    let columns = logits.dims()[2];
    let statistics = op::statistics(logits.clone().inner(), labels.clone(), options);
    let rows = op::combined(exchange(statistics), labels.clone(), columns, options);
    op::losses(logits, labels, rows, options)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, TensorData};
    use rstest::rstest;

    use super::*;
    use crate::testing::{assert_close, assert_same_function, device, leaf, normal, values};

    fn labels<const D: usize>(labels: [i64; D]) -> Tensor<2, Int> {
        Tensor::from_data(TensorData::new(labels.to_vec(), [D / 2, 2]), &device().inner())
    }

    #[rstest]
    fn it_is_its_reference(
        #[values(7, 9)] vocab: usize,
        #[values(0.0, 0.3)] smoothing: f64,
        #[values(-100, 2)] ignore_index: i64,
        #[values(1.0, 1e4)] size: f64,
    ) {
        let logits = leaf(normal([3, 2, 9]).mul_scalar(size));
        let labels = labels([0, ignore_index, 2, 6, 1, 5]);
        let options =
            CrossEntropyOptions { smoothing, ignore_index, ..CrossEntropyOptions::new(vocab) };
        assert_same_function!(
            2e-6,
            [logits],
            cross_entropy(logits.clone(), labels.clone(), options, |x| x),
            crate::reference::cross_entropy(logits.clone(), labels.clone(), options)
        );
    }

    #[rstest]
    fn parts_give_what_the_whole_gives(#[values(0.0, 0.2)] smoothing: f64) {
        // 7 tokens in parts of 4: the second has one column of padding, the third nothing else.
        let (whole, columns) = (normal([2, 2, 12]), 4);
        let labels = labels([6, 0, 3, 4]);
        let options = CrossEntropyOptions { smoothing, ..CrossEntropyOptions::new(7) };
        let part = |part| (whole.clone().narrow(2, part * columns, columns), part);
        let all: Vec<_> = (0..3)
            .map(|i| {
                let (logits, part) = part(i);
                let options = CrossEntropyOptions { part, ..options };
                op::statistics(logits.inner(), labels.clone(), options)
            })
            .collect();
        let weight = normal([2, 2]);
        let run = |logits: Tensor<3>, options, all: Option<Tensor<3>>| {
            let logits = leaf(logits);
            let exchange = |own| all.unwrap_or(own);
            let losses = cross_entropy(logits.clone(), labels.clone(), options, exchange);
            let grads = (losses.clone() * weight.clone()).sum().backward();
            (losses, logits.grad(&grads).unwrap())
        };
        let (losses, grad) = run(whole.clone(), options, None);
        for i in 0..3 {
            let (logits, part) = part(i);
            let options = CrossEntropyOptions { part, ..options };
            let (found, found_grad) = run(logits, options, Some(Tensor::cat(all.clone(), 0)));
            assert_close(found, losses.clone(), 1e-6);
            assert_close(found_grad, grad.clone().narrow(2, part * columns, columns), 1e-6);
        }
    }

    #[test]
    fn narrow_logits_have_losses_in_f32_and_narrow_gradients() {
        let logits = leaf(normal([2, 2, 5]).cast(DType::BF16));
        let labels = labels([0, 1, 2, 3]);
        let losses = cross_entropy(logits.clone(), labels, CrossEntropyOptions::new(5), |x| x);
        assert_eq!(losses.dtype(), DType::F32);
        let grad = logits.grad(&losses.sum().backward()).unwrap();
        assert_eq!(grad.dtype(), DType::BF16);
        // The gradient of a row sums to nothing.
        assert!(values(grad.sum_dim(2)).iter().all(|sum| sum.abs() < 1e-2));
    }

    #[rstest]
    fn chunks_of_a_linear_map_give_what_all_logits_give(
        #[values(1, 4, 6, 9)] chunk: usize,
        #[values(false, true)] out_in: bool,
    ) {
        let x = leaf(normal([3, 2, 4]));
        let w = leaf(normal(if out_in { [9, 4] } else { [4, 9] }));
        let labels = labels([0, -100, 2, 6, 1, 5]);
        let options = CrossEntropyOptions { smoothing: 0.1, ..CrossEntropyOptions::new(7) };
        let linear = crate::LinearOptions { out_in, main_grad: None };
        assert_same_function!(
            2e-6,
            [x, w],
            linear_cross_entropy(
                x.clone(),
                w.clone(),
                labels.clone(),
                linear.clone(),
                options,
                chunk,
                |own| own
            ),
            crate::reference::cross_entropy(
                crate::reference::linear(x.clone(), w.clone(), None, linear.clone()),
                labels.clone(),
                options
            )
        );
    }
}
