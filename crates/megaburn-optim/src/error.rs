use burn::tensor::FloatDType;
use megaburn_collective::CollectiveError;
use thiserror::Error;

/// Why gradients could not be processed, or an optimizer not be built or run.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "the error message of each variant describes its fields"
)]
pub enum OptimError {
    #[error(
        "parameter `{path}` of shape {shape:?} is in the module but not in the shard plan; a \
        layer adds its parameters to the plan when it is built"
    )]
    NotInPlan { path: String, shape: Vec<usize> },
    #[error(
        "parameter `{path}` is in the shard plan but not in the module; the plan was made for \
        another module"
    )]
    NotInModule { path: String },
    #[error(
        "parameter `{path}` has shape {found:?}, but the shard plan has {expected:?} on this rank"
    )]
    LocalShape {
        path: String,
        found: Vec<usize>,
        expected: Vec<usize>,
    },
    #[error(
        "parameter `{path}` is frozen, but was trainable when the sharding was made; freeze and \
        initialize parameters (`Param::val`) before `ShardingConfig::init`"
    )]
    NotTrainable { path: String },
    #[error(
        "parameter `{path}` is an expert parameter in only one of the shard plan and the \
        sharding; give `ShardingConfig::with_experts` the parameters whose \
        `ParamSpec::is_expert` is true"
    )]
    OtherReplicas { path: String },
    #[error("optimizer: {name} is {value}; it must be {must_be}")]
    BadConfig {
        name: &'static str,
        value: f64,
        must_be: &'static str,
    },
    #[error("loss scale: {name} is {value}; it must be {must_be}")]
    BadLossScale {
        name: &'static str,
        value: f64,
        must_be: &'static str,
    },
    #[error("optimizer: {name} cannot be stored in {dtype:?}; it must be F32 or BF16")]
    BadStateDtype {
        name: &'static str,
        dtype: FloatDType,
    },
    #[error(
        "optimizer state `{moment}` of `{path}` has {found} elements of {dtype}, but the \
        parameter has {expected} of F32 on this rank"
    )]
    State {
        moment: &'static str,
        path: String,
        found: usize,
        dtype: String,
        expected: usize,
    },
    #[error(
        "cannot shard over {ranks} ranks: parameters are replicated on {replicas} data- and \
        context-parallel ranks; use a divisor of {replicas}"
    )]
    BadSharding { ranks: usize, replicas: usize },
    #[error(
        "parameter `{path}` got more gradients in this micro-batch than in the first one, after \
        its reduction had already started; if the graph differs between micro-batches, set \
        `parallel.overlap = false` (or leave out `begin_micro_batch`)"
    )]
    LateGradient { path: String },
    #[error(
        "optimizer state does not fit in host memory: {why}; lower \
        `optimizer.cpu_offload_fraction`, or raise the process's memory limit"
    )]
    HostMemory { why: String },
    #[error("an optimizer of Burn's cannot run on these shards: {why}")]
    Shards { why: String },
    #[error("the gradients cannot be read: {why}")]
    Device { why: String },
    #[error(transparent)]
    Collective(#[from] CollectiveError),
}
