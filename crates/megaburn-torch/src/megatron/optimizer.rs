use crate::dcp::{DcpDir, DcpTensor};
use crate::error::TorchError;

/// How a checkpoint has the state of the optimizer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum OptimizerForm {
    /// It has none.
    None,
    /// Each parameter has tensors of its own shape: `fully_reshardable`, which Megatron-LM writes
    /// with `--dist-ckpt-optim-fully-reshardable`, and optimizers that are not distributed.
    ByParameter,
    /// The buckets of the distributed optimizer: `dp_reshardable`, Megatron-LM's default. Which
    /// elements belong to which parameter depends on the layout and on the order of gradients, so
    /// [`MegatronDir::buckets`](super::MegatronDir::buckets) gives them as they are.
    ByBucket,
}

/// A tensor of the optimizer's state.
#[derive(Clone, Copy, Debug)]
pub struct OptimizerTensor<'a> {
    /// What it is: `exp_avg`, `exp_avg_sq`, or the f32 weights, which are `param` or `fp32_param`.
    pub state: &'a str,
    /// The name of the parameter, which is the name of the model's tensor.
    pub parameter: &'a str,
    /// The name in the checkpoint.
    pub name: &'a str,
    /// Its type, shape and chunks.
    pub tensor: &'a DcpTensor,
}

/// The name of an entry without `chained_0.`, which one of several optimizers may have.
pub(super) fn without_chain(name: &str) -> &str {
    let rest = name
        .strip_prefix("chained_")
        .and_then(|rest| rest.split_once('.'));
    match rest {
        Some((number, rest)) if number.bytes().all(|byte| byte.is_ascii_digit()) => rest,
        _ => name,
    }
}

/// Whether an entry belongs to the optimizer.
pub(super) fn is_of_optimizer(name: &str) -> bool {
    without_chain(name).starts_with("optimizer.")
}

/// How a checkpoint has the state of the optimizer.
pub(super) fn form(dcp: &DcpDir) -> OptimizerForm {
    let names = dcp.tensors().map(|(name, _)| name).chain(dcp.objects());
    let mut form = OptimizerForm::None;
    for name in names.map(without_chain) {
        if name.starts_with("optimizer.distributed.") {
            return OptimizerForm::ByBucket;
        }
        if name.starts_with("optimizer.state.") {
            form = OptimizerForm::ByParameter;
        }
    }
    form
}

/// The tensors of the optimizer's state by parameter.
pub(super) fn tensors(dcp: &DcpDir) -> Result<Vec<OptimizerTensor<'_>>, TorchError> {
    let error = |why: String| TorchError::OptimizerForm {
        path: dcp.path().into(),
        why,
    };
    if form(dcp) == OptimizerForm::ByBucket {
        return Err(error(
            "it has the buckets of the distributed optimizer (dp_reshardable), which have no \
             tensors of single parameters; save it from Megatron-LM with \
             --dist-ckpt-optim-fully-reshardable"
                .into(),
        ));
    }
    let mut found = Vec::new();
    for (name, tensor) in dcp.tensors() {
        let Some(rest) = without_chain(name).strip_prefix("optimizer.state.") else {
            continue;
        };
        if dcp.reshaped().contains(name) {
            return Err(error(format!(
                "`{name}` was written by Megatron-Core before 0.14, flattened; load and save it \
                 with 0.14 or newer"
            )));
        }
        let (state, parameter) = rest
            .split_once('.')
            .ok_or_else(|| error(format!("`{name}` names no parameter")))?;
        found.push(OptimizerTensor {
            state,
            parameter,
            name,
            tensor,
        });
    }
    Ok(found)
}
