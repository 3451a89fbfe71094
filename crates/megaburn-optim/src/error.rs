use burn::tensor::FloatDType;
use megaburn_collective::CollectiveError;
use thiserror::Error;

/// Why gradients could not be processed, or an optimizer not be built or run.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "the message of each variant says what its fields are"
)]
pub enum OptimError {
    #[error(
        "the module has a parameter `{path}` of shape {shape:?} that the shard plan lacks; a layer adds its parameters to the plan when it is built"
    )]
    NotInPlan { path: String, shape: Vec<usize> },
    #[error(
        "the shard plan has a parameter `{path}` that the module lacks; the plan was made for another module"
    )]
    NotInModule { path: String },
    #[error(
        "parameter `{path}` has shape {found:?}, and the shard plan says {expected:?} on this rank"
    )]
    LocalShape {
        path: String,
        found: Vec<usize>,
        expected: Vec<usize>,
    },
    #[error(
        "parameter `{path}` is frozen and was not when it was shared out; freeze parameters, and draw those (`Param::val`), before `ShardingConfig::init`"
    )]
    NotTrainable { path: String },
    #[error(
        "parameter `{path}` is an expert's in the shard plan or in the sharding, and not in both; give `ShardingConfig::with_experts` the parameters whose `ParamSpec::is_expert`"
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
    #[error("optimizer: {name} cannot be kept in {dtype:?}; it must be F32 or BF16")]
    BadStateDtype {
        name: &'static str,
        dtype: FloatDType,
    },
    #[error(
        "optimizer state `{moment}` of `{path}` has {found} elements of {dtype}, and the parameter {expected} of F32 on this rank"
    )]
    State {
        moment: &'static str,
        path: String,
        found: usize,
        dtype: String,
        expected: usize,
    },
    #[error(
        "{ranks} ranks cannot share what {replicas} data- and context-parallel ranks hold copies of; take a divisor of {replicas}"
    )]
    BadSharding { ranks: usize, replicas: usize },
    #[error(
        "parameter `{path}` got more gradients in this micro-batch than in the first one, when its sum was on its way to other ranks already; where the graph differs from micro-batch to micro-batch, set `parallel.overlap = false` (or leave out `begin_micro_batch`)"
    )]
    LateGradient { path: String },
    #[error(
        "optimizer state cannot be kept in host memory: {why}; lower `optimizer.cpu_offload_fraction`, or let the process have more"
    )]
    HostMemory { why: String },
    #[error("the gradients cannot be read: {why}")]
    Device { why: String },
    #[error(transparent)]
    Collective(#[from] CollectiveError),
}
