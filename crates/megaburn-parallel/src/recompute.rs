//! Parts of a model whose backward computes them once more.

use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param},
    tensor::{Gradients, Tensor},
};
use megaburn_kernels::{CheckpointFunction, DetachedOutput, LinearPass, without_deferral};

use crate::{
    ActivationOffload, Recomputable, Residual, recomputable::kept, selective_save::SelectiveSave,
};

/// What `forward` makes of `module` and `inputs`, of which nothing is kept but what `inputs` are made
/// from: backward computes it once more, then its gradients (Megatron's `tensor_parallel.checkpoint`).
/// Gradients are those of keeping it, to the bit, where `forward` gives the same bits again: dropout
/// that is keyed by position does.
///
/// `forward` is called with a copy of the module, whose parameters share their memory. It must use no
/// other parameters, and no tensor that needs a gradient but its inputs. On a device without autodiff it
/// is simply called. Weights' gradients that a zero-bubble schedule puts off are not put off here: they
/// would hold all that is computed once more. What attention gives may be [kept](crate::keeping_attention).
///
/// # Panics
/// If `forward` uses such a tensor.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use megaburn_collective::Group;
/// use megaburn_parallel::{MlpConfig, recomputed};
///
/// let device = Device::flex().autodiff();
/// let mlp = MlpConfig::gated(8, 24).with_name("mlp").init(&Group::single(0), &device)?;
/// let x = Tensor::<3>::ones([4, 2, 8], &device).require_grad();
/// let [y] = recomputed(&mlp, [x.clone().into()], |mlp, [x]| [mlp.forward(x)]);
/// let grads = y.sum().backward();
/// assert!(x.grad(&grads).is_some() && mlp.up.weight.grad(&grads).is_some());
/// # Ok::<_, megaburn_parallel::ParallelError>(())
/// ```
///
/// Source: Chen et al. 2016, <https://arxiv.org/abs/1604.06174>; Megatron-LM
/// `megatron/core/tensor_parallel/random.py`, `checkpoint`.
/// # Collective
/// As `forward`, which runs again, on all ranks, when backward comes to it.
pub fn recomputed<M: Module + 'static, const D: usize, const I: usize, const O: usize>(
    module: &M,
    inputs: [Recomputable<D>; I],
    forward: impl Fn(&M, [Tensor<D>; I]) -> [Tensor<3>; O] + Send + Sync + 'static,
) -> [Tensor<3>; O] {
    let Some(device) = inputs
        .first()
        .map(|input| input.device())
        .filter(|d| d.is_autodiff())
    else {
        return forward(module, inputs.map(Recomputable::into_tensor));
    };
    let mut operands = CheckpointFunction::new(&device);
    let inputs = inputs.map(Recomputable::into_parts);
    inputs.iter().for_each(|(x, _)| operands.add(x.clone()));
    let mut params = RegisterParams {
        operands,
        are_trained: Vec::new(),
    };
    module.visit(&mut params);
    let RegisterParams {
        operands,
        are_trained,
    } = params;

    let module = module.clone().map(&mut DetachParams { are_trained: None });
    let plain = inputs
        .each_ref()
        .map(|(x, _)| Tensor::from_inner(x.clone().inner()));
    let attention = SelectiveSave::if_selective();
    let results = attention.first(|| forward(&module, plain));
    let sources = inputs.map(|(x, again)| (x.dims(), again.unwrap_or_else(|| kept(&x))));
    operands.results(results, move |gradients| {
        let leaves = sources.map(|(shape, again)| {
            Tensor::from_inner(again.compute().reshape(shape)).require_grad()
        });
        let mut trained = are_trained.into_iter();
        let module = module.map(&mut DetachParams {
            are_trained: Some(&mut trained),
        });
        let again = || attention.again(|| forward(&module, leaves.clone()));
        let results = LinearPass::backward(again);
        // What is made of nothing that learns has no graph.
        let ends = results
            .into_iter()
            .zip(gradients)
            .filter(|(y, _)| y.is_tracked());
        let ends = ends.filter_map(|(y, gradient)| Some((DetachedOutput::of(y), gradient?)));
        let ends: Vec<_> = ends.collect();
        let grads =
            (!ends.is_empty()).then(|| without_deferral(|| DetachedOutput::backward_all(ends)));
        let mut found = CollectGrads {
            grads,
            rows: Vec::new(),
        };
        for x in leaves {
            let gradient = found
                .take(&x)
                .unwrap_or_else(|| as_row(x.inner().zeros_like()));
            found.rows.push(Some(gradient));
        }
        module.visit(&mut found);
        found.rows
    })
}

/// As [`recomputed`], of a part that goes from one norm's result and the stream behind that norm to a
/// stream whose last term is still to be added.
///
/// Of the norm's result nothing is kept where the [norm](crate::Norm::with_recompute) computes it again,
/// so that the stream, which the norm keeps anyway, is all there is.
///
/// # Collective
/// As [`recomputed`].
pub fn checkpoint_residual<M: Module + 'static>(
    module: &M,
    normed: Recomputable<3>,
    stream: Residual,
    forward: impl Fn(&M, Tensor<3>, Residual) -> Residual + Send + Sync + 'static,
) -> Residual {
    let [sum, term] = recomputed(
        module,
        [normed, stream.sum().into()],
        move |module, [y, x]| ends(forward(module, y, x.into())),
    );
    Residual::from(sum) + term
}

/// As [`recomputed`], of a part that goes from one stream to another, of which nothing is kept on the GPU:
/// the stream before it waits in host memory, unless it is to `stay`.
///
/// # Collective
/// As [`recomputed`].
pub fn offload_residual<M: Module + 'static>(
    module: &M,
    stream: Residual,
    offload: &ActivationOffload,
    stay: bool,
    forward: impl Fn(&M, Residual) -> Residual + Send + Sync + 'static,
) -> Residual {
    // A sum and its last term, so that what reads them first adds them as it does otherwise.
    let [sum, term] = match stream.into_parts() {
        (sum, None) => {
            let inputs = offload.inputs([sum], stay);
            recomputed(module, inputs, move |module, [x]| {
                ends(forward(module, x.into()))
            })
        }
        (sum, Some(term)) => {
            let inputs = offload.inputs([sum, term], stay);
            recomputed(module, inputs, move |module, [x, term]| {
                ends(forward(module, Residual::from(x) + term))
            })
        }
    };
    Residual::from(sum) + term
}

/// A stream as the two tensors that are added up next.
fn ends(stream: Residual) -> [Tensor<3>; 2] {
    let (sum, term) = stream.into_parts();
    let term = term.unwrap_or_else(|| sum.zeros_like());
    [sum, term]
}

fn as_row<const D: usize>(x: Tensor<D>) -> Tensor<2> {
    let len = x.shape().num_elements();
    x.reshape([1, len])
}

/// Makes all parameters of a module operands, and sees which are trained.
struct RegisterParams {
    operands: CheckpointFunction,
    are_trained: Vec<bool>,
}

impl ModuleVisitor for RegisterParams {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let x = param.val();
        self.are_trained.push(x.is_require_grad());
        self.operands.add(x);
    }
}

/// Takes parameters out of their graph, to leaves of others where they are said to be trained.
struct DetachParams<'a> {
    are_trained: Option<&'a mut std::vec::IntoIter<bool>>,
}

impl ModuleMapper for DetachParams<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let is_trained = self
            .are_trained
            .as_mut()
            .and_then(Iterator::next)
            .unwrap_or(false);
        param.map(|x| {
            let x = Tensor::from_inner(x.inner());
            if is_trained { x.require_grad() } else { x }
        })
    }
}

/// Takes what inputs and parameters get.
struct CollectGrads {
    grads: Option<Gradients>,
    rows: Vec<Option<Tensor<2>>>,
}

impl CollectGrads {
    fn take<const D: usize>(&mut self, x: &Tensor<D>) -> Option<Tensor<2>> {
        x.grad_remove(self.grads.as_mut()?).map(as_row)
    }
}

impl ModuleVisitor for CollectGrads {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let gradient = self.take(&param.val());
        self.rows.push(gradient);
    }
}
