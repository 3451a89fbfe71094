//! Continues the stream of samples of a checkpoint.

use megaburn_checkpoint::Checkpoint;

use super::{resume::read_state, save::TrainerState};
use crate::{
    config::{Change, DatasetKind},
    data::{BlendRecord, HELD_OUT},
    error::TrainError,
    resume_error::ResumeError,
    trainer::Trainer,
    trainer_core::Progress,
};

impl Trainer {
    /// Reads on where the run of a checkpoint stopped. If data sets were added to `data.train`, or
    /// their weights have changed, the new mixture begins here; this change is returned.
    ///
    /// A checkpoint that records no samples is taken as one of this stream.
    ///
    /// # Errors
    /// The checkpoint is of another stream of samples.
    pub(super) fn resume_samples(
        &mut self,
        checkpoint: &Checkpoint,
    ) -> Result<Option<Change>, TrainError> {
        let saved = read_state(checkpoint)?;
        let mine = self.state();
        let refused = |what: String| ResumeError::Other {
            path: checkpoint.path().into(),
            what,
        };
        if saved.data_hash.is_none() {
            self.check_enough_samples(&saved)?;
            return Ok(None);
        }
        let change = match (&saved.blend, &mine.blend) {
            (Some(old), Some(new)) if saved.data_hash != mine.data_hash => {
                let consumed = saved.progress.consumed_samples;
                let changed = old.changed_to(new, consumed, saved.seed)?;
                let changed = changed.map_err(|why| {
                    let read = old.describe();
                    refused(format!("was trained on other data, {read}: {why}"))
                })?;
                Some((old, changed))
            }
            (Some(old), Some(new)) => {
                let same = old.check_same_parts(new);
                same.map_err(|why| {
                    refused(format!("was trained with a different sample order: {why}"))
                })?;
                None
            }
            _ if saved.data_hash != mine.data_hash
                && self.core.config.data.is_of_fixed_length()
                && !self.core.config.data.train.is_empty() =>
            {
                let order = self.fixed_order();
                let what =
                    format!("was trained on other data or weights, and {order} cannot change them");
                return Err(refused(what).into());
            }
            _ => None,
        };
        let record = change
            .as_ref()
            .map_or(saved.blend.as_ref(), |(_, changed)| Some(changed));
        if let Some(record) = record.filter(|record| record.first_sample > 0) {
            let samples = self.data.samples_from(&self.core.config, Some(record))?;
            self.samples = samples.watched(&self.core.groups);
        }
        if let Some((old, changed)) = change {
            let first = changed.first_sample;
            return Ok(Some(Change {
                key: "data.train".into(),
                old: old.describe(),
                new: format!("{} from sample {first} on", changed.describe()),
            }));
        }
        for (name, saved, mine) in [
            (HASH, saved.data_hash, mine.data_hash),
            (ORDER, saved.order_hash, mine.order_hash),
            (NUM_SAMPLES, saved.num_train_samples, mine.num_train_samples),
        ] {
            let shown = |value: Option<u64>| match (name, value) {
                (_, None) => "not recorded".to_string(),
                (NUM_SAMPLES, Some(value)) => value.to_string(),
                // In the format of the console's line `data`.
                (_, Some(value)) => format!("xxh3 {value:016x}"),
            };
            let hint = match name {
                NUM_SAMPLES => format!("; {HELD_OUT}"),
                _ => String::new(),
            };
            differs(name, saved != mine, shown(saved), shown(mine))
                .map_err(|what| refused(format!("{what}{hint}")))?;
        }
        self.check_enough_samples(&saved)?;
        Ok(None)
    }

    /// Refuses a checkpoint whose run read samples in another way.
    pub(super) fn check_reading(&self, checkpoint: &Checkpoint) -> Result<(), TrainError> {
        check_reading(checkpoint, &self.state().reading())
    }

    /// Refuses to continue in Megatron-LM's order, which ends, if the rest of the run needs more
    /// samples: the order was made for all steps with the batch sizes of this configuration.
    fn check_enough_samples(&self, saved: &TrainerState) -> Result<(), TrainError> {
        if !self.core.config.data.is_of_fixed_length() {
            return Ok(());
        }
        let Progress {
            step,
            consumed_samples,
            ..
        } = saved.progress;
        let steps = step..self.core.config.train.steps;
        let needed = steps.fold(consumed_samples, |consumed: u64, _| {
            consumed + self.core.schedules.batch.batch_size(consumed) as u64
        });
        let found = self.samples.train.num_samples();
        if needed <= found {
            return Ok(());
        }
        Err(TrainError::Invalid {
            key: "train.global_batch",
            value: self.core.config.train.global_batch.to_string(),
            rule: format!(
                "that of the steps before: {} has {found} samples for train.steps at this size, and \
                {consumed_samples} are read, so the run needs {needed}",
                self.fixed_order()
            ),
        })
    }

    /// The key whose order of samples is made for the length of the run.
    fn fixed_order(&self) -> &'static str {
        match self.core.config.data.dataset {
            DatasetKind::Bert => "data.dataset = \"bert\"",
            DatasetKind::T5 => "data.dataset = \"t5\"",
            DatasetKind::Gpt => "data.order = \"megatron\"",
        }
    }
}

/// How a run reads its samples.
#[derive(Clone, Debug)]
pub(crate) struct Reading {
    pub(crate) seed: u64,
    pub(crate) seq_len: usize,
    pub(crate) blend: Option<BlendRecord>,
    pub(crate) document_multiple: Option<usize>,
}

impl TrainerState {
    fn reading(&self) -> Reading {
        Reading {
            seed: self.seed,
            seq_len: self.seq_len,
            blend: self.blend.clone(),
            document_multiple: self.document_multiple,
        }
    }
}

/// Refuses a checkpoint whose run read samples in another way than `mine`.
///
/// # Errors
/// What differs.
pub(crate) fn check_reading(checkpoint: &Checkpoint, mine: &Reading) -> Result<(), TrainError> {
    let found = compare_reading(&read_state(checkpoint)?.reading(), mine);
    Ok(found.map_err(|what| ResumeError::Other {
        path: checkpoint.path().into(),
        what,
    })?)
}

/// Why a run read samples in another way than this one.
fn compare_reading(saved: &Reading, mine: &Reading) -> Result<(), String> {
    for (name, saved, mine) in [
        ("run.seed", saved.seed, mine.seed),
        ("data.seq_len", saved.seq_len as u64, mine.seq_len as u64),
    ] {
        differs(name, saved != mine, saved.to_string(), mine.to_string())?;
    }
    let tokenizer = |blend: &Option<BlendRecord>| {
        blend
            .as_ref()
            .map(|blend| format!("xxh3 {}", blend.tokenizer))
    };
    if let (Some(saved), Some(mine)) = (tokenizer(&saved.blend), tokenizer(&mine.blend)) {
        differs("the hash of the tokenizer", saved != mine, saved, mine)?;
    }
    if saved.document_multiple == mine.document_multiple {
        return Ok(());
    }
    let keys = |multiple: Option<usize>| match multiple {
        Some(multiple) => format!("data.documents with data.document_multiple {multiple}"),
        None => "no data.documents".to_string(),
    };
    let saved = keys(saved.document_multiple);
    let mine = keys(mine.document_multiple);
    Err(format!(
        "was trained on samples that were read differently: {saved} there, {mine} here"
    ))
}

/// Refuses a checkpoint in which `name` is `saved`, if that differs from this run's.
fn differs(name: &str, differs: bool, saved: String, mine: String) -> Result<(), String> {
    if !differs {
        return Ok(());
    }
    Err(format!(
        "was trained with a different sample order: {name} is {saved} there and {mine} here"
    ))
}

/// The name of the number of samples in errors.
const NUM_SAMPLES: &str = "the number of training samples";
/// The name of the hash of Megatron-LM's order in errors.
const ORDER: &str = "the order of the samples, which follows from data.order or data.dataset and from the \
    number of epochs that train.steps needs,";
/// The name of the data hash in errors.
const HASH: &str = "the hash of text and tokenizer";
