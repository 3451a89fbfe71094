//! Grouped linear maps of quantised matrices as one operation of the graph.

use std::ops::Range;

use burn::backend::Dispatch;
use burn::tensor::Tensor;
use megaburn_autograd::backend_ops::as_row;
use megaburn_autograd::{MainGrad, OverlappedWgrads, RecomputeFn};

use super::operands::{operands_of, plain};
use super::options::GroupWeight;
use crate::gpu::flush;
use crate::quantized::LinearQuantization;
use crate::quantized::grouped::{GroupsBackward, QuantizedGroupOps, QuantizedGroups, SavedRows};

/// [`grouped_linear`](crate::grouped_linear) of arguments that were checked, with a quantisation
/// for each matrix.
pub(super) fn grouped(
    x: Tensor<2>,
    (rows, weights, quantizations): (Vec<Range<usize>>, Vec<GroupWeight>, Vec<LinearQuantization>),
    again: Option<RecomputeFn>,
    overlapped_wgrads: Option<OverlappedWgrads>,
) -> Tensor<2> {
    let is_autodiff = x.device().is_autodiff();
    let are_trained: Vec<bool> = weights.iter().map(|w| w.weight.is_tracked()).collect();
    let groups = QuantizedGroups {
        rows,
        weights: if is_autodiff {
            plain(&weights)
        } else {
            weights.clone()
        },
        quantizations,
        are_trained,
    };
    let saved = SavedRows::default();
    let forward = |x: Tensor<2>, groups: QuantizedGroups| {
        let y = <Dispatch as QuantizedGroupOps>::group_products(
            x.clone().into_dispatch(),
            groups,
            saved.clone(),
            again.is_some(),
        );
        // The host has just waited for the row counts and the GPU for the host, so submit at once.
        flush(&x);
        Tensor::from_dispatch(y)
    };
    if !is_autodiff {
        return forward(x, groups.without_record());
    }
    let y: Tensor<2> = forward(x.clone().inner(), groups.clone());
    let are_trained = groups.are_trained.clone();
    let dtype = groups.weights[0].weight.dtype();
    let are_summed: Vec<bool> = weights
        .iter()
        .map(|w| w.main_grad.as_ref().is_some_and(MainGrad::is_attached))
        .collect();
    let (operands, have_nodes) = operands_of(x, weights, &are_trained);
    let backward = GroupsBackward {
        groups,
        saved,
        again,
        overlapped_wgrads,
    };
    let [y] = operands.results([Tensor::from_inner(y)], move |[dy]| {
        let dy = dy.expect("the result has a gradient").cast(dtype);
        let found = <Dispatch as QuantizedGroupOps>::group_gradients(dy.into_dispatch(), backward);
        let mut found = found
            .into_iter()
            .map(Tensor::<2>::from_dispatch)
            .map(as_row);
        let dx = found.next();
        let mut of_weight = |(is_trained, is_summed): (&bool, &bool)| {
            (*is_trained && !is_summed).then(|| found.next()).flatten()
        };
        let of_weights = are_trained.iter().zip(&are_summed).map(&mut of_weight);
        let of_weights: Vec<_> = of_weights.collect();
        let of_weights = of_weights.into_iter().zip(have_nodes);
        let of_weights = of_weights.filter_map(|(gradient, has_node)| has_node.then_some(gradient));
        [dx].into_iter().chain(of_weights).collect()
    });
    y
}
