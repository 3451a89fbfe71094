//! Functions that forward computes without a graph, and that backward recomputes in a graph of
//! their own.

use std::fmt::{self, Debug, Formatter};
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{Device, Shape, Tensor};

use crate::backend_ops::reshaped;
use crate::{
    fused_op::{FusedOp, InputGrads, fused},
    into_primitive::IntoPrimitive,
    multi_output::{MultiOutputOp, fused_outputs},
};

/// The operands of a checkpointed function, registered in the caller's graph so that they receive
/// its gradients although its forward pass was not recorded. See [`CheckpointOperands::results`].
///
/// Source: Chen et al. 2016, <https://arxiv.org/abs/1604.06174>; Megatron-LM
/// `megatron/core/tensor_parallel/random.py`, `CheckpointFunction`.
#[derive(Debug)]
pub struct CheckpointOperands {
    /// `[1]`: a placeholder that depends on all operands added so far.
    end: Tensor<1>,
    gradients: Slots,
    len: usize,
}

/// The gradient of each operand as one row, once it is known.
type Slots = Arc<Mutex<Vec<Option<Tensor<2>>>>>;

impl CheckpointOperands {
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
        let operand = Operand(GradSlot {
            gradients: self.gradients.clone(),
            index: self.len,
        });
        self.end = fused(
            operand,
            [self.end.clone().into_dispatch(), x.into_dispatch()],
        );
        self.len += 1;
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
            "CheckpointOperands: a result depends on a tracked tensor that was not added as an \
            operand"
        );
        let backward = move |of_results: [Option<Tensor<D>>; N]| {
            let of_operands = backward(of_results);
            let found = of_operands.len();
            assert!(
                found == len,
                "CheckpointOperands: {found} gradients were returned for {len} operands"
            );
            *gradients.lock().unwrap_or_else(PoisonError::into_inner) = of_operands;
        };
        let results = Results {
            results: results.map(Tensor::inner),
            backward: CheckpointBackward(Arc::new(Mutex::new(Some(Box::new(backward))))),
        };
        fused_outputs(results, [end.into_dispatch()])
    }
}

/// The slot that receives the gradient of one operand.
#[derive(Clone, Debug)]
struct GradSlot {
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

/// Makes the placeholder, the first input, depend on an operand, the second.
#[derive(Debug)]
struct Operand(GradSlot);

impl<B: IntoPrimitive> FusedOp<B, 2> for Operand {
    /// The slot of the operand's gradient, and the operand's shape.
    type Saved = (GradSlot, Shape);

    fn forward(self, [end, x]: [FloatTensor<B>; 2]) -> (FloatTensor<B>, Self::Saved) {
        (end, (self.0, x.shape()))
    }

    fn backward((place, shape): Self::Saved, sign: FloatTensor<B>, mut grads: InputGrads<'_, B>) {
        if let Some(gradient) = place.take().filter(|_| grads.wants(1)) {
            grads.register(1, B::float_reshape(B::unwrap(gradient), shape));
        }
        // `sign` carries no values. Its only purpose is that autodiff visits the previous operand
        // as well.
        grads.register(0, sign);
    }
}

/// The backward function of a checkpointed function, which takes the gradients of its results.
type BackwardFn<const D: usize, const N: usize> = Box<dyn FnOnce([Option<Tensor<D>>; N]) + Send>;

/// The backward function that is still to run.
#[derive(Clone)]
struct CheckpointBackward<const D: usize, const N: usize>(Arc<Mutex<Option<BackwardFn<D, N>>>>);

impl<const D: usize, const N: usize> Debug for CheckpointBackward<D, N> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("CheckpointBackward").finish_non_exhaustive()
    }
}

/// Makes the results of a checkpointed function depend on the placeholder.
#[derive(Debug)]
struct Results<const D: usize, const N: usize> {
    results: [Tensor<D>; N],
    backward: CheckpointBackward<D, N>,
}

impl<B: IntoPrimitive, const D: usize, const N: usize> MultiOutputOp<B, 1, N> for Results<D, N> {
    type Saved = CheckpointBackward<D, N>;

    fn forward(self, _: [FloatTensor<B>; 1]) -> ([FloatTensor<B>; N], Self::Saved) {
        (self.results.map(B::unwrap), self.backward)
    }

    fn backward(
        saved: Self::Saved,
        dys: [Option<FloatTensor<B>>; N],
        mut grads: InputGrads<'_, B>,
    ) {
        let first = dys.iter().flatten().next();
        let first = first.expect("at least one result has a gradient");
        let sign = B::float_empty(Shape::from([1]), &first.device(), first.dtype().into());
        let backward = saved
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let backward = backward.expect("backward runs only once");
        backward(dys.map(|dy| dy.map(contiguous::<B, D>)));
        grads.register(0, sign);
    }
}

/// The tensor of `x`, without gaps between its elements.
fn contiguous<B: IntoPrimitive, const D: usize>(x: FloatTensor<B>) -> Tensor<D> {
    let shape = x.shape();
    let row = Shape::from([1, shape.num_elements()]);
    let row: Tensor<2> = B::wrap(B::float_reshape(x, row));
    reshaped(row, shape.dims())
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, activation};
    use rstest::rstest;

    use super::*;
    use crate::detached_output::DetachedOutput;
    use crate::testing::{assert_refused, constant, leaf, values};

    /// `tanh(x) w` and `x + w`, of `x` and a row `w`, which is an operand too.
    fn both([x, w]: [Tensor<3>; 2]) -> [Tensor<3>; 2] {
        [activation::tanh(x.clone()) * w.clone(), x + w]
    }

    /// Computes `both` without saving its activations.
    fn forgotten([x, w]: [Tensor<3>; 2]) -> [Tensor<3>; 2] {
        let inner = [x.clone().inner(), w.clone().inner()];
        let results = both(inner.clone());
        let mut operands = CheckpointOperands::new(&x.device());
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
        let mut operands = CheckpointOperands::new(&x.device());
        operands.add(x.clone());
        operands.results([Tensor::from_inner(x.inner()) * other], |_| vec![None]);
    }

    #[test]
    fn a_gradient_for_each_operand_is_asked_for() {
        let x = leaf(constant([2, 1, 3]));
        let mut operands = CheckpointOperands::new(&x.device());
        operands.add(x.clone());
        let [y] = operands.results([Tensor::from_inner(x.inner())], |_| vec![]);
        assert_refused(
            || y.sum().backward(),
            "CheckpointOperands: 0 gradients were returned for 1 operands",
        );
    }
}
