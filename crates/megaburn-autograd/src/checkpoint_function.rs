//! Functions that forward computes without a graph, and that backward recomputes in a graph of
//! their own.

use std::fmt::{self, Debug, Formatter};
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, TensorMetadata, backend_extension};
use burn::tensor::{Device, Shape, Tensor};

use crate::IntoPrimitive;
use crate::backend_ops::reshaped;
use crate::multi_output::{OutputGrads, multi_output};
use crate::on_every_backend;

/// The operands of a checkpointed function, registered in the caller's graph so that they receive
/// its gradients although its forward pass was not recorded. See [`CheckpointFunction::results`].
///
/// Source: Chen et al. 2016, <https://arxiv.org/abs/1604.06174>; Megatron-LM
/// `megatron/core/tensor_parallel/random.py`, `CheckpointFunction`.
#[derive(Debug)]
pub struct CheckpointFunction {
    /// `[1]`: a placeholder that depends on all operands added so far.
    end: Tensor<1>,
    gradients: Slots,
    len: usize,
}

/// The gradient of each operand as one row, once it is known.
type Slots = Arc<Mutex<Vec<Option<Tensor<2>>>>>;

impl CheckpointFunction {
    /// No operands yet, on a device with autodiff.
    pub fn new(device: &Device) -> Self {
        Self {
            end: Tensor::empty([1], device),
            gradients: Slots::default(),
            len: 0,
        }
    }

    /// Adds the next operand.
    pub fn add<const D: usize>(&mut self, x: Tensor<D>) {
        let place = GradSlot {
            gradients: self.gradients.clone(),
            index: self.len,
        };
        let end = self.end.clone().into_dispatch();
        let end = <Dispatch as RecomputeOps>::operand(end, x.into_dispatch(), place);
        (self.end, self.len) = (Tensor::from_dispatch(end), self.len + 1);
    }

    /// Registers `results`, which have no graph, as functions of the operands. When the backward
    /// pass reaches them, it calls `backward` once, with the gradient of each result that has one,
    /// off the autodiff device. `backward` returns the gradients of the operands in their order,
    /// also off the autodiff device: `None` for an operand that needs no gradient, or whose
    /// gradient went elsewhere.
    ///
    /// `backward` may build a graph of its own and go backward in it. That graph must not contain a
    /// node of the caller's graph, on which Burn holds a lock.
    ///
    /// # Panics
    /// If a result has a graph, which no backward pass would ever reach. When backward reaches the
    /// results: if there are not as many gradients as operands.
    pub fn results<const D: usize, const N: usize>(
        self,
        results: [Tensor<D>; N],
        backward: impl FnOnce([Option<Tensor<D>>; N]) -> Vec<Option<Tensor<2>>> + Send + 'static,
    ) -> [Tensor<D>; N] {
        let Self {
            end,
            gradients,
            len,
        } = self;
        assert!(
            !results.iter().any(Tensor::is_tracked),
            "CheckpointFunction: a result depends on a tracked tensor that was not added as an \
            operand"
        );
        let shapes = results.each_ref().map(Tensor::dims);
        let work = move |found: Vec<Option<Tensor<2>>>| {
            let mut found = found.into_iter().zip(shapes);
            let of_results = std::array::from_fn(|_| {
                let (gradient, shape) = found.next().expect("there is one gradient per result");
                Some(reshaped(gradient?, shape))
            });
            let of_operands = backward(of_results);
            let found = of_operands.len();
            assert!(
                found == len,
                "CheckpointFunction: {found} gradients were returned for {len} operands"
            );
            *gradients.lock().unwrap_or_else(PoisonError::into_inner) = of_operands;
        };
        let work = CheckpointBackward {
            mailbox: OutputGrads::new(N),
            backward: Arc::new(Mutex::new(Some(Box::new(work)))),
        };
        let end = <Dispatch as RecomputeOps>::recomputed(end.into_dispatch(), work.clone());
        let mut places = 0..;
        results.map(|y| {
            let place = places.next().expect("the range is infinite");
            let end = end.clone();
            let mailbox = work.mailbox.clone();
            let y = <Dispatch as RecomputeOps>::result(end, y.into_dispatch(), mailbox, place);
            Tensor::from_dispatch(y)
        })
    }
}

/// The slot that receives the gradient of one operand.
#[derive(Clone, Debug)]
pub(crate) struct GradSlot {
    gradients: Slots,
    index: usize,
}

impl GradSlot {
    fn take(&self) -> Option<Tensor<2>> {
        let mut gradients = self
            .gradients
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        gradients.get_mut(self.index)?.take()
    }
}

type BackwardFn = Box<dyn FnOnce(Vec<Option<Tensor<2>>>) + Send>;

/// The backward function that is still to run, and the output gradients that it needs.
#[derive(Clone)]
pub(crate) struct CheckpointBackward {
    mailbox: OutputGrads,
    backward: Arc<Mutex<Option<BackwardFn>>>,
}

impl Debug for CheckpointBackward {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("CheckpointBackward")
            .field("mailbox", &self.mailbox)
            .finish_non_exhaustive()
    }
}

#[backend_extension(Cube: cfg(feature = "cuda"), Flex: cfg(feature = "flex"), Autodiff)]
pub(crate) trait RecomputeOps: Backend {
    /// Makes `end` depend on `x` too.
    fn operand(end: FloatTensor<Self>, x: FloatTensor<Self>, place: GradSlot) -> FloatTensor<Self>;

    /// Puts the node that runs `work` after `end`.
    fn recomputed(end: FloatTensor<Self>, work: CheckpointBackward) -> FloatTensor<Self>;

    /// Makes `y` depend on `end`.
    fn result(
        end: FloatTensor<Self>,
        y: FloatTensor<Self>,
        mailbox: OutputGrads,
        place: usize,
    ) -> FloatTensor<Self>;
}

on_every_backend! {
    impl RecomputeOps {
        fn operand(
            end: FloatTensor<Self>,
            _: FloatTensor<Self>,
            _: GradSlot,
        ) -> FloatTensor<Self> {
            end
        }

        fn recomputed(end: FloatTensor<Self>, _: CheckpointBackward) -> FloatTensor<Self> {
            end
        }

        fn result(
            _: FloatTensor<Self>,
            y: FloatTensor<Self>,
            _: OutputGrads,
            _: usize,
        ) -> FloatTensor<Self> {
            y
        }
    }
}

#[derive(Debug)]
struct OperandBackward;

impl<B: RecomputeOps + IntoPrimitive> Backward<B, 2> for OperandBackward {
    type State = (GradSlot, Shape);

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        // `sign` carries no values. Its only purpose is that autodiff visits the previous operand
        // as well.
        let sign = grads.consume::<B>(&ops.node);
        let [end, x] = ops.parents;
        let (place, shape) = ops.state;
        if let Some((node, gradient)) = x.zip(place.take()) {
            grads.register::<B>(node.id, B::float_reshape(B::unwrap(gradient), shape));
        }
        if let Some(node) = end {
            grads.register::<B>(node.id, sign);
        }
    }
}

#[derive(Debug)]
struct RecomputeBackward;

impl<B: RecomputeOps + IntoPrimitive> Backward<B, 1> for RecomputeBackward {
    type State = CheckpointBackward;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        // This gradient carries no values. It only signals that an output left its gradient in the
        // mailbox.
        drop(grads.consume::<B>(&ops.node));
        let [end] = ops.parents;
        let CheckpointBackward { mailbox, backward } = ops.state;
        let as_row = |gradient: FloatTensor<B>| {
            let row = Shape::from([1, gradient.shape().num_elements()]);
            B::wrap(B::float_reshape(gradient, row))
        };
        let gradients = mailbox.take::<B>();
        let first = gradients
            .iter()
            .flatten()
            .next()
            .expect("at least one result has a gradient");
        let sign = B::float_empty(Shape::from([1]), &first.device(), first.dtype().into());
        let backward = backward
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let backward = backward.expect("backward runs only once");
        backward(
            gradients
                .into_iter()
                .map(|gradient| gradient.map(as_row))
                .collect(),
        );
        if let Some(node) = end {
            grads.register::<B>(node.id, sign);
        }
    }
}

impl<B: RecomputeOps + IntoPrimitive, C: CheckpointStrategy> RecomputeOps for Autodiff<B, C> {
    fn operand(end: FloatTensor<Self>, x: FloatTensor<Self>, place: GradSlot) -> FloatTensor<Self> {
        let (end, for_end) = end.into_parts();
        let (x, for_x) = x.into_parts();
        match OperandBackward
            .prepare::<C>([for_end, for_x])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(op) => op.finish((place, x.shape()), end),
            OpsKind::UnTracked(op) => op.finish(end),
        }
    }

    fn recomputed(end: FloatTensor<Self>, work: CheckpointBackward) -> FloatTensor<Self> {
        let (end, for_end) = end.into_parts();
        match RecomputeBackward
            .prepare::<C>([for_end])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(op) => op.finish(work, end),
            OpsKind::UnTracked(op) => op.finish(end),
        }
    }

    fn result(
        end: FloatTensor<Self>,
        y: FloatTensor<Self>,
        mailbox: OutputGrads,
        place: usize,
    ) -> FloatTensor<Self> {
        let (y, _) = y.into_parts();
        multi_output::<B, C>(end, &mailbox, place, |_| y)
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, activation};
    use rstest::rstest;

    use super::*;
    use crate::DetachedOutput;
    use crate::testing::{assert_refused, constant, leaf, values};

    /// `tanh(x) w` and `x + w`, of `x` and a row `w`, which is an operand too.
    fn both([x, w]: [Tensor<3>; 2]) -> [Tensor<3>; 2] {
        [activation::tanh(x.clone()) * w.clone(), x + w]
    }

    /// Computes `both` without saving its activations.
    fn forgotten([x, w]: [Tensor<3>; 2]) -> [Tensor<3>; 2] {
        let inner = [x.clone().inner(), w.clone().inner()];
        let results = both(inner.clone());
        let mut operands = CheckpointFunction::new(&x.device());
        operands.add(x);
        operands.add(w);
        operands.results(results.map(Tensor::from_inner), |found| {
            let leaves = inner.map(|x| Tensor::from_inner(x).require_grad());
            let ends = both(leaves.clone()).into_iter().zip(found);
            let ends = ends.filter_map(|(y, gradient)| Some((DetachedOutput::of(y), gradient?)));
            let mut grads = DetachedOutput::backward_all(ends);
            let gradient = |x: Tensor<3>| Some(x.grad_remove(&mut grads)?.flatten(0, 1));
            leaves.map(gradient).into()
        })
    }

    #[rstest]
    fn gradients_are_those_of_a_function_that_is_kept(
        #[values(DType::F32, DType::BF16)] dtype: DType,
        #[values([true, true], [true, false], [false, true])] used: [bool; 2],
    ) {
        let run = |f: fn([Tensor<3>; 2]) -> [Tensor<3>; 2], [x, w]: &[Tensor<3>; 2]| {
            let x = leaf(x.clone());
            let w = leaf(w.clone());
            // Neither operand is a leaf.
            let ys = f([x.clone() * 2.0, w.clone().exp()]);
            let found = ys.clone().map(|y| y.inner().into_data());
            let ys = ys
                .into_iter()
                .zip(used)
                .filter(|(_, used)| *used)
                .map(|(y, _)| y);
            let y = ys.reduce(|a, b| a.clone() * b.sin() + a).unwrap();
            let grads = y.sum().backward();
            (found, [x, w].map(|x| x.grad(&grads).unwrap().into_data()))
        };
        for shape in [[4, 2, 6], [3, 1, 5]] {
            let inputs = [constant(shape).cast(dtype), constant(shape).cast(dtype)];
            assert_eq!(run(forgotten, &inputs), run(both, &inputs));
        }
    }

    #[test]
    fn an_operand_that_needs_no_gradient_gets_none_and_none_at_all_is_no_graph() {
        let [x, w] = [constant([2, 1, 3]), constant([2, 1, 3])];
        let ys = forgotten([leaf(x.clone()), w.clone()]);
        let grads = (ys[0].clone() + ys[1].clone()).sum().backward();
        assert!(w.grad(&grads).is_none());
        let ys = forgotten([x.clone(), w.clone()]);
        assert!(ys.iter().all(|y| !y.is_tracked()));
        assert_eq!(
            ys.map(|y| values(y.inner())),
            both([x, w]).map(|y| values(y.inner()))
        );
    }

    #[test]
    #[should_panic(expected = "depends on a tracked tensor that was not added as an operand")]
    fn a_result_with_a_graph_of_its_own_is_refused() {
        let x = leaf(constant([2, 1, 3]));
        let other = leaf(constant([2, 1, 3]));
        let mut operands = CheckpointFunction::new(&x.device());
        operands.add(x.clone());
        operands.results([Tensor::from_inner(x.inner()) * other], |_| vec![None]);
    }

    #[test]
    fn a_gradient_for_each_operand_is_asked_for() {
        let x = leaf(constant([2, 1, 3]));
        let mut operands = CheckpointFunction::new(&x.device());
        operands.add(x.clone());
        let [y] = operands.results([Tensor::from_inner(x.inner())], |_| vec![]);
        assert_refused(
            || y.sum().backward(),
            "CheckpointFunction: 0 gradients were returned for 1 operands",
        );
    }
}
