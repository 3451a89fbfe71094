//! Operations with several differentiable results.
//!
//! Burn's autodiff supports operations of one output only. Here that output is hidden. Each result
//! is a node after it that passes its own gradient on through [`OutputGrads`], and the operation
//! takes all of them at once. The node that runs first also registers its gradient with the
//! operation, only as a signal that there is one; this takes no pass over memory.

use std::any::Any;
use std::array;
use std::fmt::{self, Debug, Formatter};
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[cfg(any(feature = "cuda", feature = "wgpu"))]
use burn::backend::Cube;
#[cfg(feature = "ndarray")]
use burn::backend::NdArray;
use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, DispatchTensor, Flex, backend_extension};
use burn::tensor::Tensor;

use crate::fused_op::InputGrads;
use crate::fused_op::{Inputs, parts};

/// Like [`FusedOp`](crate::FusedOp), with `K` results, which all have gradients.
pub trait MultiOutputOp<B: Backend, const N: usize, const K: usize>:
    Debug + Sized + 'static
{
    /// What is saved for backward.
    type Saved: Clone + Debug + Send + 'static;

    /// Computes the results and what is saved for backward.
    fn forward(self, inputs: [FloatTensor<B>; N]) -> ([FloatTensor<B>; K], Self::Saved);

    /// Registers the gradients of the inputs. `dys` are the gradients of the results, of which at
    /// least one is given.
    fn backward(saved: Self::Saved, dys: [Option<FloatTensor<B>>; K], grads: InputGrads<'_, B>);
}

/// An operation that is implemented for every backend that is built in.
pub trait MultiOutputOnEveryBackend<const N: usize, const K: usize>:
    MultiOutputOp<Flex, N, K> + OnNdArray<N, K> + OnCube<N, K>
{
}
impl<O, const N: usize, const K: usize> MultiOutputOnEveryBackend<N, K> for O where
    O: MultiOutputOp<Flex, N, K> + OnNdArray<N, K> + OnCube<N, K>
{
}

/// An operation that is implemented for a backend, if the backend is built in.
macro_rules! on_optional_backend {
    ($on:ident: $backend:ident if $is_built:meta) => {
        /// An operation that is implemented for a backend, if the backend is built in.
        #[cfg($is_built)]
        pub trait $on<const N: usize, const K: usize>: MultiOutputOp<$backend, N, K> {}
        #[cfg($is_built)]
        impl<O: MultiOutputOp<$backend, N, K>, const N: usize, const K: usize> $on<N, K> for O {}

        /// An operation that is implemented for a backend, if the backend is built in.
        #[cfg(not($is_built))]
        pub trait $on<const N: usize, const K: usize> {}
        #[cfg(not($is_built))]
        impl<O, const N: usize, const K: usize> $on<N, K> for O {}
    };
}

on_optional_backend!(OnNdArray: NdArray if feature = "ndarray");
on_optional_backend!(OnCube: Cube if any(feature = "cuda", feature = "wgpu"));

/// Runs an operation with several results. They are one operation: a `backward` from one of them
/// consumes the graph of all.
pub fn fused_outputs<O, const N: usize, const K: usize, const D: usize>(
    op: O,
    inputs: [DispatchTensor; N],
) -> [Tensor<D>; K]
where
    O: MultiOutputOnEveryBackend<N, K>,
{
    let inputs = Inputs(inputs.into());
    let outputs = <Dispatch as MultiOutputOps>::multi_output_op::<O, N, K>(op, inputs);
    let mut outputs = outputs.into_iter().map(Tensor::from_dispatch);
    array::from_fn(|_| outputs.next().expect("there are K results"))
}

#[backend_extension(
    Cube: cfg(any(feature = "cuda", feature = "wgpu")),
    Flex,
    NdArray: cfg(feature = "ndarray"),
    Autodiff
)]
pub(crate) trait MultiOutputOps: Backend {
    fn multi_output_op<O: MultiOutputOnEveryBackend<N, K>, const N: usize, const K: usize>(
        op: O,
        #[extension_type] inputs: Inputs<Self>,
    ) -> Vec<FloatTensor<Self>>;
}

/// Implements [`MultiOutputOps`] for a backend without and with autodiff.
macro_rules! implement {
    ($backend:ident) => {
        impl MultiOutputOps for $backend {
            fn multi_output_op<O, const N: usize, const K: usize>(
                op: O,
                inputs: Inputs<Self>,
            ) -> Vec<FloatTensor<Self>>
            where
                O: MultiOutputOnEveryBackend<N, K>,
            {
                let (outputs, _) = MultiOutputOp::<Self, N, K>::forward(op, inputs.into_array());
                outputs.into()
            }
        }

        impl<C: CheckpointStrategy> MultiOutputOps for Autodiff<$backend, C> {
            fn multi_output_op<O, const N: usize, const K: usize>(
                op: O,
                inputs: Inputs<Self>,
            ) -> Vec<FloatTensor<Self>>
            where
                O: MultiOutputOnEveryBackend<N, K>,
            {
                recorded::<O, $backend, C, N, K>(op, inputs)
            }
        }
    };
}

implement!(Flex);
#[cfg(feature = "ndarray")]
implement!(NdArray);
#[cfg(any(feature = "cuda", feature = "wgpu"))]
implement!(Cube);

/// Runs an operation and records it in the graph of its inputs.
fn recorded<O, B, C, const N: usize, const K: usize>(
    op: O,
    inputs: Inputs<Autodiff<B, C>>,
) -> Vec<FloatTensor<Autodiff<B, C>>>
where
    O: MultiOutputOp<B, N, K>,
    B: Backend,
    C: CheckpointStrategy,
{
    let (inputs, nodes) = parts(inputs);
    let (outputs, saved) = op.forward(inputs);
    let Some(hidden) = outputs.last().cloned() else {
        return Vec::new();
    };
    let collected = OutputGrads::new(K);
    let node = MultiOutputBackward::<O, K>(PhantomData);
    let hidden = match Backward::<B, N>::prepare::<C>(node, nodes)
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prepared) => prepared.finish((saved, collected.clone()), hidden),
        OpsKind::UnTracked(prepared) => prepared.finish(hidden),
    };
    let outputs = outputs.into_iter().enumerate().map(|(place, output)| {
        let (_, node) = hidden.clone().into_parts();
        match Backward::<B, 1>::prepare::<C>(OutputBackward, [node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prepared) => prepared.finish((collected.clone(), place), output),
            OpsKind::UnTracked(prepared) => prepared.finish(output),
        }
    });
    outputs.collect()
}

/// A gradient on any backend.
type AnyTensor = Box<dyn Any + Send>;

/// The gradients of an operation's results, collected for its backward.
#[derive(Clone)]
struct OutputGrads(Arc<Mutex<Vec<Option<AnyTensor>>>>);

impl Debug for OutputGrads {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OutputGrads")
            .field(&self.places().len())
            .finish()
    }
}

impl OutputGrads {
    /// Has an empty slot for each of the results.
    fn new(results: usize) -> Self {
        Self(Arc::new(Mutex::new((0..results).map(|_| None).collect())))
    }

    /// Takes the gradient of each result that has one, and leaves the slots empty. The gradient
    /// that was registered for the operation itself is one of them.
    fn take<B: Backend, const K: usize>(&self) -> [Option<FloatTensor<B>>; K] {
        let mut places = self.places();
        array::from_fn(|place| {
            let gradient = places[place].take()?.downcast();
            Some(*gradient.expect("all results are on the same backend"))
        })
    }

    /// Stores a gradient; returns whether it is the first.
    fn leave(&self, place: usize, grad: AnyTensor) -> bool {
        let mut places = self.places();
        let first = places.iter().all(Option::is_none);
        places[place] = Some(grad);
        first
    }

    fn places(&self) -> MutexGuard<'_, Vec<Option<AnyTensor>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The backward pass of the hidden output.
#[derive(Debug)]
struct MultiOutputBackward<O, const K: usize>(PhantomData<fn() -> O>);

impl<O, B, const N: usize, const K: usize> Backward<B, N> for MultiOutputBackward<O, K>
where
    O: MultiOutputOp<B, N, K>,
    B: Backend,
{
    type State = (O::Saved, OutputGrads);

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        // This gradient only signals that `OutputGrads` is not empty.
        drop(grads.consume::<B>(&ops.node));
        let (saved, collected) = ops.state;
        let nodes = ops.parents.map(|node| node.map(|node| node.id));
        O::backward(
            saved,
            collected.take::<B, K>(),
            InputGrads::new(&nodes, grads),
        );
    }
}

/// Stores the gradient of one result in [`OutputGrads`].
#[derive(Debug)]
struct OutputBackward;

impl<B: Backend> Backward<B, 1> for OutputBackward {
    /// The slots of the operation, and the index of this result.
    type State = (OutputGrads, usize);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let [parent] = ops.parents;
        let (collected, place) = ops.state;
        let first = collected.leave(place, Box::new(grad.clone()));
        if let (Some(node), true) = (parent, first) {
            grads.register::<B>(node.id, grad);
        }
    }
}
