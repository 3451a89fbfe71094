//! What a start of a run continues.

use crate::{config::Change, trainer::Conversions, trainer_core::Progress};

/// The state of a resumed run.
#[derive(Clone, Debug, PartialEq)]
pub struct Resumed {
    /// The progress before this start.
    pub progress: Progress,
    /// The other run that wrote the checkpoint, if it was copied into this run's folder.
    pub other_run: Option<String>,
    /// The keys that can change numbers and whose values differ from those that the checkpoint was
    /// trained with. The losses will then differ from those of an uninterrupted run.
    pub changes: Vec<Change>,
    /// Whether the configuration that the checkpoint was trained with is recorded, in it or in the
    /// run's `config.toml`.
    pub is_recorded: bool,
    /// Whether the checkpoint records the samples that it was trained on. If not, as in one that was
    /// made from a checkpoint of Megatron-Core, it is unknown whether this run continues with them.
    pub has_samples: bool,
    /// What the checkpoint holds in another form than this run.
    pub conversions: Conversions,
}
