//! The data of a run, opened once per process and shared by its rank threads.

mod blend_record;
mod cache_dir;
mod encoding_log;
mod masked;
mod mixture;
mod object_store_log;
mod opening;
mod source;

pub(crate) use blend_record::{BlendRecord, HELD_OUT};
pub(crate) use mixture::{EvalSamples, SourceReading};

use std::sync::Arc;

use megaburn_collective::{ProcessGroups, Progress};
use megaburn_data::{
    Corpus, DataError, GeneratedPart, ReadAhead, Samples, T5DatasetConfig, TokenDataset, Tokenizer,
    bits_per_byte,
};
use xxhash_rust::xxh3::Xxh3;

use crate::{
    assets::ends_of_start,
    config::{DataOrder, DatasetKind, InitFrom, MixBy, TEST, TrainConfig},
    error::TrainError,
};
use masked::MaskedTokens;
use mixture::{DataPart, EvalData, Mixture, Shuffled};
use opening::{Opening, TrainingSource};

/// Returns the text of a run whose configuration has neither `data.path` nor `data.train`.
pub type DefaultText = fn() -> Result<Corpus, DataError>;

/// The data for training, validation and test, and its tokenizer.
#[derive(Debug)]
pub struct RunData {
    pub(crate) tokenizer: Arc<dyn Tokenizer>,
    /// What samples are made of the data.
    dataset: DatasetKind,
    /// The spellings of the tokens with which a decoder's text begins and ends, if they do not follow
    /// from the tokenizer.
    decoder_ends: [Option<String>; 2],
    train: Mixture,
    valid: Vec<EvalData>,
    test: Vec<EvalData>,
    /// The source of the training data, its size and its hash, for people.
    pub(crate) description: String,
    /// The lowest mean loss that a model can reach, in nats per token, if it is known.
    pub(crate) loss_floor: Option<f64>,
    /// Hash of the training data and its tokenizer. A resumed run must read the same tokens.
    pub(crate) hash: u64,
    /// Hash of the data for evaluation. All ranks must evaluate on the same data.
    pub(crate) eval_hash: u64,
}

/// The samples of a run.
#[derive(Clone, Debug)]
pub(crate) struct RunSamples {
    pub(crate) train: Arc<dyn Samples>,
    /// `train`, if samples are read ahead.
    pub(crate) read_ahead: Option<Arc<ReadAhead>>,
    /// How the training data sets are mixed; `None` in Megatron-LM's order.
    pub(crate) blend: Option<BlendRecord>,
    /// How the run reads each training data set; empty in Megatron-LM's order.
    pub(crate) reading: Vec<SourceReading>,
    /// Each is evaluated on its own. The first one is the validation loss of the run.
    pub(crate) valid: Vec<EvalSamples>,
    /// As `valid`, evaluated at the end of the run.
    pub(crate) test: Vec<EvalSamples>,
}

impl RunSamples {
    /// The rank in `groups` shows that it is alive while it waits for a sample.
    pub(crate) fn watched(self, groups: &ProcessGroups) -> Self {
        if let Some(ahead) = &self.read_ahead {
            let pulse = groups.world.pulse();
            ahead.on_wait(move || pulse.beat());
        }
        self
    }
}

impl RunData {
    /// Opens the data that `[data]` names.
    ///
    /// # Errors
    /// Neither `data.path` nor `data.train` is set; a data set or text cannot be read or is empty;
    /// the tokenizer cannot be used, cannot encode a text, or did not encode a data set; the model
    /// that `model.init` names cannot be opened.
    pub fn load(config: &TrainConfig) -> Result<Self, TrainError> {
        let no_text = || {
            let tried = "data.path is not set".into();
            Err(DataError::NoSources { tried })
        };
        let start = config.start(false)?;
        Self::load_with(config, start.as_ref(), no_text, &Progress::none())
    }

    /// As [`load`](Self::load), for a run from `start`, with a text where no data is named, and
    /// reporting each encoded part of a text to `progress`.
    pub(crate) fn load_with(
        config: &TrainConfig,
        start: Option<&InitFrom>,
        default_text: DefaultText,
        progress: &Progress,
    ) -> Result<Self, TrainError> {
        let tokenizer: Arc<dyn Tokenizer> = config.data.tokenizer.open()?.into();
        progress.add(0);
        let opening = Opening {
            config: &config.data,
            tokenizer: tokenizer.as_ref(),
            progress,
        };
        let sources = opening.training(default_text)?;
        for TrainingSource { source, .. } in &sources {
            source.check_ends(&config.data, tokenizer.eos())?;
        }
        let mut eval_hash = Xxh3::new();
        let mut valid =
            opening.evaluations(&config.data.valid, GeneratedPart::Valid, &mut eval_hash)?;
        let mut test =
            opening.evaluations(&config.data.test, GeneratedPart::Test, &mut eval_hash)?;
        let [train, held_out, left] = opening.divide(&sources)?;
        if !held_out.is_empty() {
            valid.push(EvalData {
                name: None,
                mixture: Mixture { parts: held_out },
            });
        }
        if !left.is_empty() {
            test.push(EvalData {
                name: Some(TEST.into()),
                mixture: Mixture { parts: left },
            });
        }
        let mut description = described(&sources);
        if let ([TrainingSource { source, .. }], false) =
            (sources.as_slice(), tokenizer.is_byte_level())
            && source.is_text
        {
            let path = String::from(config.data.tokenizer.clone());
            let (num_tokens, num_ids) = (source.tokens.num_tokens(), tokenizer.vocab_size());
            description += &format!(", {num_tokens} tokens of {path} ({num_ids} ids)");
        }
        Ok(Self {
            hash: hash_of(&train) ^ tokenizer.hash(),
            dataset: config.data.dataset,
            decoder_ends: ends_of_start(start, tokenizer.as_ref())?,
            train: Mixture { parts: train },
            valid,
            test,
            description,
            loss_floor: match sources.as_slice() {
                [TrainingSource { source, .. }] => source.loss_floor,
                _ => None,
            },
            eval_hash: eval_hash.digest(),
            tokenizer,
        })
    }

    /// The samples that `config` reads.
    ///
    /// # Errors
    /// A part of the data is shorter than a sample; a weight cannot be used; the data has no
    /// documents, which `data.order = "megatron"` needs.
    pub(crate) fn samples(&self, config: &TrainConfig) -> Result<RunSamples, TrainError> {
        self.samples_from(config, None)
    }

    /// As [`samples`](Self::samples), for a run whose training data sets have changed before, with
    /// its record. Its first data sets are those of `config`.
    pub(crate) fn samples_from(
        &self,
        config: &TrainConfig,
        record: Option<&BlendRecord>,
    ) -> Result<RunSamples, TrainError> {
        let evaluations = |all: &[EvalData]| {
            let samples = all.iter().map(|data| {
                let mixture = &data.mixture;
                Ok::<_, TrainError>(EvalSamples {
                    name: data.name.clone(),
                    samples: match config.data.dataset {
                        DatasetKind::Gpt => mixture.sequential(config)?,
                        DatasetKind::Bert | DatasetKind::T5 => {
                            mixture.masked(config, &self.masked_of(), None)?
                        }
                    },
                })
            });
            samples.collect::<Result<Vec<_>, _>>()
        };
        let (train, blend, reading) = match config.data.order {
            _ if config.data.dataset.is_masked() => {
                let schedule = config.train.batch_schedule()?;
                let needed = schedule.samples_after(config.train.steps);
                let samples = self.train.masked(config, &self.masked_of(), Some(needed))?;
                (samples, None, Vec::new())
            }
            DataOrder::Megaburn => {
                let Shuffled {
                    samples,
                    blend,
                    reading,
                } = self.train.shuffled(config, record, self.tokenizer.hash())?;
                (samples, Some(blend), reading)
            }
            DataOrder::Megatron => (self.train.megatron(config, self.vocab())?, None, Vec::new()),
        };
        let train = match config.data.active_fim() {
            Some(fim) => fim
                .of_data()
                .build(
                    train,
                    self.tokenizer.clone(),
                    config.data.seq_len,
                    config.run.seed,
                )
                .map(Arc::new)?,
            None => train,
        };
        let num_workers = config.data.num_workers;
        let num_workers = num_workers.unwrap_or_else(|| self.train.default_num_workers());
        let ahead = || ReadAhead::new(train.clone(), num_workers).map(Arc::new);
        let read_ahead = (num_workers > 0).then(ahead).transpose()?;
        Ok(RunSamples {
            train: match &read_ahead {
                Some(ahead) => ahead.clone(),
                None => train,
            },
            read_ahead,
            blend,
            reading,
            valid: evaluations(&self.valid)?,
            test: evaluations(&self.test)?,
        })
    }

    /// Number of sentinels of the tokenizer, if samples have masked spans.
    pub(crate) fn num_sentinels(&self) -> Option<usize> {
        let sentinels = || T5DatasetConfig::default_sentinels(self.tokenizer.as_ref());
        (self.dataset == DatasetKind::T5).then(|| sentinels().len())
    }

    /// What the samples of masked sentences are made with.
    fn masked_of(&self) -> MaskedTokens {
        MaskedTokens {
            tokenizer: self.tokenizer.clone(),
            decoder_ends: self.decoder_ends.clone(),
        }
    }

    /// The tokens at the start of the validation data, or of the training data if there is none.
    pub(crate) fn first_tokens(&self) -> (&TokenDataset, bool) {
        let valid = self.valid.first();
        let valid = valid.map(|valid| &valid.mixture.parts[0].tokens);
        let valid = valid.filter(|tokens| tokens.num_tokens() > 1);
        valid.map_or((&self.train.parts[0].tokens, false), |set| (set, true))
    }

    /// Number of token ids of the tokenizer.
    pub(crate) fn vocab(&self) -> usize {
        self.tokenizer.vocab_size()
    }

    /// The mean bytes of a token of the validation set called `name`, if they are known and every
    /// token is predicted.
    pub(crate) fn bytes_per_token_of(&self, name: Option<&str>) -> Option<f64> {
        let mut sets = self.valid.iter();
        let set = sets.find(|set| set.name.as_deref() == name)?;
        match (set.mixture.parts.as_slice(), self.dataset) {
            ([part], DatasetKind::Gpt) => part.tokens.bytes_per_token(),
            _ => None,
        }
    }

    /// Converts a validation loss to bits per byte of text, if each token is predicted and the tokens'
    /// bytes are known.
    pub(crate) fn bits_per_byte(&self, loss: f64) -> Option<f64> {
        if self.dataset != DatasetKind::Gpt {
            return None;
        }
        let [part] = self.valid.first()?.mixture.parts.as_slice() else {
            return None;
        };
        let bytes_per_token = part.tokens.bytes_per_token();
        bytes_per_token.map(|bytes| bits_per_byte(loss, bytes))
    }
}

/// What the training data is, for people.
fn described(sources: &[TrainingSource<'_>]) -> String {
    let weight = |source: &TrainingSource<'_>| source.entry.and_then(|entry| entry.weight);
    let sum: f64 = sources.iter().filter_map(weight).sum();
    let one = |of: &TrainingSource<'_>| {
        let share = weight(of).filter(|_| sources.len() > 1);
        let share = share.map(|weight| format!("{:.1}% of ", 100.0 * weight / sum));
        format!("{}{}", share.unwrap_or_default(), of.source.description)
    };
    let all: Vec<String> = sources.iter().map(one).collect();
    all.join("; ")
}

/// A hash of the training data. That of one text is the text's own.
fn hash_of(parts: &[DataPart]) -> u64 {
    if let [part] = parts {
        return part.hash;
    }
    let mut hash = Xxh3::new();
    for part in parts {
        hash.update(&part.hash.to_le_bytes());
        match part.mix_by {
            MixBy::NumSamples => hash.update(&0.0f64.to_bits().to_le_bytes()),
            MixBy::Weight(weight) => hash.update(&weight.to_bits().to_le_bytes()),
            MixBy::Epochs(epochs) => {
                hash.update(b"epochs");
                hash.update(&epochs.to_bits().to_le_bytes());
            }
        }
    }
    hash.digest()
}
