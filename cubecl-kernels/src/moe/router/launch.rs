//! Launches the router's kernels.

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Tensor};
use cubecl::prelude::*;
use megaburn_cuda::tensor;

use super::kernels::{ChoiceOf, Plan, gradient_kernel, route_kernel};
use super::options::{RouterGroups, RouterOptions, RouterScores};
use super::routed::{Chosen, ExpertChoice, Routed, RouterGradients};
use crate::kernel_parts::{RowView, wrap};
use crate::moe::kernels::{MOST_EXPERTS, PLANE, TOKENS};
use crate::moe::launch::{cubes, floats, ints, on_gpu, wrap_ints};

/// Whether the kernels support this shape: a plane must hold all experts of a token, and there must
/// be tokens.
pub(super) fn takes(x: &Tensor<2>) -> bool {
    let [t, e] = x.dims();
    t > 0 && e <= MOST_EXPERTS && on_gpu(x)
}

pub(super) fn forward(logits: Tensor<2>, choice: ExpertChoice, options: &RouterOptions) -> Routed {
    let [t, e] = logits.dims();
    let k = options.top_k;
    let logits = RowView::of(floats(logits));
    let (choice_of, bias, given) = match choice {
        ExpertChoice::Best(None) => (ChoiceOf::Scores, None, None),
        ExpertChoice::Best(Some(bias)) => (
            ChoiceOf::Biased,
            Some(tensor::contiguous(floats(bias))),
            None,
        ),
        ExpertChoice::Given(experts) => (ChoiceOf::Others, None, Some(ints(experts))),
    };
    let [scores, weights] =
        [e, k].map(|columns| tensor::empty(&logits.tensor, [t, columns], DType::F32));
    let experts = tensor::empty(&logits.tensor, [t, k], DType::I32);
    // Every kernel argument needs a buffer, even those that the kernel does not read.
    let nothing = || tensor::empty(&logits.tensor, [1], DType::F32);
    route_kernel::launch(
        &scores.client.clone(),
        cubes(t),
        CubeDim::new_2d(PLANE as u32, TOKENS as u32),
        logits.tensor.clone().into_buffer_arg(),
        bias.unwrap_or_else(nothing).into_buffer_arg(),
        given.unwrap_or_else(nothing).into_buffer_arg(),
        scores.clone().into_buffer_arg(),
        experts.clone().into_buffer_arg(),
        weights.clone().into_buffer_arg(),
        t as u32,
        logits.stride as u32,
        options.scale as f32,
        choice_of,
        plan(options, e),
    );
    Routed {
        weights: wrap(weights),
        experts: wrap_ints(experts),
        scores: wrap(scores),
    }
}

pub(super) fn gradient(
    chosen: Chosen,
    extra: RouterGradients,
    options: &RouterOptions,
) -> Tensor<2> {
    let shape = chosen.scores.dims();
    let [dweights, scores] =
        [chosen.dweights, chosen.scores].map(|x| tensor::contiguous(floats(x)));
    let experts = ints(chosen.experts);
    let extra = [extra.of_scores, extra.of_logits].map(|gradient| {
        let gradient = gradient?.cast(DType::F32).expand(shape);
        Some(RowView::of(floats(gradient)))
    });
    let has = extra.each_ref().map(Option::is_some);
    let [of_scores, of_logits] = extra.map(|gradient| match gradient {
        Some(rows) => (rows.tensor, rows.stride as u32),
        None => (scores.clone(), 0),
    });
    let dlogits = tensor::empty(&scores, scores.shape(), DType::F32);
    gradient_kernel::launch(
        &scores.client.clone(),
        cubes(shape[0]),
        CubeDim::new_2d(PLANE as u32, TOKENS as u32),
        dweights.into_buffer_arg(),
        scores.into_buffer_arg(),
        experts.into_buffer_arg(),
        of_scores.0.into_buffer_arg(),
        of_logits.0.into_buffer_arg(),
        dlogits.clone().into_buffer_arg(),
        shape[0] as u32,
        of_scores.1,
        of_logits.1,
        options.scale as f32,
        has,
        plan(options, shape[1]),
    );
    wrap(dlogits)
}

fn plan(options: &RouterOptions, experts: usize) -> Plan {
    let RouterOptions {
        top_k,
        scores,
        normalise,
        groups,
        ..
    } = *options;
    let groups = groups.map(|RouterGroups { num, kept, best }| {
        [num, kept, best.min(experts / num)].map(|n| n as u32)
    });
    Plan {
        experts: experts as u32,
        top_k: top_k as u32,
        softmax: scores == RouterScores::Softmax,
        normalise,
        groups,
    }
}
