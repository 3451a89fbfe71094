//! The end of a graph whose gradient comes from elsewhere: the output of a pipeline stage.

use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{Shape, Tensor};

use crate::{
    fused_op::{FusedOp, InputGrads, fused},
    into_primitive::IntoPrimitive,
};

/// The output of a graph that waits for its gradient. It keeps what backward needs, but not the
/// output itself, whose memory is free once it has been sent.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use megaburn_autograd::DetachedOutput;
///
/// let x = Tensor::<3>::ones([2, 1, 3], &Device::flex().autodiff()).require_grad();
/// let detached_output = DetachedOutput::of(x.clone() * 2.0);
/// let gradient = Tensor::full([2, 1, 3], 0.5, &Device::flex());
/// let grads = detached_output.backward(gradient.clone());
/// assert_eq!(x.grad(&grads).unwrap().into_data(), (gradient * 2.0).into_data());
/// ```
///
/// Source: Megatron-LM `megatron/core/pipeline_parallel/schedules.py`, `deallocate_output_tensor`
/// and `custom_backward`.
#[derive(Debug)]
pub struct DetachedOutput {
    end: Tensor<1>,
    gradient: Slot,
    shape: [usize; 3],
}

/// The slot that receives the output's gradient, as rows.
type Slot = Arc<Mutex<Option<Tensor<2>>>>;

impl DetachedOutput {
    /// Detaches `y` from its graph and keeps the graph.
    ///
    /// # Panics
    /// If `y` is in no graph.
    pub fn of(y: Tensor<3>) -> Self {
        assert!(
            y.is_tracked(),
            "DetachedOutput: y must be part of an autodiff graph"
        );
        let shape = y.dims();
        let gradient = Slot::default();
        Self {
            end: fused(Detached(gradient.clone()), [y.into_dispatch()]),
            gradient,
            shape,
        }
    }

    /// Runs the backward pass from `gradient`, which is passed on unchanged.
    ///
    /// # Shapes
    /// `gradient` has the shape and dtype of the output, and is off the autodiff device.
    ///
    /// # Panics
    /// If its shape differs.
    pub fn backward(self, gradient: Tensor<3>) -> burn::tensor::Gradients {
        Self::backward_all([(self, gradient)])
    }

    /// Runs one backward pass from several outputs, each with its gradient.
    ///
    /// # Panics
    /// If there are no outputs, or a gradient has another shape than its output.
    pub fn backward_all(
        outlets: impl IntoIterator<Item = (Self, Tensor<3>)>,
    ) -> burn::tensor::Gradients {
        let ends = outlets.into_iter().map(
            |(
                Self {
                    end,
                    gradient: slot,
                    shape,
                },
                gradient,
            )| {
                let found = gradient.dims();
                assert!(
                    found == shape,
                    "DetachedOutput: the gradient is {found:?}, the output \
                    {shape:?}"
                );
                let rows = gradient.flatten(0, 1);
                *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(rows);
                end
            },
        );
        let end = ends.reduce(|a, b| a + b);
        end.expect("DetachedOutput: backward_all needs at least one output")
            .backward()
    }
}

/// A placeholder `[1]` that takes the place of `y` in the graph.
#[derive(Debug)]
struct Detached(Slot);

impl<B: IntoPrimitive> FusedOp<B, 1> for Detached {
    /// The slot of the gradient, and the shape of `y`.
    type Saved = (Slot, Shape);

    fn forward(self, [y]: [FloatTensor<B>; 1]) -> (FloatTensor<B>, Self::Saved) {
        let end = B::float_zeros(Shape::from([1]), &y.device(), y.dtype().into());
        (end, (self.0, y.shape()))
    }

    fn backward((slot, shape): Self::Saved, _: FloatTensor<B>, mut grads: InputGrads<'_, B>) {
        let gradient = slot.lock().unwrap_or_else(PoisonError::into_inner).take();
        let gradient =
            gradient.expect("DetachedOutput: call backward through `DetachedOutput::backward`");
        grads.register(0, B::float_reshape(B::unwrap(gradient), shape));
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;
    use rstest::rstest;

    use super::*;
    use crate::testing::{constant, leaf, values};

    #[rstest]
    fn the_gradient_that_is_given_goes_backward_as_it_is(
        #[values(DType::F32, DType::BF16)] dtype: DType,
    ) {
        let x = leaf(constant([5, 2, 3]).cast(dtype));
        let other = leaf(constant([5, 2, 3]).cast(dtype));
        let detached_output = DetachedOutput::of(x.clone() + other.clone() + x.clone());
        let gradient = constant([5, 2, 3]).cast(dtype).inner();
        let grads = detached_output.backward(gradient.clone());
        assert_eq!(
            values(other.grad(&grads).unwrap()),
            values(gradient.clone())
        );
        assert_eq!(
            values(x.grad(&grads).unwrap()),
            values(gradient.clone() + gradient)
        );
    }

    #[test]
    #[should_panic(expected = "the gradient is [2, 1, 3], the output [1, 2, 3]")]
    fn a_gradient_of_another_shape_is_refused() {
        let detached_output = DetachedOutput::of(leaf(constant([1, 2, 3])));
        detached_output.backward(constant([2, 1, 3]).inner());
    }
}
