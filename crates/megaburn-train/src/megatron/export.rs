//! Writes a run of megaburn as a checkpoint of Megatron-LM.

use std::{
    io,
    path::{Path, PathBuf},
};

use burn::tensor::DType;
use megaburn_checkpoint::{Checkpoint, TensorSource, write_folder};
use megaburn_models::{DecoderConfig, weights::open_checkpoint};
use megaburn_parallel::CapacityScope;
use megaburn_torch::{
    DType as TorchDType,
    dcp::DcpWriter,
    megatron::{
        ShardedKey, check_globals, iteration_folder, write_iteration, write_latest,
        write_sharded_object,
    },
    pickle::{Tree, Value},
    pt::PtFile,
};

use super::{
    COMMON,
    error::MegatronError,
    exportable::check,
    exported_run::{Run, original_args},
    names::Place,
    values::in_their_order,
};
use crate::{
    config::{DataOrder, Dtype, ScheduleAt, TrainConfig},
    error::TrainError,
    trainer::read_state,
    trainer_core::Progress,
};

/// The multiple that Megatron-LM pads a vocabulary to, for one rank of tensor parallelism.
const VOCAB_MULTIPLE: usize = 128;

/// The most rows of a vocabulary that an export pads to.
const MOST_ROWS: usize = 1 << 24;

/// The result of an export.
#[derive(Clone, Debug)]
pub struct Exported {
    /// The folder of the iteration.
    pub folder: PathBuf,
    /// The model.
    pub model: DecoderConfig,
    /// Where the run continues.
    pub progress: Progress,
    /// What differs in Megatron-LM, and how it has to load the checkpoint.
    pub notes: Vec<String>,
}

/// Writes a checkpoint of a run as one of Megatron-LM in the format `torch_dist`, which it loads
/// under any layout.
///
/// `from` is a checkpoint, or a run, whose newest intact one is taken. `to`, which must not exist,
/// gets the folder of the iteration and `latest_checkpointed_iteration.txt`. The state of the
/// optimizer is that of the distributed optimizer, in the form `fully_reshardable`. If the run was
/// made from a checkpoint of Megatron-LM, the arguments begin with those of that one.
///
/// Megatron-Core's experts have an optimizer of their own if expert parallelism is above 1, so a
/// model with experts is written for either. `ep` is the degree; by default that of the original, or
/// of the run.
///
/// Up to three copies of the largest parameter are in memory. No files remain after an error.
///
/// # Errors
/// The checkpoint is damaged or has no optimizer; the model or the optimizer has no counterpart in
/// Megatron-LM; `to` exists or cannot be written.
pub fn to_megatron(from: &Path, to: &Path, ep: Option<usize>) -> Result<Exported, TrainError> {
    let source = open_checkpoint(from)?;
    let checkpoint = source.checkpoint().expect("the source is a checkpoint");
    let refuse = |why: String| {
        let path = checkpoint.path().into();
        TrainError::from(MegatronError::NotExpressible { path, why })
    };
    if checkpoint.trainer().is_null() {
        return Err(refuse(
            "it has weights only, and no state of an optimizer".into(),
        ));
    }
    let state = read_state(checkpoint)?;
    let config: TrainConfig = serde_json::from_value(state.config).map_err(|error| {
        refuse(format!(
            "its configuration is not one of this version: {error}"
        ))
    })?;
    let model = source.config();
    check(&config, model).map_err(refuse)?;
    let original = original(checkpoint.path())?;
    let padded_vocab = padded_vocab(model.vocab, original.as_ref()).map_err(refuse)?;
    let (args, mut notes) = original_args(original.as_ref());
    if state.imported.is_some() && original.is_none() {
        notes.push(format!(
            "the run has no `{COMMON}`, which its import wrote: arguments that megaburn does \
            not have are absent, and the vocabulary is padded to {padded_vocab} rows, a multiple of {VOCAB_MULTIPLE}"
        ));
    }
    let run = Run {
        config: &config,
        model,
        progress: state.progress,
        padded_vocab,
        ep: match (&model.experts, ep) {
            (None, _) => 1,
            (Some(_), Some(ep)) => ep,
            (Some(_), None) => argument(original.as_ref(), "expert_model_parallel_size")
                .and_then(|ep| ep.as_usize())
                .unwrap_or(config.parallel.ep),
        },
        is_transformer_engine: argument(original.as_ref(), "transformer_impl")
            .is_none_or(|layers| layers.as_str() != Some("local")),
        is_stacked: is_stacked(original.as_ref()),
        args,
        original: original.as_ref(),
    };
    notes.extend(notes_of(&run));
    let common = run.common()?;
    let iteration = state.progress.step;
    let name = iteration_folder(iteration);
    write_folder(to, "checkpoint", |folder| {
        let inside = folder.join(&name);
        let mut writer = DcpWriter::create(&inside, 0).map_err(MegatronError::from)?;
        write_tensors(&mut writer, checkpoint, &run)?;
        write_objects(&mut writer, &run)?;
        let write = || {
            write_iteration(&inside, &[writer.finish()?], &common, &[])?;
            write_latest(folder, iteration)
        };
        Ok::<_, TrainError>(write().map_err(MegatronError::from)?)
    })?;
    Ok(Exported {
        folder: to.join(name),
        model: model.clone(),
        progress: state.progress,
        notes,
    })
}

/// Writes weights and moments, one parameter at a time.
fn write_tensors(
    writer: &mut DcpWriter,
    checkpoint: &Checkpoint,
    run: &Run,
) -> Result<(), TrainError> {
    let model = run.model;
    let weights = match run.config.train.dtype {
        Dtype::Bf16 => (DType::BF16, TorchDType::BF16),
        Dtype::F32 | Dtype::F16 => (DType::F32, TorchDType::F32),
    };
    let full = (DType::F32, TorchDType::F32);
    for (path, spec) in model.whole_plan()?.iter() {
        let shape = &spec.shard.global_shape;
        let place = Place::of(path).ok_or_else(|| MegatronError::NotExpressible {
            path: checkpoint.path().into(),
            why: format!("Megatron-Core has no parameter for `{path}`"),
        })?;
        let of_experts = match (run.is_transformer_engine, &model.experts) {
            (true, Some(_)) => place.in_transformer_engine(),
            _ => None,
        };
        let place = of_experts.unwrap_or(place);
        let region = place.region(shape, model, run.padded_vocab, run.is_stacked);
        let theirs = place.tensor(run.is_stacked);
        let len = region.sizes.iter().product();
        let rows = shape.first().copied().unwrap_or(1);
        for (prefix, name, (dtype, torch)) in [
            ("model", theirs.clone(), weights),
            ("model", format!("optimizer.state.param.{theirs}"), full),
            ("exp_avg", format!("optimizer.state.exp_avg.{theirs}"), full),
            (
                "exp_avg_sq",
                format!("optimizer.state.exp_avg_sq.{theirs}"),
                full,
            ),
        ] {
            let ours = checkpoint.read_rows(&format!("{prefix}.{path}"), 0..rows)?;
            let ours = ours.convert_dtype(dtype);
            let item = dtype.size();
            let values = in_their_order(place.form, shape, model, item, ours.as_bytes(), len);
            let write = |out: &mut dyn io::Write| out.write_all(&values);
            let (shape, offsets, sizes) = (&region.shape, &region.offsets, &region.sizes);
            let written = writer.tensor(&name, torch, shape, offsets, sizes, write);
            written.map_err(MegatronError::from)?;
        }
    }
    Ok(())
}

/// Writes `_extra_state` of all linear layers: `None`, which Megatron-Core asks for.
fn write_objects(writer: &mut DcpWriter, run: &Run) -> Result<(), MegatronError> {
    let (model, layers) = (run.model, run.model.layers);
    let mut keys = Vec::new();
    for layer in 0..layers {
        // A layer with a name of its own has parts for experts only: others are the first of one.
        let (name, offset, shape) = match run.is_stacked {
            true => (String::new(), vec![layer], vec![layers]),
            false => (format!("{layer}."), vec![0], vec![1]),
        };
        let of_expert = |index: &[usize], expert: usize| match run.is_stacked {
            true => [index, &[expert]].concat(),
            false => vec![expert],
        };
        let of_layer = |module: &str| ShardedKey {
            key: format!("decoder.layers.{name}{module}._extra_state"),
            offset: offset.clone(),
            shape: shape.clone(),
        };
        keys.extend(["self_attention.linear_qkv", "self_attention.linear_proj"].map(of_layer));
        let Some(experts) = &model.experts else {
            keys.extend(["mlp.linear_fc1", "mlp.linear_fc2"].map(of_layer));
            continue;
        };
        for expert in 0..experts.num {
            let modules = [
                "mlp.experts.experts.linear_fc1",
                "mlp.experts.experts.linear_fc2",
            ];
            keys.extend(modules.map(|module| ShardedKey {
                offset: of_expert(&offset, expert),
                shape: of_expert(&shape, experts.num),
                ..of_layer(module)
            }));
        }
    }
    for key in keys {
        write_sharded_object(writer, &key, Tree::None, &[])?;
    }
    Ok(())
}

/// The `common.pt` that the run of a checkpoint was made from, if it was.
fn original(checkpoint: &Path) -> Result<Option<PtFile>, MegatronError> {
    let path = checkpoint
        .canonicalize()
        .unwrap_or_else(|_| checkpoint.into());
    let run = path.ancestors().nth(2);
    let file = run
        .map(|run| run.join(COMMON))
        .filter(|file| file.is_file());
    let file = file.map(PtFile::open).transpose()?;
    file.as_ref().map_or(Ok(()), check_globals)?;
    Ok(file)
}

/// Whether the layers are stacked in the checkpoint, as Megatron-Core does unless they may differ.
///
/// Source: Megatron-Core, `TransformerBlock.sharded_state_dict`.
fn is_stacked(original: Option<&PtFile>) -> bool {
    let freq = argument(original, "moe_layer_freq");
    freq.is_none_or(|freq| freq.sequence().is_none() && freq.as_i64().is_none_or(|freq| freq <= 1))
}

/// One of the original arguments.
fn argument<'a>(original: Option<&'a PtFile>, name: &str) -> Option<Value<'a>> {
    original?.root().get("args")?.attribute(name)
}

/// The rows of the vocabulary in Megatron-LM: those of the original, or the next multiple.
fn padded_vocab(vocab: usize, original: Option<&PtFile>) -> Result<usize, String> {
    let padded = argument(original, "padded_vocab_size").and_then(|of| of.as_usize());
    match padded.filter(|padded| *padded >= vocab) {
        Some(padded) if padded > MOST_ROWS => Err(format!(
            "`padded_vocab_size` in its `{COMMON}` is {padded}, which is more than {MOST_ROWS}"
        )),
        Some(padded) => Ok(padded),
        None => vocab
            .checked_next_multiple_of(VOCAB_MULTIPLE)
            .ok_or_else(|| format!("its vocabulary of {vocab} is too large")),
    }
}

/// How Megatron-LM has to load the checkpoint, and what it does differently.
fn notes_of(run: &Run) -> Vec<String> {
    let mut notes = vec![
        "load it with --use-distributed-optimizer, --dist-ckpt-optim-fully-reshardable and \
        --no-load-rng: it has no states of random numbers"
            .to_string(),
    ];
    if run.model.experts.is_some() {
        let layers = match run.is_transformer_engine {
            true => "Transformer Engine's layers: Megatron-LM's default",
            false => "local layers: --transformer-impl local",
        };
        notes.push(format!(
            "the norms before experts have the names of {layers}"
        ));
        let (is, other) = match run.ep {
            0 | 1 => ("1", "above 1"),
            _ => ("above 1", "1"),
        };
        notes.push(format!(
            "experts have the optimizer of --expert-model-parallel-size {is}: for {other}, write it \
            with --ep"
        ));
    }
    let config = run.config;
    let (vocab, padded) = (run.model.vocab, run.padded_vocab);
    if padded > vocab {
        notes.push(format!(
            "{} rows of zeros pad the vocabulary of {vocab}, and Megatron-LM's softmax has them",
            padded - vocab
        ));
    }
    if config.optimizer.schedule_at == ScheduleAt::End {
        notes.push(
            "optimizer.schedule_at is end: Megatron-LM takes learning rate and weight decay at the \
            start of a step, which is one step later"
                .into(),
        );
    }
    if !config.precision.schedule.is_empty() || config.precision.fallback.is_set() {
        notes.push(
            "precision.schedule and precision.fallback are left out: Megatron-LM has the recipe of \
            the next step from here on"
                .into(),
        );
    }
    let moe = &config.moe;
    let by_sequence = moe.capacity_factor.is_some() && moe.capacity_scope != CapacityScope::Rank;
    if run.model.experts.is_some() && by_sequence {
        notes.push(
            "moe.capacity_scope is sequence: Megatron-LM counts the capacity of experts over the \
            tokens of a rank, so it drops other tokens"
                .into(),
        );
    }
    if config.data.order == DataOrder::Megaburn {
        notes.push("data.order is megaburn: Megatron-LM reads other samples from here on".into());
    }
    notes
}
