//! Grouped linear maps as one operation of the graph.

use std::ops::Range;

use burn::tensor::Tensor;
use megaburn_autograd::LinearPass;
use megaburn_autograd::backend_ops::as_row;

use super::gradients::gradients;
use super::operands::{operands_of, plain};
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
