//! A run that is written for Megatron-LM.

use megaburn_models::DecoderConfig;
use megaburn_optim::{Decay, LrSchedule, WeightDecaySchedule, WeightDecayStyle};
use megaburn_torch::{
    pickle::{Tree, Value},
    pt::PtFile,
};

use super::dict::Dict;
use crate::{config::TrainConfig, error::TrainError, trainer_core::Progress};

/// The most values that are copied of one value of the original.
const MOST_VALUES: usize = 1 << 16;
/// The most characters of a value that a note shows.
const MOST_CHARS: usize = 80;

/// A run that is written for Megatron-LM.
#[derive(Debug)]
pub(super) struct Run<'a> {
    pub(super) config: &'a TrainConfig,
    pub(super) model: &'a DecoderConfig,
    pub(super) progress: Progress,
    /// The rows of the vocabulary, padding included.
    pub(super) padded_vocab: usize,
    /// The degree of expert parallelism. Above 1, Megatron-Core's experts have an optimizer of their
    /// own.
    pub(super) ep: usize,
    /// Whether the layers are those of Transformer Engine, as is Megatron-LM's default.
    pub(super) is_transformer_engine: bool,
    /// Whether a tensor has all layers, as it does unless layers may differ.
    pub(super) is_stacked: bool,
    /// The arguments of the original run, as far as they can be written again.
    pub(super) args: Dict,
    /// The `common.pt` of the checkpoint that the run began with.
    pub(super) original: Option<&'a PtFile>,
}

/// The schedules of a run, in samples.
pub(super) struct Rates {
    pub(super) lr: LrSchedule,
    pub(super) decoupled_lr: LrSchedule,
    pub(super) weight_decay: WeightDecaySchedule,
}

impl Run<'_> {
    pub(super) fn rates(&self) -> Result<Rates, TrainError> {
        let (train, optimizer) = (&self.config.train, &self.config.optimizer);
        let batches = train.batch_schedule()?;
        Ok(Rates {
            lr: optimizer.lr_schedule(train.steps, &batches),
            decoupled_lr: optimizer.decoupled_schedule(train.steps, &batches),
            weight_decay: optimizer.weight_decay_schedule(train.steps, &batches),
        })
    }

    /// A value of the original `common.pt`, if it can be copied.
    pub(super) fn copied(&self, name: &str) -> Option<Tree> {
        copy_of(self.original?.root().get(name)?)
    }

    /// The samples of all updates, which schedules count.
    pub(super) fn num_samples(&self) -> u64 {
        self.progress.consumed_samples - self.progress.skipped_samples
    }
}

/// A copy of a value, if it can be written again: it is no object that is made in an unusual way,
/// and has no tensors, which are stored outside of it.
pub(super) fn copy_of(value: Value) -> Option<Tree> {
    Tree::copy_of(value, MOST_VALUES).filter(|tree| !has_tensor(tree))
}

fn has_tensor(tree: &Tree) -> bool {
    match tree {
        Tree::Persistent(_) => true,
        Tree::List(values) | Tree::Tuple(values) => values.iter().any(has_tensor),
        Tree::Dict(entries) => entries
            .iter()
            .any(|(key, value)| has_tensor(key) || has_tensor(value)),
        Tree::Call { callable, args } => has_tensor(callable) || args.iter().any(has_tensor),
        Tree::Object { class, state } => {
            has_tensor(class) || state.as_deref().is_some_and(has_tensor)
        }
        _ => false,
    }
}

/// The arguments of the original run, and a note for each that cannot be written again.
pub(super) fn original_args(original: Option<&PtFile>) -> (Dict, Vec<String>) {
    let (mut args, mut notes) = (Vec::new(), Vec::new());
    let object = original.and_then(|file| file.root().get("args")?.as_object());
    let state = object.and_then(|args| args.state?.entries());
    for (name, value) in state.into_iter().flat_map(|state| state.iter()) {
        if let (Some(name), Some(value)) = (copy_of(name), copy_of(value)) {
            args.push((name, value));
            continue;
        }
        let shown: String = value.to_string().chars().take(MOST_CHARS).collect();
        let name = name.as_str().map_or_else(|| name.to_string(), String::from);
        notes.push(format!(
            "argument `{name}` of the original run is left out, because its value cannot be copied: \
            {shown}"
        ));
    }
    (Dict::of(Tree::Dict(args)), notes)
}

/// Megatron-LM's name of a decay.
pub(super) fn decay_style(decay: Decay) -> &'static str {
    match decay {
        Decay::Constant => "constant",
        Decay::Linear => "linear",
        Decay::Cosine => "cosine",
        Decay::InverseSquareRoot => "inverse-square-root",
        Decay::Wsd { .. } => "WSD",
    }
}

/// Megatron-LM's name of how weight decay changes.
pub(super) fn weight_decay_style(style: WeightDecayStyle) -> &'static str {
    match style {
        WeightDecayStyle::Linear => "linear",
        WeightDecayStyle::Cosine => "cosine",
    }
}
