//! The weight gradients of [`grouped_linear`](crate::grouped_linear).

use std::ops::Range;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, TensorMetadata, backend_extension};
use burn::tensor::Tensor;
use megaburn_autograd::{MainGrad, OverlappedWgrads, on_every_backend, run_or_defer};

use super::choice::GroupedGemmChoice;
use super::options::GroupWeight;
use super::rows::part;
use crate::gemm_ops::{GemmAlgorithm, GemmOps, ProductOptions, swapped};
use crate::gpu::flush;
use crate::gradient_accumulation_fusion::GradAccumFusion;

/// A trained matrix and the range of its rows.
type Trained = (GroupWeight, Range<usize>);

/// `xᵀ dy` of each trained matrix over its range of rows; `None` where the gradient goes to a
/// [`MainGrad`].
pub(super) fn gradients(
    x: Tensor<2>,
    dy: Tensor<2>,
    trained: Vec<Option<Trained>>,
    choice: GroupedGemmChoice,
    overlapped_wgrads: Option<&OverlappedWgrads>,
) -> Vec<Option<Tensor<2>>> {
    let are_summed =
        |(group, _): &Trained| group.main_grad.as_ref().is_some_and(MainGrad::is_attached);
    let (len, all): (usize, Vec<&Trained>) = (trained.len(), trained.iter().flatten().collect());
    if let Some((first, _)) = all.first()
        && choice.take(first.weight.dims(), all.len())
        && all.into_iter().all(are_summed)
    {
        let all: Vec<Trained> = trained.into_iter().flatten().collect();
        put_gradient(overlapped_wgrads, move || sum_all(&x, &dy, &all, choice));
        return vec![None; len];
    }
    let one = |(group, rows): Trained| {
        of_weight(part(&x, &rows), part(&dy, &rows), group, overlapped_wgrads)
    };
    trained
        .into_iter()
        .map(|trained| trained.and_then(one))
        .collect()
}

/// Computes a weight gradient, now or as soon as something overlaps with it.
pub(crate) fn put_gradient(
    overlapped_wgrads: Option<&OverlappedWgrads>,
    work: impl FnOnce() + Send + 'static,
) {
    match overlapped_wgrads {
        Some(overlapped_wgrads) => overlapped_wgrads.put(work),
        None => run_or_defer(work),
    }
}

fn of_weight(
    x: Tensor<2>,
    dy: Tensor<2>,
    group: GroupWeight,
    overlapped_wgrads: Option<&OverlappedWgrads>,
) -> Option<Tensor<2>> {
    let dtype = group.weight.dtype();
    match group.main_grad.filter(MainGrad::is_attached) {
        Some(main_grad) => {
            // Only this product runs concurrently with the communication, so it must be submitted
            // now.
            let rows = overlapped_wgrads.is_some().then(|| x.clone());
            let work = move || {
                drop(product(x, dy, Some(main_grad)));
                rows.iter().for_each(flush);
            };
            put_gradient(overlapped_wgrads, work);
            None
        }
        None => Some(product(x, dy, None).cast(dtype)),
    }
}

fn product(x: Tensor<2>, dy: Tensor<2>, sum: Option<MainGrad>) -> Tensor<2> {
    let x = x.into_dispatch();
    let dy = dy.into_dispatch();
    Tensor::from_dispatch(<Dispatch as GroupOps>::of_weight(x, dy, sum))
}

/// Adds the gradients of all matrices to their [`MainGrad`]s.
fn sum_all(x: &Tensor<2>, dy: &Tensor<2>, all: &[Trained], choice: GroupedGemmChoice) {
    #[cfg(feature = "cuda")]
    if super::launch::gradients::sum_all(x, dy, all, choice) {
        return;
    }
    #[cfg(not(feature = "cuda"))]
    let _ = choice;
    for (group, rows) in all {
        drop(product(
            part(x, rows),
            part(dy, rows),
            group.main_grad.clone(),
        ));
        flush(x);
    }
}

#[backend_extension(
    Cube: cfg(any(feature = "cuda", feature = "wgpu")),
    Flex,
    NdArray: cfg(feature = "ndarray")
)]
pub(crate) trait GroupOps: Backend {
    /// `xᵀ dy`; with `sum` the product is added there, and `dy` is returned.
    fn of_weight(
        x: FloatTensor<Self>,
        dy: FloatTensor<Self>,
        sum: Option<MainGrad>,
    ) -> FloatTensor<Self>;
}

on_every_backend! {
    impl GroupOps {
        fn of_weight(
            x: FloatTensor<Self>,
            dy: FloatTensor<Self>,
            sum: Option<MainGrad>,
        ) -> FloatTensor<Self> {
            // The numbers of rows change with every call: see `grouped_linear`.
            let algorithm = GemmAlgorithm::Deterministic;
            let Some(main_grad) = sum else {
                let options = ProductOptions::new(TensorMetadata::dtype(&x));
                return Self::product(swapped::<Self>(x), dy, options.with_algorithm(algorithm));
            };
            main_grad.update(|sum, room| {
                Self::add_weight_gradient(x, dy.clone(), sum, room(), algorithm)
            });
            dy
        }
    }
}
