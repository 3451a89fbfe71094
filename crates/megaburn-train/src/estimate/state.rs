//! Parameters, gradients and optimizer state of the ranks of a pipeline.

use std::collections::{HashMap, hash_map::Entry};

use burn::prelude::Device;
use megaburn_collective::{Group, ProcessGroups};
use megaburn_mesh::{Axis, Layout};
use megaburn_models::{DecoderConfig, ModelError, decoder::ModelOptions};
use megaburn_optim::StateDtype;
use megaburn_parallel::{main_grads, shard_plan};
use megaburn_pipeline::StageLayers;

use super::MemoryEstimate;
use crate::{
    config::{Dtype, OptimizerName, TrainConfig},
    error::TrainError,
};

/// The local part of a parameter on a rank, before ZeRO shards it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Param {
    elements: usize,
    is_expert: bool,
    /// Whether its layer accumulates its gradient directly, as GEMMs do; these are the parameters
    /// that `parallel.zero = 3` shards.
    is_direct: bool,
    /// Whether Muon keeps a momentum for it, instead of AdamW's moments.
    is_orthogonalized: bool,
}

/// The parameters of one rank, before ZeRO shards them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankParams {
    /// The different parameters, with how many there are.
    params: Vec<(Param, usize)>,
}

impl RankParams {
    /// The parameters of the rank of each pipeline stage, in rank order. Their sizes are taken from
    /// a model that is built without initializing its weights.
    ///
    /// # Errors
    /// The layout does not split the model.
    pub fn of_stages(
        config: &TrainConfig,
        layout: &Layout,
        model: &DecoderConfig,
    ) -> Result<Vec<Self>, TrainError> {
        let stages = config.parallel.stages(layout, model.layers)?;
        // The smallest world whose first rank holds as large a part of each matrix.
        let split = layout.ep * layout.etp;
        let dp = (1..=split)
            .find(|dp| (layout.tp * dp).is_multiple_of(split))
            .unwrap_or(split);
        let grid = Layout {
            cp: 1,
            pp: 1,
            dp,
            ..*layout
        };
        let world = Group::of_shapes(0, grid.world_size());
        let groups = ProcessGroups::new(&world, grid)?;
        let options = ModelOptions {
            sequence_parallel: layout.sp,
            ..ModelOptions::default()
        };
        let of = |chunks: &Vec<StageLayers>| {
            let built = model.init_stages(chunks, &groups, &options, &Device::flex())?;
            let direct = main_grads(&built);
            let shared = |path: &str| {
                let of = |stage| model.shared_params(stage).contains(&path);
                layout.pp > 1 && chunks.iter().any(of)
            };
            let plan = shard_plan(&built).map_err(ModelError::from)?;
            let param = |(path, spec): (&str, &megaburn_mesh::ParamSpec)| Param {
                elements: spec.shard.local_shape().iter().product(),
                is_expert: spec.is_expert(),
                is_direct: direct.contains_key(path) && !shared(path),
                is_orthogonalized: spec.shard.global_shape.len() == 2
                    && !NO_MUON.iter().any(|start| path.starts_with(start)),
            };
            Ok::<_, TrainError>(Self::counted(plan.iter().map(param)))
        };
        // Ranks in the middle of a pipeline have blocks that are alike.
        let alike = model.alike_blocks();
        let mut known: HashMap<Vec<(bool, Vec<usize>, bool)>, Self> = HashMap::new();
        let of_rank = |chunks: &Vec<StageLayers>| {
            let blocks = |chunk: &StageLayers| {
                let blocks = alike[chunk.layers.clone()].to_vec();
                (chunk.embedding, blocks, chunk.loss)
            };
            let key = chunks.iter().map(blocks).collect();
            Ok::<_, TrainError>(match known.entry(key) {
                Entry::Occupied(known) => known.get().clone(),
                Entry::Vacant(unknown) => unknown.insert(of(chunks)?).clone(),
            })
        };
        stages.iter().map(of_rank).collect()
    }

    fn counted(params: impl Iterator<Item = Param>) -> Self {
        let mut counts: Vec<(Param, usize)> = Vec::new();
        for param in params {
            match counts.iter_mut().find(|(known, _)| *known == param) {
                Some((_, count)) => *count += 1,
                None => counts.push((param, 1)),
            }
        }
        Self { params: counts }
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
    pub(super) fn bytes(&self, config: &TrainConfig, layout: &Layout) -> MemoryEstimate {
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
