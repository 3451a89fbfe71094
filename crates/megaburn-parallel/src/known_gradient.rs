//! A loss whose derivative was computed with its value.

use burn::{
    backend::{
        Backend, Dispatch, Flex, TensorMetadata,
        autodiff::{
            Autodiff,
            checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
            grads::Gradients,
            ops::{Backward, Ops, OpsKind},
        },
        backend_extension,
        tensor::FloatTensor,
    },
    tensor::Tensor,
};

/// `value` as a function of `x` whose derivative is known already: backward is one product.
///
/// # Shapes
/// `x` and `jacobian` (of one dtype) `[s, b, v]`, `value` `[s, b]`, with
/// `d value[s, b] / d x[s, b, v] = jacobian[s, b, v]`.
pub(crate) fn attach_gradient(x: Tensor<3>, value: Tensor<2>, jacobian: Tensor<3>) -> Tensor<2> {
    let [x, value, jacobian] = [x.into_dispatch(), value.into_dispatch(), jacobian.into_dispatch()];
    Tensor::from_dispatch(<Dispatch as KnownGradient>::known_gradient(x, value, jacobian))
}

#[backend_extension(Cube: cfg(feature = "cuda"), Flex, Autodiff)]
pub(crate) trait KnownGradient: Backend {
    fn known_gradient(
        x: FloatTensor<Self>,
        value: FloatTensor<Self>,
        jacobian: FloatTensor<Self>,
    ) -> FloatTensor<Self>;
}

/// Without gradients it is its value, on every backend.
macro_rules! value_of {
    ($backend:ty) => {
        impl KnownGradient for $backend {
            fn known_gradient(
                _x: FloatTensor<Self>,
                value: FloatTensor<Self>,
                _jacobian: FloatTensor<Self>,
            ) -> FloatTensor<Self> {
                value
            }
        }
    };
}

value_of!(Flex);
#[cfg(feature = "cuda")]
value_of!(burn::backend::Cube);

#[derive(Debug)]
struct KnownGradientBackward;

impl<B: KnownGradient> Backward<B, 1> for KnownGradientBackward {
    type State = FloatTensor<B>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let [seq, batch] = grad.shape().dims();
        let grad = B::float_reshape(grad, [seq, batch, 1].into());
        let dtype = ops.state.dtype();
        let grad = if grad.dtype() == dtype { grad } else { B::float_cast(grad, dtype.into()) };
        let [parent] = ops.parents;
        if let Some(parent) = parent {
            grads.register::<B>(parent.id, B::float_mul(ops.state, grad));
        }
    }
}

impl<B: KnownGradient, C: CheckpointStrategy> KnownGradient for Autodiff<B, C> {
    fn known_gradient(
        x: FloatTensor<Self>,
        value: FloatTensor<Self>,
        jacobian: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let (x, node) = x.into_parts();
        let (value, jacobian) = (value.into_primitive(), jacobian.into_primitive());
        match KnownGradientBackward.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let value = B::known_gradient(x, value, jacobian.clone());
                prep.finish(jacobian, value)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::known_gradient(x, value, jacobian)),
        }
    }
}
