//! The operands of the graph's operation.

use burn::tensor::Tensor;
use megaburn_autograd::{CheckpointOperands, MainGrad};

use super::options::GroupWeight;

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
