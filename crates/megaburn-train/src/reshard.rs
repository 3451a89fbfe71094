//! Writes a checkpoint as the ranks of another layout would have written it.

use std::path::Path;

use burn::prelude::Device;
use megaburn_checkpoint::{
    Checkpoint, CheckpointError, NamedTensor, Snapshot, TensorHeader, TensorSource, save_at,
};
use megaburn_collective::{Group, GroupOptions, ProcessGroups};
use megaburn_mesh::{Layout, ShardPlan};
use megaburn_models::{
    DecoderConfig, ModelError, assets::Assets, convert::check_target, decoder::ModelOptions,
    source::ModelSource, weights::open_checkpoint,
};
use megaburn_parallel::shard_plan;

use crate::{
    config::{Dtype, ParallelConfig},
    error::TrainError,
    pipeline::Pipeline,
    ranks::run_ranks,
    start::settle,
};

/// Writes the checkpoint `from`, or the newest intact one of a run, to exactly `to` as a run of
/// `layout` without ZeRO would have written it: one file per rank, in which are the pieces that the
/// rank holds. Weights, optimizer and trainer's state are unchanged.
///
/// The ranks are threads of this process. Each holds its share of one tensor at a time. An existing
/// `to` is replaced only with `force`.
///
/// # Errors
/// See [`ModelSource::open`]; also if the layout does not split the model, a tensor is neither a
/// parameter nor the state of one, `to` exists and may not be replaced, or the disk is full. No new
/// files remain after an error.
pub fn reshard(
    from: &Path,
    to: &Path,
    layout: &Layout,
    force: bool,
) -> Result<ModelSource, TrainError> {
    let source = open_checkpoint(from)?;
    check_target(from, to)?;
    let checkpoint = source.checkpoint().expect("the source is a checkpoint");
    check_tensors(checkpoint, source.config())?;
    let manifest = checkpoint.manifest();
    let snapshot = Snapshot {
        run_id: manifest.run_id.clone(),
        step: manifest.step,
        model: manifest.model.clone(),
        trainer: manifest.trainer.clone(),
    };
    let assets = Assets::for_checkpoint(&source)?;
    let write = |world: &Group| {
        let groups = ProcessGroups::new(world, *layout)?;
        let plan = settle(world, plan_of_rank(source.config(), &groups))?;
        let tensors = tensors_of_rank(checkpoint, &plan);
        Ok(save_at(to, force, &groups, &snapshot, tensors, &assets)?)
    };
    let device = Device::flex();
    run_ranks(layout, None, GroupOptions::default(), &device, write)?;
    Ok(source)
}

/// The path of the parameter whose value or state a tensor is.
fn param_path(name: &str) -> &str {
    name.split_once('.').map_or(name, |(_, path)| path)
}

/// Refuses a tensor that no rank would hold, or of another shape than its parameter.
fn check_tensors(checkpoint: &Checkpoint, config: &DecoderConfig) -> Result<(), TrainError> {
    let plan = config.whole_plan()?;
    for TensorHeader { name, shape, .. } in checkpoint.headers() {
        let expected = plan.get(param_path(&name));
        let expected = expected.map(|spec| &spec.shard.global_shape);
        if expected != Some(&shape) {
            return Err(ModelError::Tensor {
                path: checkpoint.path().to_path_buf(),
                name,
                why: match expected {
                    Some(expected) => {
                        format!("its shape is {shape:?}, but that of its parameter is {expected:?}")
                    }
                    None => "it belongs to no parameter of the model".to_string(),
                },
            }
            .into());
        }
    }
    Ok(())
}

/// The part of each parameter that this rank would hold in a run of the layout.
fn plan_of_rank(config: &DecoderConfig, groups: &ProcessGroups) -> Result<ShardPlan, TrainError> {
    let layout = groups.layout();
    let pipeline = Pipeline::new(&ParallelConfig::default(), config, Dtype::F32, groups)?;
    let options = ModelOptions {
        sequence_parallel: layout.sp,
        ..ModelOptions::default()
    };
    let model = config.init_stages(pipeline.chunks(), groups, &options, &Device::flex())?;
    Ok(shard_plan(&model).map_err(ModelError::from)?)
}

/// The tensors of a checkpoint that this rank holds. Only the ranges that it writes are read.
fn tensors_of_rank<'a>(
    checkpoint: &'a Checkpoint,
    plan: &'a ShardPlan,
) -> impl Iterator<Item = NamedTensor<'a>> {
    let held = move |header: TensorHeader| {
        let TensorHeader { name, dtype, .. } = header;
        let shard = &plan.get(param_path(&name))?.shard;
        let own = name.clone();
        let values = move |range| {
            let values = checkpoint.read_range(&own, shard, range, dtype)?;
            let read: Box<dyn FnOnce() -> Result<_, CheckpointError> + Send> =
                Box::new(move || Ok(values));
            Ok(read)
        };
        Some(NamedTensor::ranged(name, shard, dtype, values))
    };
    checkpoint.headers().into_iter().filter_map(held)
}
