//! The gradients of gamma and beta on GPUs, summed from the partial sums of the backward kernel's
//! groups.

use burn::tensor::{DType, Tensor};
use burn_cubecl::tensor::CubeTensor;
use megaburn_autograd::MainGrad;
use megaburn_cuda::tensor;

use crate::kernel_parts::{on_gpu, put_parts, sum_parts, wrap};
use crate::norms::options::NormGrads;

/// Computes the gradients of gamma and beta from the partial sums `[groups, n]` and the dtype of
/// each; `None` for one that was added to its main gradient. One kernel sums both, unless only one
/// of them has a main gradient.
pub(super) fn vector_gradients(
    dgamma_parts: (CubeTensor, DType),
    dbeta_parts: Option<(CubeTensor, DType)>,
    groups: u32,
    sums: &NormGrads,
) -> [Option<CubeTensor>; 2] {
    let alone = |(parts, dtype): (CubeTensor, DType), main_grad: Option<&MainGrad>| match main_grad
    {
        Some(main_grad) => {
            add_to_main_grads([(parts, main_grad)], groups);
            None
        }
        None => {
            let [sum] = sum_parts([(parts, dtype)], groups);
            Some(sum)
        }
    };
    let attached = [&sums.gamma, &sums.beta]
        .map(|grad| grad.as_ref().filter(|main_grad| main_grad.is_attached()));
    match (dbeta_parts, attached) {
        (Some(dbeta_parts), [Some(gamma), Some(beta)]) => {
            add_to_main_grads([(dgamma_parts.0, gamma), (dbeta_parts.0, beta)], groups);
            [None, None]
        }
        (Some(dbeta_parts), [None, None]) => {
            sum_parts([dgamma_parts, dbeta_parts], groups).map(Some)
        }
        (dbeta_parts, [gamma, beta]) => [
            alone(dgamma_parts, gamma),
            dbeta_parts.and_then(|dbeta_parts| alone(dbeta_parts, beta)),
        ],
    }
}

/// Adds the sums of partial sums to main gradients, which must be distinct.
fn add_to_main_grads<const K: usize>(of: [(CubeTensor, &MainGrad); K], groups: u32) {
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
            put_parts(std::array::from_fn::<_, K, _>(pair), groups, has_sum[0]);
        } else {
            // One main gradient has no sum yet, so the two need separate launches.
            (0..K).for_each(|i| put_parts([pair(i)], groups, has_sum[i]));
        }
        places.into_iter().map(wrap).collect()
    });
}
