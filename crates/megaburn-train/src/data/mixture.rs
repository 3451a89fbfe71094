//! Data sets that are mixed, and their samples in the order of a run.

use std::path::Path;
use std::sync::Arc;

use megaburn_data::{
    BlendedDatasetConfig, BlendedSampler, DataError, DocumentRange, GptDatasetConfig, IndexEvent,
    PackedSamplerConfig, PackingStats, Sampler, Samples, SequenceRange, TokenDataset, UnionSampler,
};
use megaburn_store::is_url;

use super::{
    blend_record::{BlendRecord, SourceRecord},
    cache_dir::cache_dir,
};
use crate::{
    config::{MixBy, Packing, TrainConfig, require},
    error::TrainError,
};

/// A data set, or a part of one.
#[derive(Clone, Debug)]
pub(super) struct DataPart {
    /// The path of the data set, and the hash of its tokens.
    pub(super) path: String,
    pub(super) hash: u64,
    pub(super) tokens: TokenDataset,
    /// The same as sequences; `None` for text and for a part that begins or ends inside one.
    pub(super) sequences: Option<SequenceRange>,
    /// The same as documents of sentences; `None` for text and for a part that cuts documents.
    pub(super) documents: Option<DocumentRange>,
    /// What decides its share.
    pub(super) mix_by: MixBy,
}

/// Data sets that are mixed. There is at least one.
#[derive(Clone, Debug)]
pub(super) struct Mixture {
    pub(super) parts: Vec<DataPart>,
}

/// An evaluation: a data set, or several that are mixed.
#[derive(Clone, Debug)]
pub(super) struct EvalData {
    /// Its name in the metrics; `None` for the part that is held out of the training data.
    pub(super) name: Option<String>,
    pub(super) mixture: Mixture,
}

/// Whether reads of a data set are requests to a server.
fn is_remote(path: &str) -> bool {
    is_url(path) && !path.starts_with("file://")
}

/// A request takes some tens of milliseconds, and a rank reads tens of samples in a step.
const WORKERS_OF_URLS: usize = 8;

/// How a run reads a training data set.
#[derive(Clone, Debug)]
pub(crate) struct SourceReading {
    pub(crate) path: String,
    /// How often it is read.
    pub(crate) epochs: f64,
    /// What packing made of its documents.
    pub(crate) packing: Option<PackingStats>,
}

/// The samples of an evaluation.
#[derive(Clone, Debug)]
pub(crate) struct EvalSamples {
    pub(crate) name: Option<String>,
    pub(crate) samples: Arc<dyn Samples>,
}

/// The samples of a data set.
struct PartSamples {
    samples: Arc<dyn Samples>,
    packing: Option<PackingStats>,
}

impl DataPart {
    /// Its samples: reshuffled in each epoch as data set `number` of the run, or in the order of the
    /// file.
    ///
    /// # Errors
    /// It is shorter than a sample, or has no documents to pack; an index cannot be read or built.
    fn samples(
        &self,
        config: &TrainConfig,
        number: Option<usize>,
    ) -> Result<PartSamples, DataError> {
        let seq_len = config.data.seq_len;
        let seed = config.run.seed;
        let tokens = self.tokens.clone();
        if config.data.packing == Packing::BestFit {
            let mut packed =
                PackedSamplerConfig::new(seq_len).with_multiple(config.data.document_multiple);
            // Without a folder, and for texts in memory, it is packed in memory.
            if let Ok(cache) = cache_dir(Path::new(&self.path), &config.data) {
                packed = packed.with_cache(cache);
            }
            let packed = match number {
                Some(number) => packed.with_shuffle(seed, number),
                None => packed,
            };
            let samples = packed.init(&tokens, report)?;
            let packing = Some(samples.stats().clone());
            let samples = Arc::new(samples);
            return Ok(PartSamples { samples, packing });
        }
        let samples = match number {
            Some(number) => Sampler::shuffled_source(tokens, seq_len, seed, number)?,
            None => Sampler::sequential(tokens, seq_len)?,
        };
        Ok(PartSamples {
            samples: Arc::new(samples),
            packing: None,
        })
    }
}

/// Training samples in megaburn's order.
pub(super) struct Shuffled {
    pub(super) samples: Arc<dyn Samples>,
    pub(super) blend: BlendRecord,
    /// How each data set is read.
    pub(super) reading: Vec<SourceReading>,
}

impl Mixture {
    /// The weights of its data sets, of which sampler `i` has `sizes[i]` samples; `None` for these
    /// numbers.
    pub(super) fn weights(&self, sizes: &[u64]) -> Option<Vec<f64>> {
        let weight = |(part, size): (&DataPart, &u64)| match part.mix_by {
            MixBy::Weight(weight) => Some(weight),
            MixBy::Epochs(epochs) => Some(epochs * *size as f64),
            MixBy::NumSamples => None,
        };
        self.parts.iter().zip(sizes).map(weight).collect()
    }

    /// Number of threads that read ahead if the configuration does not say.
    pub(super) fn default_num_workers(&self) -> usize {
        match self.parts.iter().any(|part| is_remote(&part.path)) {
            true => WORKERS_OF_URLS,
            false => 0,
        }
    }

    /// Samples that are reshuffled in each epoch of their data set, for training. `record` is that
    /// of a run whose data sets have changed; without one, all begin with their first sample.
    /// `tokenizer` is the hash of the tokenizer.
    ///
    /// # Errors
    /// A data set is shorter than a sample, or a weight cannot be used.
    pub(super) fn shuffled(
        &self,
        config: &TrainConfig,
        record: Option<&BlendRecord>,
        tokenizer: u64,
    ) -> Result<Shuffled, TrainError> {
        let seed = config.run.seed;
        let of = |index: usize| record.map(|record| &record.sources[index]);
        let mut samplers = Vec::new();
        let mut packing = Vec::new();
        for (index, part) in self.parts.iter().enumerate() {
            let number = of(index).map_or(index, |source| source.number);
            let part = part.samples(config, Some(number))?;
            samplers.push(part.samples);
            packing.push(part.packing);
        }
        let sizes: Vec<u64> = samplers.iter().map(Samples::num_samples).collect();
        let only = samplers.first().filter(|_| samplers.len() == 1).cloned();
        let blended = BlendedSampler::new(samplers, self.weights(&sizes).as_deref(), seed)?;
        let shares = blended.shares();
        let all = self
            .parts
            .iter()
            .zip(blended.sources())
            .zip(shares)
            .enumerate();
        let records = all.map(|(number, ((part, samples), share))| SourceRecord {
            path: part.path.clone(),
            xxh3: format!("{:016x}", part.hash),
            tokens: {
                let positions = part.tokens.positions();
                [positions.start, positions.end]
            },
            order_hash: samples.order_hash(),
            share,
            number,
            num_before: 0,
        });
        let new = BlendRecord::new(records.collect(), tokenizer);
        let num_before = |source: &SourceRecord| source.num_before;
        let blended = match record {
            Some(record) => {
                let before = record.sources[..sizes.len()].iter().map(num_before);
                blended.continued(record.first_sample, before.collect())
            }
            None => blended,
        };
        let schedule = config.train.batch_schedule()?;
        let end = schedule.samples_after(config.train.steps);
        let first = record.map_or(0, |record| record.first_sample);
        let num_read = blended.num_read(end.max(first)).into_iter();
        let all = num_read.zip(&sizes).zip(&self.parts).zip(packing);
        let reading = all.map(|(((num_read, size), part), packing)| SourceReading {
            path: part.path.clone(),
            epochs: num_read as f64 / *size as f64,
            packing,
        });
        let reading = reading.collect();
        let samples: Arc<dyn Samples> = match (only, record) {
            (Some(only), None) => only,
            _ => Arc::new(blended),
        };
        Ok(Shuffled {
            samples,
            blend: record.cloned().unwrap_or(new),
            reading,
        })
    }

    /// Samples in the order of the files, for evaluation. Without weights, each sample of several
    /// data sets is read once.
    ///
    /// # Errors
    /// As [`shuffled`](Self::shuffled).
    pub(super) fn sequential(&self, config: &TrainConfig) -> Result<Arc<dyn Samples>, DataError> {
        let samplers = self
            .parts
            .iter()
            .map(|part| Ok::<_, DataError>(part.samples(config, None)?.samples));
        let mut samplers = samplers.collect::<Result<Vec<_>, _>>()?;
        if samplers.len() == 1 {
            return Ok(samplers.remove(0));
        }
        let sizes: Vec<u64> = samplers.iter().map(Samples::num_samples).collect();
        let seed = config.run.seed;
        Ok(match self.weights(&sizes) {
            Some(weights) => Arc::new(BlendedSampler::new(samplers, Some(&weights), seed)?),
            None => Arc::new(UnionSampler::new(samplers, seed)?),
        })
    }

    /// The samples of Megatron-LM in its order, as many as the run trains on.
    ///
    /// # Errors
    /// A data set is a text, or has no tokens; the index of the samples cannot be read or built.
    pub(super) fn megatron(
        &self,
        config: &TrainConfig,
        vocab_size: usize,
    ) -> Result<Arc<dyn Samples>, TrainError> {
        let sequences = self.parts.iter().map(|part| {
            let name = || part.tokens.name().into();
            let sequences = part.sequences.clone();
            sequences.ok_or_else(|| DataError::NoDocuments { name: name() })
        });
        let sequences = sequences.collect::<Result<Vec<_>, _>>()?;
        let cache = cache_dir(Path::new(self.parts[0].tokens.name()), &config.data)?;
        let num_samples = config
            .train
            .batch_schedule()?
            .samples_after(config.train.steps);
        let gpt = GptDatasetConfig::new(config.data.seq_len, vocab_size, cache)
            .with_seed(config.run.seed)
            .with_num_samples(num_samples);
        // `epochs` is refused with this order, so no sizes are needed.
        let weights = self.weights(&vec![0; sequences.len()]);
        if let ([only], None) = (sequences.as_slice(), &weights) {
            return Ok(Arc::new(gpt.build(only, report)?));
        }
        let mut blend = BlendedDatasetConfig::new(gpt);
        if let Some(weights) = weights {
            blend = blend.with_weights(weights);
        }
        let blend = blend.build(&sequences, report)?;
        check_enough(config, blend.num_samples(), num_samples)?;
        Ok(Arc::new(blend))
    }
}

/// Refuses a blend of Megatron-LM with `found` samples for a run that needs more.
pub(super) fn check_enough(
    config: &TrainConfig,
    found: u64,
    needed: u64,
) -> Result<(), TrainError> {
    let rule = format!(
        "fewer: without weights Megatron-LM reads each data set of data.train once, which gives \
        {found} samples, and the run needs {needed}; give weights"
    );
    require(found >= needed, "train.steps", config.train.steps, rule)
}

pub(super) fn report(event: IndexEvent) {
    match event {
        IndexEvent::Building { name, num_samples } => {
            tracing::info!("building the index of {num_samples} samples of {name}");
        }
        IndexEvent::Packing { name } => {
            tracing::info!("packing the documents of {name}");
        }
        IndexEvent::Mapping { name } => {
            tracing::info!("dividing the documents of {name} into samples of sentences");
        }
        IndexEvent::Waiting { folder } => {
            tracing::info!("waiting for an index in {}", folder.display());
        }
        IndexEvent::Damaged { path, why } => {
            tracing::warn!("building {} again: {why}", path.display());
        }
        _ => {}
    }
}
