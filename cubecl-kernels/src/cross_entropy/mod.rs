//! Cross entropy of logits whose columns may be sharded over several ranks.
//!
//! - Each rank reads its columns once, for a row's maximum, sum of exponentials and target logit.
//! - The ranks exchange these statistics, four numbers per row, and each rank combines them.
//! - Backward reads the columns again and writes the gradient, in place of the logits if they have
//!   no other owner. Nothing else as large as the logits is saved.

mod fallback;
mod fused_linear;
#[cfg(feature = "cuda")]
mod kernels;
#[cfg(feature = "cuda")]
mod launch;
mod op;
mod options;
pub(crate) mod reference;
mod soft_cap;

use burn::tensor::{Int, Tensor};
use megaburn_autograd::arg_check::{self, float, int};

pub use fused_linear::linear_cross_entropy;
pub use options::CrossEntropyOptions;

/// `-log softmax(logits)[label]` of each token, with label smoothing if requested; 0 where the
/// label is ignored. With [`z_loss`](CrossEntropyOptions::z_loss), the squared logarithm of the sum
/// of exponentials times a factor is added. Computed in f32 (f64 for f64) whatever the dtype of the
/// logits, which is also the dtype of their gradient.
///
/// `exchange` concatenates the statistics of all parts along the first dimension, in the order of
/// the parts; if all columns are here it is the identity. Labels must be the same for all parts,
/// each a token or `ignore_index`. Any other label makes the loss and gradient NaN, because an
/// error would have to wait for the device.
///
/// On GPUs backward overwrites the logits with their gradient, unless they have another owner.
///
/// # Shapes
/// - logits: `[s, b, columns]`, labels and result: `[s, b]`
/// - `exchange`: `[1, 4, s * b]` to `[parts, 4, s * b]`
///
/// # Panics
/// If labels are not `[s, b]`, there is no token or no column, the parts have fewer columns than
/// the vocabulary has tokens, or an option is out of its range. For f64 logits on a GPU.
/// # Determinism
/// The result has the same bits in every run and on all parts.
pub fn cross_entropy(
    logits: Tensor<3>,
    labels: Tensor<2, Int>,
    options: CrossEntropyOptions,
    exchange: impl FnOnce(Tensor<3>) -> Tensor<3>,
) -> Tensor<2> {
    let name = "cross_entropy";
    let labels = labels.inner();
    arg_check::check(name, [float("logits", &logits), int("labels", &labels)]);
    options.check(name, logits.dims(), labels.dims());
    let columns = logits.dims()[2];
    let logits = match options.soft_cap {
        Some(cap) => soft_cap::capped(logits, cap),
        None => logits,
    };
    let statistics = op::statistics(logits.clone().inner(), labels.clone(), options);
    let statistics = exchanged(name, statistics, exchange, columns, options);
    let rows = op::combined(statistics, labels.clone(), columns, options);
    op::losses(logits, labels, rows, options)
}

/// The statistics of all parts. Panics unless their shape and dtype fit this part's and the parts
/// cover all tokens.
fn exchanged(
    name: &str,
    own: Tensor<3>,
    exchange: impl FnOnce(Tensor<3>) -> Tensor<3>,
    columns: usize,
    options: CrossEntropyOptions,
) -> Tensor<3> {
    let like = float("the logits' shard", &own);
    let [_, each, rows] = own.dims();
    let dtype = own.dtype();
    let all = exchange(own).inner();
    arg_check::check(name, [like, float("the exchanged statistics", &all)]);
    let found = all.dims();
    let parts = all.dims()[0];
    assert!(
        found == [parts, each, rows] && all.dtype() == dtype,
        "{name}: exchanged statistics are {found:?} {}, but must be [shards, {each}, {rows}] {}",
        all.dtype().name(),
        dtype.name()
    );
    let CrossEntropyOptions { vocab, part, .. } = options;
    assert!(
        part < parts && parts.saturating_mul(columns) >= vocab,
        "{name}: shard {part} of {parts} shards of {columns} columns does not fit a vocabulary \
        of {vocab}"
    );
    all
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use burn::tensor::{DType, TensorData};
    use megaburn_autograd::testing::{
        assert_close, assert_refused, assert_same_function, device, leaf, normal, quantized, values,
    };
    use rstest::rstest;

    use super::*;

    fn labels<const D: usize>(labels: [i64; D]) -> Tensor<2, Int> {
        Tensor::from_data(
            TensorData::new(labels.to_vec(), [D / 2, 2]),
            &device().inner(),
        )
    }

    #[rstest]
    fn it_is_its_reference(
        #[values(7, 9)] vocab: usize,
        #[values(0.0, 0.3)] smoothing: f64,
        #[values(-100, 2)] ignore_index: i64,
        #[values(1.0, 1e4)] size: f64,
        #[values((0.0, None), (0.3, None), (0.1, Some(1.3)))] (z_loss, soft_cap): (
            f64,
            Option<f64>,
        ),
    ) {
        let logits = leaf(normal([3, 2, 9]).mul_scalar(size));
        let labels = labels([0, ignore_index, 2, 6, 1, 5]);
        let options = CrossEntropyOptions {
            smoothing,
            z_loss: if size > 1.0 { 0.0 } else { z_loss },
            soft_cap,
            ignore_index,
            ..CrossEntropyOptions::new(vocab)
        };
        assert_same_function!(
            2e-6,
            [logits],
            cross_entropy(logits.clone(), labels.clone(), options, |x| x),
            crate::reference::cross_entropy(logits.clone(), labels.clone(), options)
        );
    }

    #[rstest]
    fn parts_give_what_the_whole_gives(
        #[values(0.0, 0.2)] smoothing: f64,
        #[values(0.0, 0.1)] z_loss: f64,
    ) {
        // 7 tokens in parts of 4 columns: the second part has one padding column, the third only
        // padding.
        let whole = normal([2, 2, 12]);
        let columns = 4;
        let labels = labels([6, 0, 3, 4]);
        let options = CrossEntropyOptions {
            smoothing,
            z_loss,
            ..CrossEntropyOptions::new(7)
        };
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
            assert_close(
                found_grad,
                grad.clone().narrow(2, part * columns, columns),
                1e-6,
            );
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
        // The gradient of a row sums to zero.
        assert!(values(grad.sum_dim(2)).iter().all(|sum| sum.abs() < 1e-2));
    }

    #[rstest]
    fn chunks_of_a_linear_map_give_what_all_logits_give(
        #[values(1, 4, 6, 9)] chunk: usize,
        #[values(false, true)] out_in: bool,
        #[values(None, Some(0.9))] soft_cap: Option<f64>,
    ) {
        let x = leaf(normal([3, 2, 4]));
        let w = leaf(normal(if out_in { [9, 4] } else { [4, 9] }));
        let labels = labels([0, -100, 2, 6, 1, 5]);
        let options = CrossEntropyOptions {
            smoothing: 0.1,
            z_loss: 0.2,
            soft_cap,
            ..CrossEntropyOptions::new(7)
        };
        let linear = crate::LinearOptions {
            out_in,
            ..Default::default()
        };
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

    /// Listeners count the gradients that they wait for.
    #[rstest]
    fn the_matrix_is_told_of_one_gradient_whatever_the_chunks(#[values(1, 4, 6)] chunk: usize) {
        let x = leaf(normal([3, 2, 4]));
        let w = leaf(normal([4, 9]));
        let labels = labels([0, -100, 2, 6, 1, 5]);
        let run = |main_grad: Option<megaburn_autograd::MainGrad>| {
            let linear = crate::LinearOptions {
                main_grad,
                ..Default::default()
            };
            let options = CrossEntropyOptions::new(7);
            let losses = linear_cross_entropy(
                x.clone(),
                w.clone(),
                labels.clone(),
                linear,
                options,
                chunk,
                |own| own,
            );
            losses.sum().backward()
        };
        let main_grad = megaburn_autograd::MainGrad::default();
        let told = Arc::new(AtomicUsize::new(0));
        main_grad.attach();
        let heard = told.clone();
        main_grad.on_gradient(move || {
            heard.fetch_add(1, Ordering::Relaxed);
        });
        drop(run(Some(main_grad.clone())));
        assert_eq!(told.load(Ordering::Relaxed), 1);
        let expected = w.grad(&run(None)).unwrap();
        assert_close(main_grad.take().unwrap(), expected, 2e-6);
    }

    #[test]
    fn views_give_what_their_copies_give() {
        let logits = normal([2, 9, 4]);
        let labels = labels([0, -100, 2, 6]).swap_dims(0, 1);
        let options = CrossEntropyOptions::new(7);
        // The layout in memory is `[columns, s, b]`.
        let view = || logits.clone().permute([2, 0, 1]).narrow(0, 1, 2);
        assert_same_function!(
            2e-6,
            [logits],
            cross_entropy(view(), labels.clone(), options, |own| own),
            crate::reference::cross_entropy(view(), labels.clone(), options)
        );
    }

    #[rstest]
    #[case(7)]
    #[case(-1)]
    #[case(8)]
    fn a_label_that_is_no_token_makes_loss_and_gradient_not_a_number(#[case] label: i64) {
        let logits = normal([2, 2, 9]);
        let options = CrossEntropyOptions {
            smoothing: 0.1,
            ..CrossEntropyOptions::new(7)
        };
        let losses = cross_entropy(
            logits.clone(),
            labels([0, label, 6, -100]),
            options,
            |own| own,
        );
        let is_nan = |x: &[f64]| x.iter().map(|x| x.is_nan()).collect::<Vec<_>>();
        assert_eq!(is_nan(&values(losses.clone())), [false, true, false, false]);
        let grad = values(logits.grad(&losses.sum().backward()).unwrap());
        let rows: Vec<_> = grad
            .chunks(9)
            .map(|row| is_nan(row).contains(&true))
            .collect();
        assert_eq!(rows, [false, true, false, false]);
        // An ignored label that is no token does not count.
        let options = CrossEntropyOptions {
            ignore_index: label,
            ..options
        };
        let losses = cross_entropy(logits.clone(), labels([0, label, 6, 1]), options, |own| own);
        assert_eq!(is_nan(&values(losses)), [false; 4]);
    }

    fn of(change: impl FnOnce(&mut CrossEntropyOptions)) {
        let mut options = CrossEntropyOptions::new(9);
        change(&mut options);
        cross_entropy(normal([2, 2, 9]), labels([0; 4]), options, |own| own);
    }

    fn exchanged_as(exchange: fn(Tensor<3>) -> Tensor<3>) {
        cross_entropy(
            normal([2, 2, 4]),
            labels([0; 4]),
            CrossEntropyOptions::new(7),
            exchange,
        );
    }

    fn chunked(x: Tensor<3>, w: Tensor<2>, labels: Tensor<2, Int>, chunk: usize) {
        let linear = crate::LinearOptions::default();
        let options = CrossEntropyOptions::new(9);
        linear_cross_entropy(x, w, labels, linear, options, chunk, |own| own);
    }

    #[rstest]
    #[case(|| drop(cross_entropy(normal([2, 3, 9]), labels([0; 6]), CrossEntropyOptions::new(9), |own| own)), "labels must be [s, b] of logits [2, 3, 9]")]
    #[case(|| drop(cross_entropy(normal([0, 2, 9]), labels([]), CrossEntropyOptions::new(9), |own| own)), "logits are [0, 2, 9] and have no tokens")]
    #[case(|| drop(cross_entropy(normal([1, 2, 0]), labels([0; 2]), CrossEntropyOptions::new(9), |own| own)), "shard 0 of 0 columns")]
    #[case(|| drop(cross_entropy(quantized([1, 2, 4]), labels([0; 2]), CrossEntropyOptions::new(4), |own| own)), "cross_entropy: logits is qfloat")]
    #[case(|| drop(cross_entropy(normal([1, 2, 4]), labels([0; 2]).cast(DType::U8), CrossEntropyOptions::new(4), |own| own)), "labels is u8, not i64 or i32")]
    #[case(|| of(|options| options.vocab = 0), "vocabulary size 0 is out of range")]
    #[case(|| of(|options| options.vocab = 10), "shard 0 of 1 shards of 9 columns does not fit a vocabulary of 10")]
    #[case(|| of(|options| options.part = 1), "shard 1 of 1 shards of 9 columns")]
    #[case(|| of(|options| options.part = usize::MAX), "shard 18446744073709551615 of 9 columns")]
    #[case(|| of(|options| options.smoothing = -0.1), "smoothing -0.1 is negative")]
    #[case(|| of(|options| options.smoothing = 1.2), "smoothing 1.2 is negative, or makes the target's probability")]
    #[case(|| of(|options| options.smoothing = f64::NAN), "smoothing NaN is negative")]
    #[case(|| of(|options| options.z_loss = -1.0), "z_loss -1 must be at least 0")]
    #[case(|| of(|options| options.soft_cap = Some(0.0)), "soft_cap Some(0.0) must be positive")]
    #[case(|| of(|options| options.ignore_index = 1 << 32), "ignore_index 4294967296 does not fit in 32 bits")]
    #[case(|| exchanged_as(|own| own), "shard 0 of 1 shards of 4 columns does not fit a vocabulary of 7")]
    #[case(|| exchanged_as(|own| own.narrow(2, 0, 2)), "exchanged statistics are [1, 4, 2] f32, but must be [shards, 4, 4] f32")]
    #[case(|| exchanged_as(|own| own.cast(DType::F64)), "exchanged statistics are [1, 4, 4] f64")]
    #[case(|| chunked(normal([2, 2, 4]), normal([4, 9]), labels([0; 4]), 0), "the chunk size must be at least 1 token")]
    #[case(|| chunked(normal([0, 2, 4]), normal([4, 9]), labels([]), 3), "x is [0, 2, 4] and has no tokens")]
    #[case(|| chunked(normal([1, 4, 4]), normal([4, 9]), labels([0; 4]), 3), "linear_cross_entropy: labels must be [s, b]")]
    #[case(|| chunked(normal([2, 2, 4]), normal([5, 9]), labels([0; 4]), 3), "a weight from 5 to 9 features")]
    #[case(|| chunked(normal([2, 2, 4]), quantized([4, 8]), labels([0; 4]), 3), "linear_cross_entropy: the weight is qfloat")]
    fn bad_input_is_refused(#[case] call: fn(), #[case] message: &str) {
        assert_refused(call, message);
    }
}
