//! Parameters, gradients and optimizer state of the ranks of a pipeline.

use megaburn_mesh::{Axis, Layout, ParamSpec};
use megaburn_optim::StateDtype;

use super::MemoryEstimate;
use crate::config::{Dtype, OptimizerName, TrainConfig};

/// The local part of a parameter on a rank, before ZeRO shards it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Param {
    elements: usize,
    is_expert: bool,
    /// Whether its layer accumulates its gradient directly, as GEMMs do; these are the parameters
    /// that `parallel.zero = 3` shards.
    is_direct: bool,
    /// Whether Muon keeps a momentum for it, instead of AdamW's moments.
    is_orthogonalized: bool,
}

impl Param {
    /// The local part of the parameter at this path.
    pub(super) fn new(path: &str, spec: &ParamSpec, is_direct: bool) -> Self {
        Self {
            elements: spec.shard.local_shape().iter().product(),
            is_expert: spec.is_expert(),
            is_direct,
            is_orthogonalized: spec.shard.global_shape.len() == 2
                && !NO_MUON.iter().any(|start| path.starts_with(start)),
        }
    }
}

/// The parameters of one rank, before ZeRO shards them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankParams {
    /// The different parameters, in order, with how many there are.
    params: Vec<(Param, usize)>,
}

impl RankParams {
    /// Adds what a rank has `times` of.
    pub(super) fn add(&mut self, other: &Self, times: usize) {
        for (param, count) in &other.params {
            self.add_param(*param, times * count);
        }
    }

    /// Adds a parameter that there are `count` of.
    pub(super) fn add_param(&mut self, param: Param, count: usize) {
        match self
            .params
            .binary_search_by_key(&param, |(known, _)| *known)
        {
            Ok(at) => self.params[at].1 += count,
            Err(at) => self.params.insert(at, (param, count)),
        }
    }

    /// The number of elements of all parameters.
    pub fn elements(&self) -> usize {
        self.sum(|_| true)
    }

    /// The number of elements of experts' parameters.
    pub fn expert_elements(&self) -> usize {
        self.sum(|param| param.is_expert)
    }

    /// The number of elements of the parameters that `parallel.zero = 3` shards: of experts, or of
    /// the others.
    pub fn sharded_elements(&self, of_experts: bool) -> usize {
        self.sum(|param| param.is_direct && param.is_expert == of_experts)
    }

    /// The number of elements of the largest parameter.
    pub fn largest(&self) -> usize {
        let elements = self.params.iter().map(|(param, _)| param.elements);
        elements.max().unwrap_or(0)
    }

    fn sum(&self, is_counted: impl Fn(&Param) -> bool) -> usize {
        let counted = self.params.iter().filter(|(param, _)| is_counted(param));
        counted.map(|(param, count)| count * param.elements).sum()
    }

    /// Everything that the rank holds except activations.
    pub fn bytes(&self, config: &TrainConfig, layout: &Layout) -> MemoryEstimate {
        bytes(config, layout, &self.params)
    }
}

/// Path prefixes of matrices that Muon leaves to AdamW.
const NO_MUON: [&str; 5] = [
    "embedding.",
    "positions.",
    "encoder_bias.",
    "decoder_bias.",
    "head.",
];

fn bytes(config: &TrainConfig, layout: &Layout, params: &[(Param, usize)]) -> MemoryEstimate {
    let zero = config.parallel.zero;
    let mut found = MemoryEstimate::default();
    // Elements of the matrices that are gathered, and of the gradients in flight.
    let mut gathered = 0;
    let mut sent = 0;
    for (param, count) in params {
        let shares = if zero == 0 {
            1
        } else {
            shares(config, layout, param.is_expert)
        };
        let share = param.elements.div_ceil(shares);
        let is_shared_out = zero == 3 && param.is_direct && shares > 1;
        let parameter = if is_shared_out { share } else { param.elements };
        let gradient = if zero >= 2 { share } else { param.elements };
        found.parameters += count * width(config.train.dtype) * parameter;
        found.gradients += count * width(config.optimizer.main_grads_dtype) * gradient;
        let kept = 1.0 - config.optimizer.cpu_offload_fraction;
        let state = config
            .optimizer
            .bytes_of_element(config.train.dtype, param.is_orthogonalized);
        found.optimizer += count * (share as f64 * state * kept) as usize;
        let elements = count * param.elements;
        gathered += if is_shared_out { elements } else { 0 };
        sent += if zero >= 2 && shares > 1 { elements } else { 0 };
    }
    // One bucket is in use while the next one is in flight.
    let replicas = layout.dp * layout.cp;
    let bucket = config
        .parallel
        .bucket_size
        .unwrap_or((40 << 20).max(replicas << 20));
    found.parameters += width(config.train.dtype) * gathered.min(2 * bucket);
    found.gradients += width(config.optimizer.main_grads_dtype) * sent.min(2 * bucket);
    found
}

/// The number of ranks that shard the state of a parameter of an expert, or of another parameter.
pub(super) fn shares(config: &TrainConfig, layout: &Layout, is_expert: bool) -> usize {
    let dense = layout.dp * layout.cp;
    if !is_expert {
        return config.parallel.zero_ranks.unwrap_or(dense);
    }
    let replicas = layout.degree(Axis::Edp);
    let most = config.parallel.zero_ranks.unwrap_or(replicas);
    (1..=most)
        .rev()
        .find(|ranks| replicas.is_multiple_of(*ranks))
        .unwrap_or(1)
}

fn width(dtype: Dtype) -> usize {
    match dtype {
        Dtype::F32 => 4,
        Dtype::Bf16 | Dtype::F16 => 2,
    }
}

impl crate::config::OptimizerConfig {
    /// Bytes of optimizer state per element of a parameter of type `dtype`, including its master.
    fn bytes_of_element(&self, dtype: Dtype, is_orthogonalized: bool) -> f64 {
        let has_master = dtype != Dtype::F32 && self.main_params_dtype == Dtype::F32;
        let master = match has_master {
            true if self.has_remainders(dtype) => 2.0,
            true => 4.0,
            false => 0.0,
        };
        let width = |dtype: StateDtype| dtype.bytes_of_element();
        let adamw = width(self.exp_avg_dtype) + width(self.exp_avg_sq_dtype);
        let moments = match self.name {
            OptimizerName::AdamW => adamw,
            OptimizerName::Muon if is_orthogonalized => width(self.momentum_dtype),
            OptimizerName::Muon => adamw,
            OptimizerName::Lion => width(self.exp_avg_dtype),
            OptimizerName::Sgd if self.sgd.momentum > 0.0 => width(self.momentum_dtype),
            OptimizerName::Sgd => 0.0,
        };
        moments + master
    }
}
