//! Gradients of all data-parallel ranks.

use std::collections::BTreeSet;

use burn::{
    module::Module,
    optim::GradientsParams,
    tensor::{DType, TensorData},
};
use megaburn_collective::{ProcessGroups, ReduceOp};
use megaburn_mesh::ShardPlan;
use megaburn_optim::{GradientAccumulator, OptimError, ShardingConfig, ShardingLevel};

use crate::error::LearnerError;

/// Sums the gradients of batches, and of ranks.
pub(crate) struct Gradients {
    sums: GradientAccumulator,
    groups: ProcessGroups,
    max_norm: Option<f64>,
}

impl Gradients {
    pub(crate) fn new<M: Module>(
        module: &M,
        plan: &ShardPlan,
        groups: &ProcessGroups,
        max_norm: Option<f64>,
    ) -> Result<Self, OptimError> {
        let sharding = ShardingConfig::new(ShardingLevel::None).init(module, groups)?;
        Ok(Self {
            sums: GradientAccumulator::new(module, plan, &sharding)?,
            groups: groups.clone(),
            max_norm,
        })
    }

    /// Adds the gradients of this rank's batch. `weight` is the batch's share of the items that all
    /// ranks read in the step.
    pub(crate) fn add<M: Module>(&mut self, module: &M, grads: GradientsParams, weight: f64) {
        self.sums.accumulate_params(module, grads, weight);
    }

    /// Sums the gradients over the ranks, clips them, and returns them for an update. Parameters
    /// that got no gradient on any rank have none, as on one device.
    ///
    /// # Collective
    /// All ranks: one byte per parameter and all gradients over dp; the norm over tp, if gradients
    /// are clipped.
    pub(crate) fn take<M: Module>(&mut self, module: &M) -> Result<GradientsParams, LearnerError> {
        let received = self.received_by_any()?;
        self.sums.reduce()?;
        if let Some(max_norm) = self.max_norm {
            let norm = self.sums.norm()?;
            self.sums.clip(&norm, max_norm);
        }
        let grads = self.sums.to_params(module, |path| received.contains(path));
        self.sums.reset();
        Ok(grads)
    }

    /// The paths that got a gradient on any data-parallel rank.
    fn received_by_any(&self) -> Result<BTreeSet<String>, LearnerError> {
        let received = self.sums.received();
        let dp = &self.groups.dp;
        if dp.size() == 1 {
            return Ok(received);
        }
        let paths: Vec<&str> = self.sums.paths().collect();
        let mine = paths.iter().map(|&path| u8::from(received.contains(path)));
        let mine: Vec<u8> = mine.collect();
        let len = mine.len();
        let any = dp.all_reduce(
            TensorData::from_bytes_vec(mine, [len], DType::U8),
            ReduceOp::Max,
        )?;
        let any = paths.iter().zip(any.as_bytes());
        Ok(any
            .filter(|&(_, &byte)| byte > 0)
            .map(|(&path, _)| path.to_owned())
            .collect())
    }
}
