//! Masked sentences, for encoders.

use std::path::Path;
use std::sync::Arc;

use megaburn_data::{
    BertDatasetConfig, BlendedDatasetConfig, DataError, DocumentRange, Samples, Tokenizer,
};

use super::{
    cache_dir::cache_dir,
    mixture::{Mixture, check_enough, report},
};
use crate::{config::TrainConfig, error::TrainError};

impl Mixture {
    /// The samples of Megatron-LM's BERT in its order: at least `num_samples`, or those of one epoch.
    ///
    /// # Errors
    /// A data set is a text or has no sentences; the tokenizer lacks a special token; the index of
    /// the samples cannot be read or built.
    pub(super) fn bert(
        &self,
        config: &TrainConfig,
        tokenizer: &Arc<dyn Tokenizer>,
        num_samples: Option<u64>,
    ) -> Result<Arc<dyn Samples>, TrainError> {
        let documents = self.parts.iter().map(|part| {
            let name = || part.tokens.name().into();
            let documents = part.documents.clone();
            documents.ok_or_else(|| DataError::NoSentences { name: name() })
        });
        let documents: Vec<DocumentRange> = documents.collect::<Result<_, _>>()?;
        let cache = cache_dir(Path::new(self.parts[0].tokens.name()), &config.data)?;
        let masking = config.data.masking.clone().unwrap_or_default();
        let bert = BertDatasetConfig::new(config.data.seq_len, tokenizer.clone(), cache)
            .with_seed(config.run.seed)
            .with_short_sequence_probability(config.data.short_sequence_probability)
            .with_masking(masking.of_data())
            .with_classification_head(config.model.template().binary_head);
        let bert = match num_samples {
            Some(num_samples) => bert.with_num_samples(num_samples),
            None => bert,
        };
        // `epochs` is refused with this data set, so no sizes are needed.
        let weights = self.weights(&vec![0; documents.len()]);
        if let ([only], None) = (documents.as_slice(), &weights) {
            return Ok(Arc::new(bert.build(only, report)?));
        }
        let mut blend = BlendedDatasetConfig::new(bert);
        if let Some(weights) = weights {
            blend = blend.with_weights(weights);
        }
        let blend = blend.build(&documents, report)?;
        if let Some(needed) = num_samples {
            check_enough(config, blend.num_samples(), needed)?;
        }
        Ok(Arc::new(blend))
    }
}
