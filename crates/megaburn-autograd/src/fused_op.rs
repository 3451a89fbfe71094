//! Operations with a handwritten backward pass.

use std::array;
use std::fmt::{self, Debug, Formatter};
use std::marker::PhantomData;

#[cfg(any(feature = "cuda", feature = "wgpu"))]
use burn::backend::Cube;
#[cfg(feature = "ndarray")]
use burn::backend::NdArray;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
use burn::backend::autodiff::{Autodiff, NodeId};
use burn::backend::tensor::FloatTensor;
use burn::backend::{
    Backend, BackendTensor, Dispatch, DispatchAutodiffContext, DispatchTensor, DispatchTensorKind,
    ExtensionType, Flex, backend_extension,
};
use burn::tensor::{Device, Tensor};

/// An operation of `N` float tensors that has one result and a handwritten backward pass, on a
/// backend without autodiff. [`fused`] runs it on Burn's tensors.
///
/// Everything else that it needs is part of `Self`: options, and tensors that get no gradient,
/// which must be off the autodiff device ([`IntoPrimitive`](crate::IntoPrimitive) converts them).
///
/// ```
/// use burn::backend::{Backend, tensor::FloatTensor};
/// use burn::tensor::{Device, Tensor};
/// use megaburn_autograd::{FusedOp, InputGrads, fused};
///
/// /// `x * x`.
/// #[derive(Debug)]
/// struct Square;
///
/// impl<B: Backend> FusedOp<B, 1> for Square {
///     type Saved = FloatTensor<B>;
///
///     fn forward(self, [x]: [FloatTensor<B>; 1]) -> (FloatTensor<B>, Self::Saved) {
///         (B::float_mul(x.clone(), x.clone()), x)
///     }
///
///     fn backward(x: Self::Saved, dy: FloatTensor<B>, mut grads: InputGrads<'_, B>) {
///         grads.register(0, B::float_mul_scalar(B::float_mul(x, dy), 2.0.into()));
///     }
/// }
///
/// let x = Tensor::<1>::from_floats([3.0, -1.0], &Device::flex().autodiff()).require_grad();
/// let y: Tensor<1> = fused(Square, [x.clone().into_dispatch()]);
/// let dx = x.grad(&y.sum().backward()).unwrap();
/// assert_eq!(dx.into_data(), [6.0f32, -2.0].into());
/// ```
pub trait FusedOp<B: Backend, const N: usize>: Debug + Sized + 'static {
    /// What is saved for backward.
    type Saved: Clone + Debug + Send + 'static;

    /// Computes the result and what is saved for backward.
    fn forward(self, inputs: [FloatTensor<B>; N]) -> (FloatTensor<B>, Self::Saved);

    /// Computes the result of tensors without autodiff.
    fn infer(self, inputs: [FloatTensor<B>; N]) -> FloatTensor<B> {
        self.forward(inputs).0
    }

    /// Registers the gradients of the inputs. `dy` is the gradient of the result.
    fn backward(saved: Self::Saved, dy: FloatTensor<B>, grads: InputGrads<'_, B>);
}

/// Where a backward pass registers the gradients of an operation's inputs.
pub struct InputGrads<'a, B> {
    /// The node of each input that wants a gradient.
    nodes: &'a [Option<NodeId>],
    grads: &'a mut Gradients,
    backend: PhantomData<B>,
}

impl<B> Debug for InputGrads<'_, B> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_tuple("InputGrads").field(&self.nodes).finish()
    }
}

impl<'a, B: Backend> InputGrads<'a, B> {
    pub(crate) fn new(nodes: &'a [Option<NodeId>], grads: &'a mut Gradients) -> Self {
        Self {
            nodes,
            grads,
            backend: PhantomData,
        }
    }

    /// Whether input `i` was given and wants a gradient.
    pub fn wants(&self, i: usize) -> bool {
        self.nodes.get(i).is_some_and(Option::is_some)
    }

    /// Registers the gradient of input `i`, if it wants one.
    pub fn register(&mut self, i: usize, gradient: FloatTensor<B>) {
        if let Some(Some(node)) = self.nodes.get(i) {
            self.grads.register::<B>(*node, gradient);
        }
    }

    /// Registers the gradients of all inputs, in their order. `None` stands for a gradient that went
    /// elsewhere.
    pub fn register_all(&mut self, gradients: impl IntoIterator<Item = Option<FloatTensor<B>>>) {
        for (i, gradient) in gradients.into_iter().enumerate() {
            if let Some(gradient) = gradient {
                self.register(i, gradient);
            }
        }
    }
}

/// The first `R` inputs of an operation, and those of the `M` optional ones after them that were
/// given.
pub fn optional<T, const N: usize, const R: usize, const M: usize>(
    inputs: [T; N],
) -> ([T; R], [Option<T>; M]) {
    const { assert!(R <= N && N <= R + M) };
    let mut inputs = inputs.into_iter();
    let required = array::from_fn(|_| inputs.next().expect("there are R inputs or more"));
    (required, array::from_fn(|_| inputs.next()))
}

/// `x`, on a device with autodiff if `device` is one: what an operation on `x` and a tensor of that
/// device takes `x` for. For operations that hold such a tensor.
pub fn with_autodiff_of<const D: usize>(x: Tensor<D>, device: &Device) -> Tensor<D> {
    if device.is_autodiff() {
        x.autodiff()
    } else {
        x
    }
}

/// An operation that is implemented for every backend that is built in.
pub trait OnEveryBackend<const N: usize>: FusedOp<Flex, N> + OnNdArray<N> + OnCube<N> {}
impl<O: FusedOp<Flex, N> + OnNdArray<N> + OnCube<N>, const N: usize> OnEveryBackend<N> for O {}

/// An operation that is implemented for a backend, if the backend is built in.
macro_rules! on_optional_backend {
    ($on:ident: $backend:ident if $is_built:meta) => {
        /// An operation that is implemented for a backend, if the backend is built in.
        #[cfg($is_built)]
        pub trait $on<const N: usize>: FusedOp<$backend, N> {}
        #[cfg($is_built)]
        impl<O: FusedOp<$backend, N>, const N: usize> $on<N> for O {}

        /// An operation that is implemented for a backend, if the backend is built in.
        #[cfg(not($is_built))]
        pub trait $on<const N: usize> {}
        #[cfg(not($is_built))]
        impl<O, const N: usize> $on<N> for O {}
    };
}

on_optional_backend!(OnNdArray: NdArray if feature = "ndarray");
on_optional_backend!(OnCube: Cube if any(feature = "cuda", feature = "wgpu"));

/// Runs an operation. On a device with autodiff, it is one node of the graph.
pub fn fused<O: OnEveryBackend<N>, const N: usize, const D: usize>(
    op: O,
    inputs: [DispatchTensor; N],
) -> Tensor<D> {
    let inputs = Inputs(inputs.into());
    Tensor::from_dispatch(<Dispatch as FusedOps>::fused_op(op, inputs))
}

/// Runs an operation that only GPUs have. On a device with autodiff, it is one node of the graph.
///
/// # Panics
/// If the inputs are not on a GPU.
#[cfg(feature = "cuda")]
pub fn fused_on_gpu<O: FusedOp<Cube, N>, const N: usize, const D: usize>(
    op: O,
    inputs: [DispatchTensor; N],
) -> Tensor<D> {
    let inputs = Inputs(inputs.into());
    Tensor::from_dispatch(<Dispatch as GpuFusedOps>::fused_gpu_op(op, inputs))
}

/// The inputs of an operation, on the way from Burn's tensors to a backend's.
#[derive(Clone, Debug)]
pub(crate) struct Inputs<B: Backend>(pub(crate) Vec<FloatTensor<B>>);

impl<B: Backend> Inputs<B> {
    pub(crate) fn into_array<const N: usize>(self) -> [FloatTensor<B>; N] {
        self.0.try_into().expect("the operation has N inputs")
    }
}

impl<B: Backend> ExtensionType<B> for Inputs<B> {
    type Target = Inputs<Dispatch>;

    fn map_to_dispatch<F>(self, map_kind: F, autodiff: DispatchAutodiffContext) -> Self::Target
    where
        F: Fn(BackendTensor<B>) -> DispatchTensorKind,
    {
        let wrap = |x| DispatchTensor {
            kind: map_kind(BackendTensor::Float(x)),
            autodiff,
        };
        Inputs(self.0.into_iter().map(wrap).collect())
    }

    fn map_from_dispatch<F>(target: Self::Target, unwrap_kind: F) -> Self
    where
        F: Fn(DispatchTensor) -> BackendTensor<B>,
    {
        let inputs = target.0.into_iter();
        Self(inputs.map(|x| unwrap_kind(x).float()).collect())
    }

    fn routing_tensor(target: &Self::Target) -> Option<&DispatchTensor> {
        target.0.first()
    }

    fn routing_float_tensor(target: &Self::Target) -> Option<&DispatchTensor> {
        target.0.first()
    }

    fn autodiff_context(target: &Self::Target) -> DispatchAutodiffContext {
        let contexts = target.0.iter().map(|x| x.autodiff);
        contexts.fold(DispatchAutodiffContext::Disabled, |all, one| all.merge(one))
    }
}

#[backend_extension(
    Cube: cfg(any(feature = "cuda", feature = "wgpu")),
    Flex,
    NdArray: cfg(feature = "ndarray"),
    Autodiff
)]
pub(crate) trait FusedOps: Backend {
    fn fused_op<O: OnEveryBackend<N>, const N: usize>(
        op: O,
        #[extension_type] inputs: Inputs<Self>,
    ) -> FloatTensor<Self>;
}

#[cfg(feature = "cuda")]
#[backend_extension(Cube, Autodiff)]
pub(crate) trait GpuFusedOps: Backend {
    fn fused_gpu_op<O: FusedOp<Cube, N>, const N: usize>(
        op: O,
        #[extension_type] inputs: Inputs<Self>,
    ) -> FloatTensor<Self>;
}

/// Implements a trait of one method for a backend without and with autodiff.
macro_rules! implement {
    ($ops:ident for $backend:ident: $method:ident($($bound:tt)*)) => {
        impl $ops for $backend {
            fn $method<O: $($bound)*, const N: usize>(
                op: O,
                inputs: Inputs<Self>,
            ) -> FloatTensor<Self> {
                FusedOp::<Self, N>::infer(op, inputs.into_array())
            }
        }

        impl<C: CheckpointStrategy> $ops for Autodiff<$backend, C> {
            fn $method<O: $($bound)*, const N: usize>(
                op: O,
                inputs: Inputs<Self>,
            ) -> FloatTensor<Self> {
                recorded::<O, $backend, C, N>(op, inputs)
            }
        }
    };
}

implement!(FusedOps for Flex: fused_op(OnEveryBackend<N>));
#[cfg(feature = "ndarray")]
implement!(FusedOps for NdArray: fused_op(OnEveryBackend<N>));
#[cfg(any(feature = "cuda", feature = "wgpu"))]
implement!(FusedOps for Cube: fused_op(OnEveryBackend<N>));
#[cfg(feature = "cuda")]
implement!(GpuFusedOps for Cube: fused_gpu_op(FusedOp<Cube, N>));

/// Runs an operation and records it in the graph of its inputs.
fn recorded<O: FusedOp<B, N>, B: Backend, C: CheckpointStrategy, const N: usize>(
    op: O,
    inputs: Inputs<Autodiff<B, C>>,
) -> FloatTensor<Autodiff<B, C>> {
    let (inputs, nodes) = parts(inputs);
    let node = FusedBackward::<O>(PhantomData);
    match Backward::<B, N>::prepare::<C>(node, nodes)
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prepared) => {
            let (y, saved) = op.forward(inputs);
            prepared.finish(saved, y)
        }
        OpsKind::UnTracked(prepared) => prepared.finish(op.forward(inputs).0),
    }
}

/// Separates tensors from their nodes.
pub(crate) fn parts<B: Backend, C: CheckpointStrategy, const N: usize>(
    inputs: Inputs<Autodiff<B, C>>,
) -> ([FloatTensor<B>; N], [NodeGuard; N]) {
    let mut nodes = Vec::with_capacity(N);
    let inputs = inputs.into_array::<N>().map(|x| {
        let (x, node) = x.into_parts();
        nodes.push(node);
        x
    });
    (inputs, nodes.try_into().expect("each input has one node"))
}

/// The backward pass of an operation as a node of the graph.
#[derive(Debug)]
struct FusedBackward<O>(PhantomData<fn() -> O>);

impl<O: FusedOp<B, N>, B: Backend, const N: usize> Backward<B, N> for FusedBackward<O> {
    type State = O::Saved;

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let nodes = ops.parents.map(|node| node.map(|node| node.id));
        O::backward(ops.state, dy, InputGrads::new(&nodes, grads));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{constant, leaf, values};

    /// `a * b`, or `a` alone.
    #[derive(Debug)]
    struct Product;

    impl<B: Backend, const N: usize> FusedOp<B, N> for Product {
        type Saved = (FloatTensor<B>, Option<FloatTensor<B>>);

        fn forward(self, inputs: [FloatTensor<B>; N]) -> (FloatTensor<B>, Self::Saved) {
            let ([a], [b]) = optional(inputs);
            let y = match b.clone() {
                Some(b) => B::float_mul(a.clone(), b),
                None => a.clone(),
            };
            (y, (a, b))
        }

        fn backward((a, b): Self::Saved, dy: FloatTensor<B>, mut grads: InputGrads<'_, B>) {
            let da = match b {
                Some(b) => B::float_mul(dy.clone(), b),
                None => dy.clone(),
            };
            assert!(grads.wants(0) && !grads.wants(2));
            grads.register_all([Some(da), Some(B::float_mul(dy, a))]);
        }
    }

    #[test]
    fn inputs_without_a_graph_are_constants() {
        let a = leaf(constant([3]));
        let b: Tensor<1> = constant([3]);
        // One constant is on the device with autodiff, the other is not.
        for b in [b.clone(), b.clone().inner()] {
            let y: Tensor<1> = fused(
                Product,
                [a.clone().into_dispatch(), b.clone().into_dispatch()],
            );
            let da = a.grad(&y.sum().backward()).unwrap();
            assert_eq!(values(da), values(b));
        }
        let y: Tensor<1> = fused(Product, [b.clone().into_dispatch(), b.into_dispatch()]);
        assert!(!y.is_tracked());
    }

    #[test]
    fn optional_inputs_may_be_left_out() {
        let a: Tensor<1> = leaf(constant([3]));
        let y: Tensor<1> = fused(Product, [a.clone().into_dispatch()]);
        assert_eq!(values(a.grad(&y.sum().backward()).unwrap()), [1.0; 3]);
        assert_eq!(optional([1, 2]), ([1], [Some(2), None]));
    }

    #[test]
    fn a_constant_brings_its_device() {
        let x: Tensor<1> = constant([3]).inner();
        assert!(
            !with_autodiff_of(x.clone(), &x.device())
                .device()
                .is_autodiff()
        );
        let device = crate::testing::device();
        assert!(with_autodiff_of(x, &device).device().is_autodiff());
    }
}
