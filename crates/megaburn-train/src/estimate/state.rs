//! Parameters, gradients and optimizer state of the ranks of a pipeline.

use burn::prelude::Device;
use megaburn_collective::{GroupOptions, ProcessGroups, RankFailure, run_threads};
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
struct Param {
    elements: usize,
    is_expert: bool,
    /// Whether its layer accumulates its gradient directly, as GEMMs do; these are the parameters
    /// that `parallel.zero = 3` shards.
    is_direct: bool,
    /// Whether Muon keeps a momentum for it, instead of AdamW's moments.
    is_orthogonalized: bool,
}

/// Everything except activations, for the rank with each of these lists of stages.
pub(super) fn of_stages(
    config: &TrainConfig,
    layout: &Layout,
    model: &DecoderConfig,
    stages: &[Vec<StageLayers>],
) -> Result<Vec<MemoryEstimate>, TrainError> {
    let of = |params: &Vec<Param>| bytes(config, layout, params);
    Ok(params(layout, model, stages)?.iter().map(of).collect())
}

/// The parameters of a rank, for each of these lists of stages. Their sizes are taken from a model
/// that is built without initializing its weights, on as many rank threads as split its matrices.
fn params(
    layout: &Layout,
    model: &DecoderConfig,
    stages: &[Vec<StageLayers>],
) -> Result<Vec<Vec<Param>>, TrainError> {
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
    let ranks = run_threads(grid.world_size(), GroupOptions::default(), |world| {
        let groups = ProcessGroups::new(&world, grid)?;
        let options = ModelOptions {
            sequence_parallel: layout.sp,
            ..ModelOptions::default()
        };
        let of = |chunks: &Vec<StageLayers>| {
            let config = model;
            let model = config.init_stages(chunks, &groups, &options, &Device::flex())?;
            let direct = main_grads(&model);
            let shared = |path: &str| {
                let of = |stage| config.shared_params(stage).contains(&path);
                layout.pp > 1 && chunks.iter().any(of)
            };
            let plan = shard_plan(&model).map_err(ModelError::from)?;
            let param = |(path, spec): (&str, &megaburn_mesh::ParamSpec)| Param {
                elements: spec.shard.local_shape().iter().product(),
                is_expert: spec.is_expert(),
                is_direct: direct.contains_key(path) && !shared(path),
                is_orthogonalized: spec.shard.global_shape.len() == 2
                    && !NO_MUON.iter().any(|start| path.starts_with(start)),
            };
            Ok::<_, TrainError>(plan.iter().map(param).collect::<Vec<_>>())
        };
        stages.iter().map(of).collect::<Result<Vec<_>, _>>()
    });
    // All ranks of a stage hold the same number of elements.
    match ranks.into_iter().next() {
        Some(Ok(params)) => Ok(params),
        Some(Err(RankFailure::Failed(error))) => Err(error),
        Some(Err(RankFailure::Panicked(message))) => {
            Err(TrainError::RankPanicked { rank: 0, message })
        }
        Some(Err(RankFailure::NotStarted(why))) => Err(TrainError::NoThread { why }),
        None => Ok(Vec::new()),
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

fn bytes(config: &TrainConfig, layout: &Layout, params: &[Param]) -> MemoryEstimate {
    let zero = config.parallel.zero;
    let mut found = MemoryEstimate::default();
    // Elements of the matrices that are gathered, and of the gradients in flight.
    let mut gathered = 0;
    let mut sent = 0;
    for param in params {
        let shares = if zero == 0 {
            1
        } else {
            shares(config, layout, param.is_expert)
        };
        let share = param.elements.div_ceil(shares);
        let is_shared_out = zero == 3 && param.is_direct && shares > 1;
        let parameter = if is_shared_out { share } else { param.elements };
        let gradient = if zero >= 2 { share } else { param.elements };
        found.parameters += width(config.train.dtype) * parameter;
        found.gradients += width(config.optimizer.main_grads_dtype) * gradient;
        let kept = 1.0 - config.optimizer.cpu_offload_fraction;
        let state = config
            .optimizer
            .bytes_of_element(config.train.dtype, param.is_orthogonalized);
        found.optimizer += (share as f64 * state * kept) as usize;
        gathered += if is_shared_out { param.elements } else { 0 };
        sent += if zero >= 2 && shares > 1 {
            param.elements
        } else {
            0
        };
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

/// The number of ranks that shard the state of a parameter.
fn shares(config: &TrainConfig, layout: &Layout, is_expert: bool) -> usize {
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
