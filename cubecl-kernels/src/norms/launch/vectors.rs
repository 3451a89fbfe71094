//! The gradients of gamma and beta on GPUs, summed from the partial sums of the backward kernel's
//! teams.

use burn::tensor::{DType, Tensor};
use burn_cubecl::tensor::CubeTensor;
use megaburn_autograd::MainGrad;
use megaburn_cuda::tensor;

use crate::kernel_parts::{on_gpu, put_parts, sum_parts, wrap};
use crate::norms::options::NormGrads;

/// Computes the gradients of gamma and beta from the partial sums `[teams, n]` and the dtype of
/// each; `None` for one that was added to its main gradient. One kernel sums both, unless only one
/// of them has a main gradient.
pub(super) fn vector_gradients(
    for_gamma: (CubeTensor, DType),
    for_beta: Option<(CubeTensor, DType)>,
    teams: u32,
    sums: &NormGrads,
) -> [Option<CubeTensor>; 2] {
    let alone = |(parts, dtype): (CubeTensor, DType), main_grad: Option<&MainGrad>| match main_grad
    {
        Some(main_grad) => {
            add_to_main_grads([(parts, main_grad)], teams);
            None
        }
        None => {
            let [sum] = sum_parts([(parts, dtype)], teams);
            Some(sum)
        }
    };
    let attached = [&sums.gamma, &sums.beta]
        .map(|grad| grad.as_ref().filter(|main_grad| main_grad.is_attached()));
    match (for_beta, attached) {
        (Some(for_beta), [Some(gamma), Some(beta)]) => {
            add_to_main_grads([(for_gamma.0, gamma), (for_beta.0, beta)], teams);
            [None, None]
        }
        (Some(for_beta), [None, None]) => sum_parts([for_gamma, for_beta], teams).map(Some),
        (for_beta, [gamma, beta]) => [
            alone(for_gamma, gamma),
            for_beta.and_then(|for_beta| alone(for_beta, beta)),
        ],
    }
}

/// Adds the sums of partial sums to main gradients, which must be distinct.
fn add_to_main_grads<const K: usize>(of: [(CubeTensor, &MainGrad); K], teams: u32) {
    let all = of.each_ref().map(|(_, main_grad)| *main_grad);
    MainGrad::update_all(&all, |before| {
        let has_sum: Vec<bool> = before.iter().map(|place| place.sum.is_some()).collect();
        let place = |(parts, sum): (&CubeTensor, Option<Tensor<2>>)| match sum {
            Some(sum) => tensor::contiguous(on_gpu(&sum).expect("the sum is on the norm's device")),
            None => tensor::empty(parts, [1, parts.meta.shape()[1]], DType::F32),
        };
        let sums = before.into_iter().map(|place| place.sum);
        let places: Vec<_> = of
            .iter()
            .map(|(parts, _)| parts)
            .zip(sums)
            .map(place)
            .collect();
        let pair = |i: usize| (of[i].0.clone(), places[i].clone());
        if has_sum.iter().all(|other| *other == has_sum[0]) {
            put_parts(std::array::from_fn::<_, K, _>(pair), teams, has_sum[0]);
        } else {
            // One main gradient has no sum yet, so the two need separate launches.
            (0..K).for_each(|i| put_parts([pair(i)], teams, has_sum[i]));
        }
        places.into_iter().map(wrap).collect()
    });
}
