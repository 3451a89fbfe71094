//! Recompute (activation checkpointing) of parts of a model, up to whole blocks: `Decoder::forward_stage`
//! of `megaburn-models` calls [`checkpoint_residual`] for full recompute.

use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param},
    tensor::{Gradients, Tensor},
};
use megaburn_autograd::{
    CheckpointOperands, DetachedOutput, LinearPass, RecomputeFn, without_deferral,
};

use crate::{
    norm::Norm,
    offload::ActivationOffload,
    recomputable::{Recomputable, kept},
    residual::Residual,
};

/// Runs `forward` on `module` and `inputs` and saves nothing but the sources of `inputs`. Backward
/// runs `forward` a second time and then computes its gradients (Megatron's
/// `tensor_parallel.checkpoint`). The gradients equal those without recompute, bit for bit, if
/// `forward` repeats the same bits, as position-keyed dropout does.
///
/// - `forward` is called with a copy of the module whose parameters share their memory. It must use
///   no other parameters, and no tensors that require a gradient except its inputs.
/// - On a device without autodiff it is simply called.
/// - Weight gradients that a zero-bubble schedule defers are not deferred here: they would keep all
///   recomputed activations alive.
/// - The output of attention may be [saved](crate::SelectiveSave).
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
/// As `forward`, which runs a second time, on all ranks, in the backward pass.
pub fn recomputed<M: Module + 'static, const D: usize, const I: usize, const O: usize>(
    module: &M,
    inputs: [Recomputable<D>; I],
    forward: impl Fn(&M, [Tensor<D>; I]) -> [Tensor<3>; O] + Send + Sync + 'static,
) -> [Tensor<3>; O] {
    recomputed_with(module, inputs.into(), move |module, inputs| {
        let inputs = <[_; I]>::try_from(inputs);
        forward(module, inputs.expect("as many tensors as inputs"))
    })
}

/// [`recomputed`] for a number of inputs that is known at run time.
fn recomputed_with<M: Module + 'static, const D: usize, const O: usize>(
    module: &M,
    inputs: Vec<Recomputable<D>>,
    forward: impl Fn(&M, Vec<Tensor<D>>) -> [Tensor<3>; O] + Send + Sync + 'static,
) -> [Tensor<3>; O] {
    let Some(device) = inputs
        .first()
        .map(|input| input.device())
        .filter(|d| d.is_autodiff())
    else {
        let inputs = inputs.into_iter().map(Recomputable::into_tensor);
        return forward(module, inputs.collect());
    };
    let mut operands = CheckpointOperands::new(&device);
    let inputs: Vec<_> = inputs.into_iter().map(Recomputable::into_parts).collect();
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
        .iter()
        .map(|(x, _)| Tensor::from_inner(x.clone().inner()));
    let results = forward(&module, plain.collect());
    let sources = inputs
        .into_iter()
        .map(|(x, again)| (x.dims(), again.unwrap_or_else(|| kept(&x))));
    let sources: Vec<_> = sources.collect();
    operands.results(results, move |gradients| {
        let leaf = |(shape, again): ([usize; D], RecomputeFn)| {
            Tensor::from_inner(again.compute().reshape(shape)).require_grad()
        };
        let leaves: Vec<_> = sources.into_iter().map(leaf).collect();
        let mut trained = are_trained.into_iter();
        let module = module.map(&mut DetachParams {
            are_trained: Some(&mut trained),
        });
        let results = LinearPass::backward(|| forward(&module, leaves.clone()));
        // A result that depends on nothing trainable has no graph.
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

/// Like [`recomputed`], for a part that maps one residual stream to another and starts with `norm`,
/// or with the stream itself. If that norm is configured to recompute its result, only the stream
/// before the part is saved, which the norm saves anyway. `memory` is another input of the part, such
/// as the encoder's output that a decoder attends to; it is saved, too.
///
/// # Collective
/// As [`recomputed`].
pub fn checkpoint_residual<M: Module + 'static>(
    module: &M,
    norm: Option<&Norm>,
    stream: Residual,
    memory: Option<Tensor<3>>,
    forward: impl Fn(&M, Residual, Option<Tensor<3>>) -> Residual + Send + Sync + 'static,
) -> Residual {
    let normed = norm.map(|norm| stream.normed(norm));
    let has_norm = normed.is_some();
    let inputs = normed
        .into_iter()
        .chain([stream.sum().into()])
        .chain(memory.map(Recomputable::from));
    let [sum, last] = recomputed_with(module, inputs.collect(), move |module, inputs| {
        let mut inputs = inputs.into_iter();
        let mut next = || inputs.next();
        let normed = if has_norm { next() } else { None };
        let x = next().expect("the stream is an input");
        let stream = match normed {
            Some(normed) => Residual::with_norm(x, normed),
            None => x.into(),
        };
        terms(forward(module, stream, next()))
    });
    Residual::new(sum, Some(last))
}

/// Like [`recomputed`], for a part that maps one residual stream to another and keeps nothing on
/// the GPU: its input waits in host memory, unless `keep_on_device` is set. `memory` is as in
/// [`checkpoint_residual`] and stays on the GPU, because other parts read it, too.
///
/// # Collective
/// As [`recomputed`].
pub fn offload_residual<M: Module + 'static>(
    module: &M,
    stream: Residual,
    memory: Option<Tensor<3>>,
    offload: &ActivationOffload,
    keep_on_device: bool,
    forward: impl Fn(&M, Residual, Option<Tensor<3>>) -> Residual + Send + Sync + 'static,
) -> Residual {
    // Pass the sum and its last term separately, so that the first norm adds them as it does
    // without recompute, with the same bits.
    let (sum, last) = stream.into_parts();
    let has_last = last.is_some();
    let mut inputs: Vec<Recomputable<3>> = match last {
        None => offload.inputs([sum], keep_on_device).into(),
        Some(last) => offload.inputs([sum, last], keep_on_device).into(),
    };
    inputs.extend(memory.map(Recomputable::from));
    let [sum, last] = recomputed_with(module, inputs, move |module, inputs| {
        let mut inputs = inputs.into_iter();
        let mut next = || inputs.next();
        let sum = next().expect("the stream is an input");
        let last = if has_last { next() } else { None };
        terms(forward(module, Residual::new(sum, last), next()))
    });
    Residual::new(sum, Some(last))
}

/// The stream as its sum and the term that is added next.
fn terms(stream: Residual) -> [Tensor<3>; 2] {
    let (sum, last) = stream.into_parts();
    let last = last.unwrap_or_else(|| sum.zeros_like());
    [sum, last]
}

fn as_row<const D: usize>(x: Tensor<D>) -> Tensor<2> {
    let len = x.shape().num_elements();
    x.reshape([1, len])
}

/// Registers all parameters of a module as operands, and records which are trained.
struct RegisterParams {
    operands: CheckpointOperands,
    are_trained: Vec<bool>,
}

impl ModuleVisitor for RegisterParams {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let x = param.val();
        self.are_trained.push(x.is_require_grad());
        self.operands.add(x);
    }
}

/// Detaches parameters from their graph. Those marked as trained become leaves of a new graph.
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

/// Collects the gradients of inputs and parameters.
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
