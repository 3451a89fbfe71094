//! What each rank writes of a checkpoint, planned without weights.

use std::collections::BTreeSet;

use burn::{
    prelude::Device,
    tensor::{DType, FloatDType},
};
use megaburn_checkpoint::{Copies, HeldTensor, WritePlan};
use megaburn_collective::ProcessGroups;
use megaburn_optim::Moment;

use crate::{
    config::TrainConfig,
    error::TrainError,
    train_state::{TrainStateConfig, TrainStateShape},
};

/// A rank's share of a checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckpointShare {
    /// Bytes of the parameters (or masters) and moments that the rank holds.
    pub held_bytes: u64,
    /// Bytes of these that it writes.
    pub written_bytes: u64,
    /// Pieces of tensors that it writes.
    pub num_pieces: usize,
}

impl CheckpointShare {
    /// Plans the share of this rank of a checkpoint after the first step, as a save does
    /// ([`WritePlan`]). The model is built without initializing its weights.
    ///
    /// # Errors
    /// The layout does not split the model.
    /// # Collective
    /// Nothing is sent.
    pub fn of_rank(config: &TrainConfig, groups: &ProcessGroups) -> Result<Self, TrainError> {
        let layout = groups.layout();
        let model = config.planned_model(&layout)?;
        let TrainStateShape {
            plan,
            optimizer,
            model,
            ..
        } = TrainStateConfig {
            model: &model,
            options: config.model_options(&layout, &model)?,
            parallel: &config.parallel,
            optimizer: &config.optimizer,
            dtype: config.train.dtype,
            weights: None,
        }
        .shape(groups, &Device::flex())?;
        let f32_params: BTreeSet<String> = model.f32_params().collect();
        let mut held = Vec::new();
        for (path, spec) in plan.iter() {
            let shard = &spec.shard;
            let mut has_master = false;
            for state in optimizer.state_shapes(path, spec, config.train.dtype.into()) {
                has_master |= state.moment.is_none();
                let (index, count) = state.copies;
                held.push(HeldTensor {
                    name: format!("{}.{path}", state.moment.map_or("model", Moment::name)),
                    shard,
                    dtype: state.dtype,
                    range: state.range,
                    copies: Copies { index, count },
                });
            }
            if !has_master {
                let group = if shard.is_expert() {
                    &groups.edp
                } else {
                    &groups.dp_cp
                };
                held.push(HeldTensor {
                    name: format!("model.{path}"),
                    shard,
                    dtype: if f32_params.contains(path) {
                        DType::F32
                    } else {
                        FloatDType::from(config.train.dtype).into()
                    },
                    range: 0..shard.local_shape().iter().product(),
                    copies: Copies {
                        index: group.rank(),
                        count: group.size(),
                    },
                });
            }
        }
        let bytes = |held: &HeldTensor<'_>| (held.range.len() * held.dtype.size()) as u64;
        let plan = WritePlan::new(&held);
        Ok(Self {
            held_bytes: held.iter().map(bytes).sum(),
            written_bytes: plan.num_bytes(),
            num_pieces: plan.num_pieces(),
        })
    }
}
