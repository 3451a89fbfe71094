//! The weight gradients on GPUs, by the kernel of many matrices.

use std::ops::Range;

use burn::tensor::Tensor;
use megaburn_autograd::{AccumTarget, MainGrad};
use megaburn_cuda::tensor;

use super::Gradients;
use crate::kernel_parts::{on_gpu, wrap};
use crate::linear::grouped::choice::GroupedGemmChoice;
use crate::linear::grouped::options::GroupWeight;

/// Adds all gradients in one launch. Returns false, with nothing done, if no kernel supports
/// them.
pub(in crate::linear::grouped) fn sum_all(
    x: &Tensor<2>,
    dy: &Tensor<2>,
    all: &[(GroupWeight, Range<usize>)],
    choice: GroupedGemmChoice,
) -> bool {
    let row_ranges: Vec<Range<usize>> = all.iter().map(|(_, rows)| rows.clone()).collect();
    let [inputs, outputs] = all[0].0.weight.dims();
    let few = choice.take_rows([inputs, outputs], &row_ranges);
    let of = || Gradients::of(on_gpu(x)?, on_gpu(dy)?);
    let Some(gradients) = few.then(of).flatten() else {
        return false;
    };
    let main_grads = all.iter().filter_map(|(group, _)| group.main_grad.as_ref());
    let main_grads: Vec<&MainGrad> = main_grads.collect();
    if !MainGrad::are_distinct(&main_grads) {
        return false;
    }
    MainGrad::update_all(&main_grads, |before| {
        let mut sums = Vec::new();
        let mut are_there = Vec::new();
        for AccumTarget { sum, room } in before {
            are_there.push(sum.is_some());
            let found = sum
                .or(room)
                .map(|sum| on_gpu(&sum).expect("the tensor is on its rows' device"));
            sums.push(found.map_or_else(|| gradients.room(), tensor::contiguous));
        }
        gradients.add(&row_ranges, &sums, &are_there);
        sums.into_iter().map(wrap).collect()
    });
    true
}
