//! The losses of a linear map's outputs without materializing all of them. The logits are computed
//! in chunks of tokens: in forward for their statistics, and recomputed in backward for their
//! gradient.
//!
//! Gradients are not computed in forward, although that would save a product: only backward knows
//! the gradient of each token's loss, and whether there is a backward at all.

use burn::tensor::{Int, Tensor};
use megaburn_autograd::arg_check::{self, float, int};
use megaburn_autograd::{LinearPass, fused};

use super::exchanged;
use super::op::{self, LinearLossOptions, LinearLosses};
use super::options::CrossEntropyOptions;
use super::soft_cap::capped;
use crate::linear::{LinearOptions, linear};

/// [`cross_entropy`](crate::cross_entropy) of `linear(x, weight)`, in chunks of at most `chunk`
/// tokens: never more than one chunk of the logits and their gradient is in memory. Backward
/// recomputes each chunk's logits.
///
/// # Shapes
/// - `x`: `[s, b, in]`; `weight`: as in [`linear`], whose outputs are the columns of this part
/// - labels, result: `[s, b]`; `exchange`: `[1, 4, s * b]` to `[parts, 4, s * b]`
///
/// # Panics
/// As [`linear`] and [`cross_entropy`](crate::cross_entropy); if `chunk` is 0, or there is no
/// token.
pub fn linear_cross_entropy(
    x: Tensor<3>,
    weight: Tensor<2>,
    labels: Tensor<2, Int>,
    linear_options: LinearOptions,
    options: CrossEntropyOptions,
    chunk: usize,
    exchange: impl FnOnce(Tensor<3>) -> Tensor<3>,
) -> Tensor<2> {
    let name = "linear_cross_entropy";
    assert!(chunk > 0, "{name}: the chunk size must be at least 1 token");
    let [s, b, inputs] = x.dims();
    let labels = labels.inner();
    let num_rows = s * b;
    assert!(
        num_rows > 0,
        "{name}: x is [{s}, {b}, {inputs}] and has no tokens"
    );
    let columns = weight.dims()[if linear_options.out_in { 0 } else { 1 }];
    arg_check::check(
        name,
        [
            float("x", &x),
            float("the weight", &weight),
            int("labels", &labels),
        ],
    );
    options.check(name, [s, b, columns], labels.dims());
    if let Some(main_grad) = &linear_options.main_grad {
        main_grad.check(name, weight.dims());
        main_grad.notify_use();
    }
    let all = x.clone().inner().reshape([1, num_rows, inputs]);
    let by_row = labels.clone().reshape([1, num_rows]);
    let plain = LinearOptions {
        out_in: linear_options.out_in,
        algorithm: linear_options.algorithm,
        ..Default::default()
    };
    let main_grad = linear_options.main_grad.as_ref();
    let whole = main_grad.and_then(|main_grad| main_grad.weight(LinearPass::Forward));
    let whole = whole.unwrap_or_else(|| weight.clone().inner());
    let statistics = (0..num_rows).step_by(chunk).map(|start| {
        let len = chunk.min(num_rows - start);
        let x = all.clone().narrow(1, start, len);
        let logits = linear(x, whole.clone(), None, plain.clone());
        let logits = match options.soft_cap {
            Some(cap) => capped(logits, cap),
            None => logits,
        };
        op::statistics(logits, by_row.clone().narrow(1, start, len), options)
    });
    let statistics = Tensor::cat(statistics.collect(), 2);
    let statistics = exchanged(name, statistics, exchange, columns, options);
    let rows = op::combined(statistics, labels.clone(), columns, options);
    let losses = LinearLosses {
        labels,
        rows,
        how: LinearLossOptions {
            linear: linear_options,
            options,
            chunk,
        },
    };
    fused(losses, [x.into_dispatch(), weight.into_dispatch()])
}
