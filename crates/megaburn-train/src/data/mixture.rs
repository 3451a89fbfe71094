//! Data sets that are read together.

use std::path::Path;
use std::sync::Arc;

use megaburn_data::{
    BlendedDatasetConfig, BlendedSampler, DataError, GptDatasetConfig, IndexEvent, Sampler,
    Samples, SequenceRange, TokenDataset, UnionSampler,
};

use super::cache_dir::cache_dir;
use crate::{config::TrainConfig, error::TrainError};

/// A data set, or a part of one.
#[derive(Clone, Debug)]
pub(super) struct DataPart {
    pub(super) tokens: TokenDataset,
    /// The same as sequences; `None` for text and for a part that begins or ends inside one.
    pub(super) sequences: Option<SequenceRange>,
}

/// Data sets that are mixed by weight. There is at least one.
#[derive(Clone, Debug)]
pub(super) struct Mixture {
    pub(super) parts: Vec<DataPart>,
    /// The weight of each; `None` for those of their numbers of samples.
    pub(super) weights: Option<Vec<f64>>,
}

/// An evaluation: a data set, or several that are mixed.
#[derive(Clone, Debug)]
pub(super) struct EvalData {
    /// Its name in the metrics; `None` for the part that is held out of the training data.
    pub(super) name: Option<String>,
    pub(super) mixture: Mixture,
}

/// The samples of an evaluation.
#[derive(Clone, Debug)]
pub(crate) struct EvalSamples {
    pub(crate) name: Option<String>,
    pub(crate) samples: Arc<dyn Samples>,
}

impl Mixture {
    /// Samples that are reshuffled in each epoch of their data set, for training.
    ///
    /// # Errors
    /// A data set is shorter than a sample, or a weight cannot be used.
    pub(super) fn shuffled(&self, config: &TrainConfig) -> Result<Arc<dyn Samples>, DataError> {
        let seed = config.run.seed;
        let seq_len = config.data.seq_len;
        let mut numbers = 0..;
        self.mixed(config, |tokens| {
            let number = numbers.next().unwrap_or_default();
            Sampler::shuffled_source(tokens, seq_len, seed, number)
        })
    }

    /// Samples in the order of the files, for evaluation. Without weights, each sample of several
    /// data sets is read once.
    ///
    /// # Errors
    /// As [`shuffled`](Self::shuffled).
    pub(super) fn sequential(&self, config: &TrainConfig) -> Result<Arc<dyn Samples>, DataError> {
        let seq_len = config.data.seq_len;
        let sequential = |tokens| Sampler::sequential(tokens, seq_len);
        if self.weights.is_some() || self.parts.len() == 1 {
            return self.mixed(config, sequential);
        }
        let samplers = self
            .parts
            .iter()
            .map(|part| sequential(part.tokens.clone()));
        let samplers = samplers.collect::<Result<_, _>>()?;
        Ok(Arc::new(UnionSampler::new(samplers, config.run.seed)?))
    }

    fn mixed(
        &self,
        config: &TrainConfig,
        mut sampler: impl FnMut(TokenDataset) -> Result<Sampler, DataError>,
    ) -> Result<Arc<dyn Samples>, DataError> {
        let samplers = self.parts.iter().map(|part| sampler(part.tokens.clone()));
        let mut samplers = samplers.collect::<Result<Vec<_>, _>>()?;
        if samplers.len() == 1 {
            return Ok(Arc::new(samplers.remove(0)));
        }
        let weights = self.weights.as_deref();
        let blended = BlendedSampler::new(samplers, weights, config.run.seed)?;
        Ok(Arc::new(blended))
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
        if let ([only], None) = (sequences.as_slice(), &self.weights) {
            return Ok(Arc::new(gpt.build(only, report)?));
        }
        let mut blend = BlendedDatasetConfig::new(gpt);
        if let Some(weights) = &self.weights {
            blend = blend.with_weights(weights.clone());
        }
        let blend = blend.build(&sequences, report)?;
        let (found, steps) = (blend.num_samples(), config.train.steps);
        if found < num_samples {
            let rule = format!(
                "fewer: without weights Megatron-LM reads each data set of data.train once, which \
                gives {found} samples, and the run needs {num_samples}; give weights"
            );
            return Err(TrainError::Invalid {
                key: "train.steps",
                value: steps.to_string(),
                rule,
            });
        }
        Ok(Arc::new(blend))
    }
}

fn report(event: IndexEvent) {
    match event {
        IndexEvent::Building { name, num_samples } => {
            tracing::info!("building the index of {num_samples} samples of {name}");
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
