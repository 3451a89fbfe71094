//! Opens the data sets that `[data]` names, and divides them.

use megaburn_collective::Progress;
use megaburn_data::{
    Corpus, DataError, DocumentRange, GeneratedPart, SequenceRange, Split, Tokenizer,
};
use xxhash_rust::xxh3::Xxh3;

use super::{
    mixture::{DataPart, EvalData, Mixture},
    source::Source,
};
use crate::{
    config::{DataConfig, DataOrder, MixBy, SourceConfig},
    error::TrainError,
};

/// What the data sets of a run are opened with.
pub(super) struct Opening<'a> {
    pub(super) config: &'a DataConfig,
    pub(super) tokenizer: &'a dyn Tokenizer,
    pub(super) progress: &'a Progress,
}

/// A training data set before it is divided.
pub(super) struct TrainingSource<'a> {
    pub(super) source: Source,
    /// Its entry in `data.train`; `None` for that of `data.path`.
    pub(super) entry: Option<&'a SourceConfig>,
}

impl<'a> Opening<'a> {
    fn open(&self, path: &str, part: GeneratedPart) -> Result<Source, DataError> {
        Source::open(path, part, self.config, self.tokenizer, self.progress)
    }

    /// The training data sets, before a part is held out.
    pub(super) fn training(
        &self,
        default_text: impl FnOnce() -> Result<Corpus, DataError>,
    ) -> Result<Vec<TrainingSource<'a>>, DataError> {
        if !self.config.train.is_empty() {
            let entries = self.config.train.iter();
            let open = |entry: &'a SourceConfig| {
                Ok(TrainingSource {
                    source: self.open(&entry.path, GeneratedPart::Train)?,
                    entry: Some(entry),
                })
            };
            return entries.map(open).collect();
        }
        let source = match &self.config.path {
            Some(path) => self.open(path, GeneratedPart::Train)?,
            None => Source::in_memory(&default_text()?, self.tokenizer, self.progress)?,
        };
        let entry = None;
        Ok(vec![TrainingSource { source, entry }])
    }

    /// The evaluations of a list, by name, on `part` of generated data.
    pub(super) fn evaluations(
        &self,
        sources: &[SourceConfig],
        part: GeneratedPart,
        hash: &mut Xxh3,
    ) -> Result<Vec<EvalData>, DataError> {
        let mut evaluations: Vec<EvalData> = Vec::new();
        for source in sources {
            let name = Some(source.name());
            let opened = self.open(&source.path, part)?;
            hash.update(&opened.hash.to_le_bytes());
            let data = opened.all(source.mix_by());
            match evaluations.iter_mut().find(|known| known.name == name) {
                Some(known) => known.mixture.parts.push(data),
                None => {
                    let mixture = Mixture { parts: vec![data] };
                    evaluations.push(EvalData { name, mixture });
                }
            }
        }
        Ok(evaluations)
    }

    /// The parts of the training data for training, validation and test. The last two are empty if
    /// nothing is held out.
    pub(super) fn divide(
        &self,
        sources: &[TrainingSource<'_>],
    ) -> Result<[Vec<DataPart>; 3], TrainError> {
        let mut parts = [const { Vec::new() }; 3];
        for TrainingSource { source, entry } in sources {
            let all = source.all(entry.map_or(MixBy::NumSamples, SourceConfig::mix_by));
            if self.config.dataset.is_masked() {
                let weights = self.config.document_weights(*entry)?;
                let sets = match &weights {
                    None => [Some(all), None, None],
                    Some(weights) => documents_divided(source, &all, weights)?,
                };
                for (part, set) in parts.iter_mut().zip(sets) {
                    part.extend(set);
                }
                continue;
            }
            if let Some(weights) = self.config.split_of(*entry)? {
                // Megatron-LM's order has no record of the parts.
                let own = entry.and_then(|entry| entry.split.as_ref());
                let own = own.filter(|_| self.config.order == DataOrder::Megatron);
                let all = DataPart {
                    hash: own.map_or(all.hash, |_| hash_with(all.hash, &weights)),
                    ..all
                };
                for (part, set) in parts.iter_mut().zip(divided(source, &all, &weights)?) {
                    part.extend(set);
                }
                continue;
            }
            let fraction = self.config.validation_fraction;
            if !self.config.valid.is_empty() || fraction == 0.0 {
                parts[0].push(all);
                continue;
            }
            let Split { train, valid } = source.tokens.split(fraction)?;
            for (part, tokens) in parts.iter_mut().zip([train, valid]) {
                part.push(DataPart {
                    tokens,
                    sequences: None,
                    documents: None,
                    ..all.clone()
                });
            }
        }
        Ok(parts)
    }
}

/// Divides a data set between sequences, as Megatron-LM's `--split` does.
fn divided(
    source: &Source,
    all: &DataPart,
    weights: &[f64],
) -> Result<[Option<DataPart>; 3], DataError> {
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
            *part = Some(DataPart {
                tokens: source.tokens.part(name, sequences.tokens()?),
                sequences: Some(sequences),
                documents: None,
                ..all.clone()
            });
        }
    }
    Ok(parts)
}

/// Divides a data set between documents, as Megatron-LM's `--split` does for masked sentences.
fn documents_divided(
    source: &Source,
    all: &DataPart,
    weights: &[f64],
) -> Result<[Option<DataPart>; 3], DataError> {
    let Some(set) = &source.documents else {
        return Err(DataError::NoSentences {
            name: source.tokens.name().into(),
        });
    };
    // No record of the run says where the parts begin and end.
    let hash = hash_with(all.hash, weights);
    let split = DocumentRange::split(set, weights)?;
    Ok(split.map(|documents| {
        let has_any = !documents.documents().is_empty();
        has_any.then(|| DataPart {
            hash,
            sequences: None,
            documents: Some(documents),
            ..all.clone()
        })
    }))
}

fn hash_with(hash: u64, numbers: &[f64]) -> u64 {
    let mut all = Xxh3::new();
    all.update(&hash.to_le_bytes());
    numbers
        .iter()
        .for_each(|number| all.update(&number.to_bits().to_le_bytes()));
    all.digest()
}
