//! Launches the kernel of the router losses.

use burn::backend::Cube;
use burn::tensor::{DType, Tensor};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use megaburn_cuda::tensor;

use super::kernels::{NumbersLaunch, Plan, losses_kernel};
use super::{
    BalanceLoss, NUM_VALUES, RouterGradients, RouterLossTerms, RouterLosses, RouterScores,
};
use crate::bias::ColumnSum;
use crate::kernel_parts::{RowView, wrap};
use crate::moe::kernels::{MOST_EXPERTS, PLANE, TOKENS};
use crate::moe::launch::{cubes, floats, on_gpu};

/// Whether the kernel supports these scores: a plane must hold all experts of a token.
pub(super) fn takes(scores: &Tensor<2>) -> bool {
    let [tokens, e] = scores.dims();
    tokens > 0 && e <= MOST_EXPERTS && on_gpu(scores)
}

pub(super) fn terms(
    logits: Tensor<2>,
    scores: Tensor<2>,
    counted: Option<Tensor<2>>,
    losses: &RouterLosses,
) -> RouterLossTerms {
    let [tokens, e] = scores.dims();
    let rows = |x: Tensor<2>| RowView::of(floats(x.cast(DType::F32)));
    let whole = |x: Tensor<2>| tensor::contiguous(floats(x.cast(DType::F32)));
    let logits = rows(logits);
    let scores = rows(scores);
    let has_counted = counted.is_some();
    // Every kernel argument needs a buffer, even those that the kernel does not read.
    let nothing = || tensor::empty(&scores.tensor, [1], DType::F32);
    let counted = counted.map_or_else(nothing, whole);
    let all = [&losses.micro_batch, &losses.sequences, &losses.global_batch];
    let counts = |loss: &Option<BalanceLoss>| match loss {
        Some(loss) => whole(loss.counts.clone()),
        None => nothing(),
    };
    let [micro_batch, of_sequences, global_batch] = all.map(counts);
    let factor = |loss: &Option<BalanceLoss>| loss.as_ref().map_or(0.0, |loss| loss.factor) as f32;
    let sequences = losses
        .sequences
        .as_ref()
        .map_or(1, |loss| loss.counts.dims()[0]);
    let gradient = |is_wanted: bool| {
        let shape = if is_wanted { [tokens, e] } else { [1, 1] };
        tensor::empty(&scores.tensor, shape, DType::F32)
    };
    let of_scores = gradient(losses.has_balance());
    let of_logits = gradient(losses.z_loss.is_some());
    let values = tensor::empty(&scores.tensor, [tokens, NUM_VALUES + e], DType::F32);
    losses_kernel::launch(
        &values.client.clone(),
        cubes(tokens),
        CubeDim::new_2d(PLANE as u32, TOKENS as u32),
        logits.tensor.into_buffer_arg(),
        scores.tensor.clone().into_buffer_arg(),
        counted.into_buffer_arg(),
        micro_batch.into_buffer_arg(),
        of_sequences.into_buffer_arg(),
        global_batch.into_buffer_arg(),
        of_scores.clone().into_buffer_arg(),
        of_logits.clone().into_buffer_arg(),
        values.clone().into_buffer_arg(),
        NumbersLaunch {
            tokens: tokens as u32,
            logits_stride: logits.stride as u32,
            scores_stride: scores.stride as u32,
            sequences: sequences as u32,
            micro_batch: factor(&losses.micro_batch),
            of_sequences: factor(&losses.sequences),
            global_batch: factor(&losses.global_batch),
            z_loss: losses.z_loss.unwrap_or(0.0) as f32,
        },
        Plan {
            experts: e as u32,
            softmax: losses.scores == RouterScores::Softmax,
            balance: all.map(Option::is_some),
            z_loss: losses.z_loss.is_some(),
            masked: has_counted,
        },
    );
    let given = |is_wanted: bool, gradient: CubeTensor| is_wanted.then(|| wrap(gradient));
    let gradients = RouterGradients {
        of_scores: given(losses.has_balance(), of_scores),
        of_logits: given(losses.z_loss.is_some(), of_logits),
    };
    let sums = Cube::column_sum(tensor::into_backend(values), 1, DType::F32);
    let sums: Tensor<2> = wrap(tensor::from_backend(sums));
    RouterLossTerms {
        gradients,
        sums: sums.reshape([NUM_VALUES + e]),
    }
}
