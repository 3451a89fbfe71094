//! The data of a run, opened once per process and shared by its rank threads.

mod cache_dir;
mod encoding_log;
mod mixture;
mod source;

pub(crate) use mixture::EvalSamples;

use std::sync::Arc;

use megaburn_collective::Progress;
use megaburn_data::{
    Corpus, DataError, Samples, SequenceRange, Split, TokenDataset, Tokenizer, bits_per_byte,
};
use xxhash_rust::xxh3::Xxh3;

use crate::{
    config::{DataConfig, DataOrder, SourceConfig, TrainConfig},
    error::TrainError,
};
use mixture::{DataPart, EvalData, Mixture};
use source::Source;

/// Returns the text of a run whose configuration has neither `data.path` nor `data.train`.
pub type DefaultText = fn() -> Result<Corpus, DataError>;

/// The data for training, validation and test, and its tokenizer.
#[derive(Debug)]
pub struct RunData {
    pub(crate) tokenizer: Box<dyn Tokenizer>,
    train: Mixture,
    valid: Vec<EvalData>,
    test: Vec<EvalData>,
    /// The source of the training data, its size and its hash, for people.
    pub(crate) description: String,
    /// Hash of the training data and its tokenizer. A resumed run must read the same tokens.
    pub(crate) hash: u64,
    /// Hash of the data for evaluation. All ranks must evaluate on the same data.
    pub(crate) eval_hash: u64,
}

/// The samples of a run.
#[derive(Clone, Debug)]
pub(crate) struct RunSamples {
    pub(crate) train: Arc<dyn Samples>,
    /// Each is evaluated on its own. The first one is the validation loss of the run.
    pub(crate) valid: Vec<EvalSamples>,
    /// As `valid`, evaluated at the end of the run.
    pub(crate) test: Vec<EvalSamples>,
}

impl RunData {
    /// Opens the data that `[data]` names.
    ///
    /// # Errors
    /// Neither `data.path` nor `data.train` is set; a data set or text cannot be read or is empty;
    /// the tokenizer cannot be used, cannot encode a text, or did not encode a data set.
    pub fn load(config: &TrainConfig) -> Result<Self, TrainError> {
        let no_text = || {
            let tried = "data.path is not set".into();
            Err(DataError::NoSources { tried })
        };
        Self::load_with(config, no_text, &Progress::none())
    }

    /// As [`load`](Self::load), with a text where no data is named, and reporting each encoded part
    /// of a text to `progress`.
    pub(crate) fn load_with(
        config: &TrainConfig,
        default_text: DefaultText,
        progress: &Progress,
    ) -> Result<Self, TrainError> {
        let tokenizer = config.data.tokenizer.open()?;
        progress.add(0);
        let opening = Opening {
            config: &config.data,
            tokenizer: tokenizer.as_ref(),
            progress,
        };
        let sources = opening.training(default_text)?;
        let mut eval_hash = Xxh3::new();
        let mut valid = opening.evaluations(&config.data.valid, &mut eval_hash)?;
        let mut test = opening.evaluations(&config.data.test, &mut eval_hash)?;
        let weights: Option<Vec<f64>> = config
            .data
            .train
            .iter()
            .map(|source| source.weight)
            .collect();
        let weights = weights.filter(|weights| !weights.is_empty());
        let [train, held_out, left] = opening.split(&sources, !valid.is_empty())?;
        let mixture = |parts| Mixture {
            parts,
            weights: weights.clone(),
        };
        if valid.is_empty() && !held_out.is_empty() {
            valid.push(EvalData {
                name: None,
                mixture: mixture(held_out),
            });
        }
        if test.is_empty() && !left.is_empty() {
            test.push(EvalData {
                name: Some("test".into()),
                mixture: mixture(left),
            });
        }
        let mut description = described(&sources, weights.as_deref());
        if let ([source], false) = (sources.as_slice(), tokenizer.is_byte_level())
            && source.is_text
        {
            let path = String::from(config.data.tokenizer.clone());
            let (num_tokens, num_ids) = (source.tokens.num_tokens(), tokenizer.vocab_size());
            description += &format!(", {num_tokens} tokens of {path} ({num_ids} ids)");
        }
        Ok(Self {
            train: mixture(train),
            valid,
            test,
            description,
            hash: hash_of(&sources, weights.as_deref()) ^ tokenizer.hash(),
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
        let evaluations = |all: &[EvalData]| {
            let samples = all.iter().map(|data| {
                Ok::<_, DataError>(EvalSamples {
                    name: data.name.clone(),
                    samples: data.mixture.sequential(config)?,
                })
            });
            samples.collect::<Result<Vec<_>, _>>()
        };
        Ok(RunSamples {
            train: match config.data.order {
                DataOrder::Megaburn => self.train.shuffled(config)?,
                DataOrder::Megatron => self.train.megatron(config, self.vocab())?,
            },
            valid: evaluations(&self.valid)?,
            test: evaluations(&self.test)?,
        })
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

    /// Converts a validation loss to bits per byte of text, if the tokens' bytes are known.
    pub(crate) fn bits_per_byte(&self, loss: f64) -> Option<f64> {
        let [part] = self.valid.first()?.mixture.parts.as_slice() else {
            return None;
        };
        let bytes_per_token = part.tokens.bytes_per_token();
        bytes_per_token.map(|bytes| bits_per_byte(loss, bytes))
    }
}

/// What the data sets of a run are opened with.
struct Opening<'a> {
    config: &'a DataConfig,
    tokenizer: &'a dyn Tokenizer,
    progress: &'a Progress,
}

impl Opening<'_> {
    fn open(&self, path: &str) -> Result<Source, DataError> {
        Source::open(path, self.config, self.tokenizer, self.progress)
    }

    /// The training data sets, before a part is held out.
    fn training(&self, default_text: DefaultText) -> Result<Vec<Source>, DataError> {
        if !self.config.train.is_empty() {
            let sources = self.config.train.iter();
            return sources.map(|source| self.open(&source.path)).collect();
        }
        let source = match &self.config.path {
            Some(path) => self.open(path)?,
            None => Source::in_memory(&default_text()?, self.tokenizer, self.progress)?,
        };
        Ok(vec![source])
    }

    /// The evaluations of a list, by name.
    fn evaluations(
        &self,
        sources: &[SourceConfig],
        hash: &mut Xxh3,
    ) -> Result<Vec<EvalData>, DataError> {
        let mut evaluations: Vec<EvalData> = Vec::new();
        for source in sources {
            let name = Some(source.name());
            let opened = self.open(&source.path)?;
            hash.update(&opened.hash.to_le_bytes());
            let part = opened.all();
            let known = evaluations.iter_mut().find(|known| known.name == name);
            let Some(EvalData { mixture, .. }) = known else {
                let weights = source.weight.map(|weight| vec![weight]);
                let parts = vec![part];
                let mixture = Mixture { parts, weights };
                evaluations.push(EvalData { name, mixture });
                continue;
            };
            mixture.parts.push(part);
            if let (Some(weights), Some(weight)) = (&mut mixture.weights, source.weight) {
                weights.push(weight);
            }
        }
        Ok(evaluations)
    }

    /// The parts of the training data for training, validation and test. The last two are empty if
    /// nothing is held out.
    fn split(&self, sources: &[Source], has_valid: bool) -> Result<[Vec<DataPart>; 3], TrainError> {
        let mut parts = [const { Vec::new() }; 3];
        for source in sources {
            if let Some(split) = self.config.split()? {
                let split = split_documents(source, &split)?;
                for (part, set) in parts.iter_mut().zip(split) {
                    part.extend(set);
                }
                continue;
            }
            let fraction = self.config.validation_fraction;
            if has_valid || fraction == 0.0 {
                parts[0].push(source.all());
                continue;
            }
            let Split { train, valid } = source.tokens.split(fraction)?;
            for (part, tokens) in parts.iter_mut().zip([train, valid]) {
                let sequences = None;
                part.push(DataPart { tokens, sequences });
            }
        }
        Ok(parts)
    }
}

/// Splits a data set between documents, as Megatron-LM's `--split` does.
fn split_documents(source: &Source, weights: &[f64]) -> Result<[Option<DataPart>; 3], DataError> {
    let Some(set) = &source.documents else {
        return Err(DataError::NoDocuments {
            name: source.tokens.name().into(),
        });
    };
    let names = ["training", "validation", "test"];
    let mut parts = [const { None }; 3];
    let split = SequenceRange::split(set, weights)?.into_iter();
    for ((part, sequences), name) in parts.iter_mut().zip(split).zip(names) {
        if !sequences.sequences().is_empty() {
            let tokens = source.tokens.part(name, sequences.tokens()?);
            let sequences = Some(sequences);
            *part = Some(DataPart { tokens, sequences });
        }
    }
    Ok(parts)
}

/// What the training data is, for people.
fn described(sources: &[Source], weights: Option<&[f64]>) -> String {
    if let [source] = sources {
        return source.description.clone();
    }
    let sum: f64 = weights.unwrap_or_default().iter().sum();
    let one = |(index, source): (usize, &Source)| {
        let share = weights.map(|weights| format!("{:.1}% of ", 100.0 * weights[index] / sum));
        format!("{}{}", share.unwrap_or_default(), source.description)
    };
    let all: Vec<String> = sources.iter().enumerate().map(one).collect();
    all.join("; ")
}

/// A hash of the training data. That of one text is the text's own.
fn hash_of(sources: &[Source], weights: Option<&[f64]>) -> u64 {
    if let [source] = sources {
        return source.hash;
    }
    let mut hash = Xxh3::new();
    for (index, source) in sources.iter().enumerate() {
        hash.update(&source.hash.to_le_bytes());
        let weight = weights.map_or(0.0, |weights| weights[index]);
        hash.update(&weight.to_bits().to_le_bytes());
    }
    hash.digest()
}
