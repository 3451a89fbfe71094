//! Makes a run of megaburn from a checkpoint of Megatron-LM.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    path::Path,
};

use megaburn_checkpoint::{
    CheckpointError, NamedTensor, Snapshot, checkpoint_path, save_single, write_folder,
};
use megaburn_mesh::{Axis, Layout, ShardSpec};
use megaburn_models::DecoderConfig;
use megaburn_torch::megatron::{MegatronDir, check_globals};
use serde_json::json;

use super::{
    COMMON,
    args::Args,
    error::MegatronError,
    parameter::parameters,
    schedule_settings::Schedules,
    settings::Settings,
    steps::num_updates,
    tensors::{Tensor, check_sizes, tensors},
};
use crate::{
    config::{ConfigLayers, ParallelConfig, TrainConfig},
    error::TrainError,
    run_folder::{names::CHECKPOINTS, write_config},
    trainer::{ImportedFrom, SavedAmaxes, TrainerState},
    trainer_core::Progress,
};

/// What an import has made.
#[derive(Clone, Debug)]
pub struct Imported {
    /// The configuration of the run.
    pub config: TrainConfig,
    /// The model.
    pub model: DecoderConfig,
    /// Where the run continues.
    pub progress: Progress,
    /// What differs from the run of Megatron-LM or could not be converted; each names its argument.
    pub notes: Vec<String>,
}

/// What an import takes from a checkpoint of Megatron-LM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FromMegatronConfig {
    /// The rows of the vocabulary from there on are dropped. By default its padding stays, because
    /// Megatron-LM's loss has it too.
    pub vocab_size: Option<usize>,
    /// Only weights, steps and samples are taken, as with `--no-load-optim` of Megatron-LM: moments
    /// are zero, and schedules begin.
    pub weights_only: bool,
}

impl FromMegatronConfig {
    /// Everything is taken.
    pub fn new() -> Self {
        Self::default()
    }

    /// Drops the rows of the vocabulary from `vocab_size` on.
    pub fn with_vocab_size(mut self, vocab_size: Option<usize>) -> Self {
        self.vocab_size = vocab_size;
        self
    }

    /// Takes weights, steps and samples only, or everything.
    pub fn with_weights_only(mut self, weights_only: bool) -> Self {
        self.weights_only = weights_only;
        self
    }
}

/// What an import of weights does not take.
const WEIGHTS_ONLY: &str = "the state of the optimizer is not taken: moments and their number of \
    updates are zero, weights are those of the model in its own precision, and schedules of \
    learning rate and weight decay begin, while steps and samples go on";

/// Makes a run of megaburn from a checkpoint of Megatron-LM in the format `torch_dist`.
///
/// `from` is the folder of an iteration, or the folder above, whose newest iteration is taken. `to`,
/// which must not exist, becomes a run that `megaburn train --resume` continues: its configuration,
/// and a checkpoint with weights, moments, steps and samples.
///
/// The state of the optimizer may be in buckets (`dp_reshardable`, Megatron-LM's default). The places
/// of parameters in them are proved: all f32 weights there, rounded, are the weights of the model.
///
/// Up to three copies of the largest tensor are in memory: a layer's, or the embedding. No files
/// remain after an error.
///
/// # Errors
/// The checkpoint is in another format, damaged or incomplete; the buckets of its optimizer are not
/// those of its weights; the run did something that megaburn does not; `to` exists or cannot be
/// written.
pub fn from_megatron(
    from: &Path,
    to: &Path,
    options: &FromMegatronConfig,
) -> Result<Imported, TrainError> {
    let dir = MegatronDir::open(from).map_err(MegatronError::from)?;
    check_globals(dir.common()).map_err(MegatronError::from)?;
    let args = Args::of(&dir)?;
    let schedules = Schedules::of(args, dir.common().root(), options.weights_only)?;
    let padded = padded_vocab(&dir, args)?;
    let vocab = options.vocab_size.unwrap_or(padded);
    if !(1..=padded).contains(&vocab) {
        return Err(TrainError::Invalid {
            key: "--vocab-size",
            value: vocab.to_string(),
            rule: format!("from 1 to {padded}, which is what the checkpoint has"),
        });
    }
    let Settings {
        mut config,
        mut notes,
    } = Settings::of(args, &schedules, vocab)?;
    notes.extend(vocab_note(vocab, padded));
    if options.weights_only {
        notes.push(WEIGHTS_ONLY.into());
    }
    config.run.dir = to.display().to_string();
    check_sizes(&dir, args)?;
    let (config, layout) = with_layout(config, &mut notes)?;
    let model = config.model.decoder(config.data.seq_len, vocab);
    let progress = progress(&dir, args, &schedules, options.weights_only)?;
    let parameters = parameters(&dir, &model, padded)?;
    let tensors = tensors(&dir, args, &model, parameters, options.weights_only)?;
    let state = TrainerState {
        progress,
        seed: config.run.seed,
        seq_len: config.data.seq_len,
        data_hash: None,
        order_hash: None,
        num_train_samples: None,
        blend: None,
        document_multiple: None,
        config: config.record(&layout, &model),
        loss_scaler: None,
        optimizer: "adamw".into(),
        last_load: Vec::new(),
        amaxes: SavedAmaxes::default(),
        fallbacks: Default::default(),
        losses: Vec::new(),
        rollbacks: Vec::new(),
        eval_losses: BTreeMap::new(),
        imported: Some(ImportedFrom::Megatron),
    };
    let snapshot = Snapshot {
        run_id: None,
        step: progress.step,
        model: json!(model),
        trainer: json!(state),
    };
    write_folder(to, "run", |run| {
        let common = run.join(COMMON);
        let copied = fs::copy(dir.dcp().path().join("common.pt"), &common);
        let copied = copied.and_then(|_| File::open(&common)?.sync_all());
        let written = copied.and_then(|()| write_config(run, &config.to_toml()));
        written.map_err(|source| TrainError::Write {
            path: to.into(),
            source,
        })?;
        let path = checkpoint_path(&run.join(CHECKPOINTS), progress.step);
        let saved = save(&path, &snapshot, &tensors, &dir, &model);
        saved.map_err(TrainError::from)
    })?;
    Ok(Imported {
        config,
        model,
        progress,
        notes,
    })
}

/// Writes the checkpoint, one tensor at a time.
fn save(
    path: &Path,
    snapshot: &Snapshot,
    tensors: &[Tensor],
    dir: &MegatronDir,
    model: &DecoderConfig,
) -> Result<(), CheckpointError> {
    let whole = |tensor: &Tensor| ShardSpec::whole(tensor.shape(), Axis::Tp, 0, 1);
    let shards: Vec<_> = tensors.iter().map(whole).collect();
    let named = tensors.iter().zip(&shards).map(|(tensor, shard)| {
        let read = move || {
            let read = tensor.read(dir, model);
            read.map_err(|error| CheckpointError::Source {
                name: tensor.name.clone(),
                why: error.to_string(),
            })
        };
        NamedTensor::lazy(tensor.name.clone(), shard, tensor.dtype, read)
    });
    save_single(path, false, snapshot, "tp1", named, &[])
}

/// The rows of the vocabulary, padding included. All tensors that have them are compared to it.
fn padded_vocab(dir: &MegatronDir, args: Args) -> Result<usize, MegatronError> {
    let name = "embedding.word_embeddings.weight";
    let shape = dir.dcp().tensor(name)?.shape();
    let rows = shape.first().copied().unwrap_or(0);
    match args.optional_size("padded_vocab_size")? {
        Some(padded) if padded != rows => {
            let columns = shape.iter().skip(1).copied();
            let expected: Vec<usize> = [padded].into_iter().chain(columns).collect();
            Err(MegatronError::Tensor {
                path: args.path().into(),
                name: name.into(),
                why: format!("has the shape {shape:?}, but the arguments say {expected:?}"),
            })
        }
        _ => Ok(rows),
    }
}

fn vocab_note(vocab: usize, padded: usize) -> Option<String> {
    let dropped = padded - vocab;
    (dropped > 0).then(|| {
        format!(
            "{dropped} of {padded} rows of the vocabulary are dropped (argument \
            `padded_vocab_size`): losses get lower by their part in Megatron-LM's softmax"
        )
    })
}

/// The validated configuration and its layout: that of the run, or else one rank.
fn with_layout(
    mut config: TrainConfig,
    notes: &mut Vec<String>,
) -> Result<(TrainConfig, Layout), TrainError> {
    let load = |config: &TrainConfig| {
        let text = config.to_toml();
        let layers = ConfigLayers::new().with_text("the arguments of the checkpoint", &text)?;
        let config = layers.load()?;
        let layout = config.layout(None)?;
        Ok::<_, TrainError>((config, layout))
    };
    let refused = match load(&config) {
        Ok(found) => return Ok(found),
        Err(refused) => refused,
    };
    config.parallel = ParallelConfig {
        tp: Some(1),
        dp: Some(1),
        ..ParallelConfig::default()
    };
    // If the layout was not the reason, this fails for the same one.
    let found = load(&config)?;
    notes.push(format!(
        "the layout of the run is not kept, because {refused}: it is one rank, so give --layout"
    ));
    Ok(found)
}

/// Steps and samples. Schedules count the samples of updates, so what they lack was skipped. With
/// weights only, there was no update yet.
fn progress(
    dir: &MegatronDir,
    args: Args,
    schedules: &Schedules,
    weights_only: bool,
) -> Result<Progress, MegatronError> {
    let why = "the steps are counted from it";
    let step = dir
        .iteration()
        .ok_or_else(|| args.missing("`iteration`", why))?;
    let consumed_samples = args.size("consumed_train_samples")? as u64;
    let (updates, samples) = match weights_only {
        true => (0, 0),
        false => (num_updates(dir)?, schedules.num_samples()?),
    };
    let skipped = |name: &str, all: u64, done: u64| {
        all.checked_sub(done).ok_or_else(|| {
            let why = format!("the optimizer and its schedules are further, at {done}");
            args.refused(name, why)
        })
    };
    Ok(Progress {
        step,
        consumed_samples,
        skipped_steps: skipped("iteration", step, updates)?,
        skipped_samples: skipped("consumed_train_samples", consumed_samples, samples)?,
        // Its arguments have no number of tokens.
        consumed_tokens: None,
    })
}
