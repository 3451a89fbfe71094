//! Grouped linear maps as one operation of the graph.

use std::ops::Range;

use burn::tensor::Tensor;
use megaburn_autograd::backend_ops::as_row;
use megaburn_autograd::{CheckpointOperands, LinearPass, MainGrad};

use super::gradients::gradients;
use super::options::{GroupWeight, GroupedOptions};
use super::products::products;
use super::quantized;

/// [`grouped_linear`](crate::grouped_linear) of arguments that were checked.
pub(super) fn grouped(
    x: Tensor<2>,
    row_ranges: Vec<Range<usize>>,
    weights: Vec<GroupWeight>,
    options: GroupedOptions,
) -> Tensor<2> {
    let GroupedOptions {
        again,
        overlapped_wgrads,
        choice,
        quantizations,
    } = options;
    if !quantizations.is_empty() {
        let parts = (row_ranges, weights, quantizations);
        return quantized::grouped(x, parts, again, overlapped_wgrads);
    }
    if !x.device().is_autodiff() {
        return products(&x, &row_ranges, &weights, LinearPass::Forward, choice);
    }
    let source = x.clone().inner();
    let groups = plain(&weights);
    let y = products(&source, &row_ranges, &groups, LinearPass::Forward, choice);
    let are_trained: Vec<bool> = weights.iter().map(|w| w.weight.is_tracked()).collect();
    let (operands, have_nodes) = operands_of(x, weights, &are_trained);
    let kept = again.is_none().then_some(source);
    let [y] = operands.results([Tensor::from_inner(y)], move |[dy]| {
        let dtype = groups[0].weight.dtype();
        let dy = dy.expect("the result has a gradient").cast(dtype);
        let dx = products(&dy, &row_ranges, &groups, LinearPass::Backward, choice);
        let x = kept.or_else(|| again.map(|again| again.compute()));
        let x = x.expect("x is saved or recomputed");
        let trained = groups.into_iter().zip(row_ranges).zip(are_trained);
        let trained =
            trained.map(|((group, rows), is_trained)| is_trained.then_some((group, rows)));
        let of_weights = gradients(x, dy, trained.collect(), choice, overlapped_wgrads.as_ref());
        let of_weights = of_weights.into_iter().zip(have_nodes);
        let of_weights = of_weights.filter_map(|(gradient, has_node)| has_node.then_some(gradient));
        [Some(dx)]
            .into_iter()
            .chain(of_weights)
            .map(|gradient| gradient.map(as_row))
            .collect()
    });
    y
}

/// The operands of the graph's operation, and which matrices are among them. A matrix with a main
/// gradient needs no node of its own, except for one: through it backward gets here if `x` needs no
/// gradient.
pub(super) fn operands_of(
    x: Tensor<2>,
    weights: Vec<GroupWeight>,
    are_trained: &[bool],
) -> (CheckpointOperands, Vec<bool>) {
    let first = are_trained.iter().position(|is_trained| *is_trained);
    let is_summed = |w: &GroupWeight| w.main_grad.as_ref().is_some_and(MainGrad::is_attached);
    let have_nodes: Vec<bool> = weights
        .iter()
        .enumerate()
        .map(|(i, w)| Some(i) == first || !is_summed(w))
        .collect();
    let mut operands = CheckpointOperands::new(&x.device());
    operands.add(x);
    let with_nodes = weights
        .into_iter()
        .zip(&have_nodes)
        .filter(|(_, has_node)| **has_node);
    with_nodes.for_each(|(w, _)| operands.add(w.weight));
    (operands, have_nodes)
}

pub(super) fn plain(weights: &[GroupWeight]) -> Vec<GroupWeight> {
    let plain = |w: &GroupWeight| GroupWeight {
        weight: w.weight.clone().inner(),
        main_grad: w.main_grad.clone(),
    };
    weights.iter().map(plain).collect()
}
