//! Inputs of matrix products that backward recomputes.

use std::{fmt, sync::Arc};

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, Shape, Tensor};

use crate::backend_ops::rows;
use crate::into_primitive::IntoPrimitive;

/// Recomputes the input of a product in backward instead of saving it, from tensors that are saved
/// anyway (Megatron's `CheckpointWithoutOutput`).
///
/// It must reproduce the input bit for bit. The tensors that it captures must be without autodiff:
/// Burn holds a lock on their graph during backward.
#[derive(Clone)]
pub struct RecomputeFn(Arc<dyn Fn() -> Tensor<2> + Send + Sync>);

impl RecomputeFn {
    /// Wraps `compute`, which is called once for each backward that needs the input, by the thread
    /// that runs backward.
    ///
    /// # Shapes
    /// `compute`: `[.., in]`, as many rows as the input has
    pub fn new<const D: usize>(compute: impl Fn() -> Tensor<D> + Send + Sync + 'static) -> Self {
        Self(Arc::new(move || {
            let x = compute();
            let dims = x.dims();
            x.reshape([dims[..D - 1].iter().product::<usize>(), dims[D - 1]])
        }))
    }

    /// Applies `f` to the recomputed tensor.
    ///
    /// # Shapes
    /// `f`: `[rows, in]` to the shape of the new input
    pub fn map(self, f: impl Fn(Tensor<2>) -> Tensor<2> + Send + Sync + 'static) -> Self {
        Self(Arc::new(move || f(self.compute())))
    }

    /// Computes the input, `[rows, in]`.
    pub fn compute(&self) -> Tensor<2> {
        (self.0)()
    }
}

impl fmt::Debug for RecomputeFn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecomputeFn").finish_non_exhaustive()
    }
}

/// The input of a product, saved for backward or recomputed there.
#[derive(Clone, Debug)]
pub struct SavedInput<T> {
    /// `None` if the input is recomputed.
    x: Option<T>,
    again: Option<RecomputeFn>,
    /// The shape of the input.
    pub shape: Shape,
    dtype: DType,
}

impl<T: TensorMetadata> SavedInput<T> {
    /// Saves `x`, or only its shape and dtype if `again` recomputes it.
    pub fn new(x: T, again: Option<RecomputeFn>) -> Self {
        let shape = x.shape();
        let dtype = x.dtype();
        Self {
            x: again.is_none().then_some(x),
            again,
            shape,
            dtype,
        }
    }

    /// The input, `[rows, in]`.
    pub fn rows<B: IntoPrimitive<FloatTensorPrimitive = T>>(self) -> FloatTensor<B> {
        let Self {
            x,
            again,
            shape,
            dtype,
        } = self;
        let x = x.or_else(|| again.map(|again| B::unwrap(again.compute())));
        let x = rows::<B>(x.expect("x is saved or recomputed"));
        let found = x.shape();
        let n = shape[shape.num_dims() - 1];
        assert!(
            found.num_elements() == shape.num_elements() && found[1] == n && x.dtype() == dtype,
            "linear: the recomputed x is {:?} {}, but must have the rows of {:?} {}",
            found.as_slice(),
            x.dtype().name(),
            shape.as_slice(),
            dtype.name()
        );
        x
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::constant;

    #[test]
    fn steps_follow_one_another() {
        let x = constant([3, 4]).inner();
        let half = x.clone();
        let again = RecomputeFn::new(move || half.clone()).map(|x| x.clone() + x);
        assert_eq!(again.compute().into_data(), (x * 2.0).into_data());
    }
}
