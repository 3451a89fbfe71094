//! Masked sentences, for encoders and encoder-decoder models.

use std::path::Path;
use std::sync::Arc;

use megaburn_data::{
    BertDatasetConfig, BlendedDataset, BlendedDatasetConfig, DataError, DocumentRange,
    MaskedDatasetConfig, MaskedKind, Samples, T5DatasetConfig, Tokenizer,
};

use super::{
    cache_dir::cache_dir,
    mixture::{Mixture, check_enough, report},
};
use crate::{
    config::{DatasetKind, TrainConfig},
    error::TrainError,
};

/// The tokens of masked sentences.
#[derive(Clone, Debug)]
pub(super) struct MaskedTokens {
    /// The tokenizer that encoded the data.
    pub(super) tokenizer: Arc<dyn Tokenizer>,
    /// The spellings of the tokens with which a decoder's text begins and ends, if they do not follow
    /// from the tokenizer.
    pub(super) decoder_ends: [Option<String>; 2],
}

impl Mixture {
    /// The samples of Megatron-LM's BERT or T5 in its order: at least `num_samples`, or those of one
    /// epoch.
    ///
    /// # Errors
    /// A data set is a text or has no sentences; the tokenizer lacks a special token; the index of
    /// the samples cannot be read or built.
    pub(super) fn masked(
        &self,
        config: &TrainConfig,
        tokens: &MaskedTokens,
        num_samples: Option<u64>,
    ) -> Result<Arc<dyn Samples>, TrainError> {
        let cache = cache_dir(Path::new(self.parts[0].tokens.name()), &config.data)?;
        let MaskedTokens {
            tokenizer,
            decoder_ends: [bos, eos],
        } = tokens;
        let seq_len = config.data.seq_len;
        if config.data.dataset == DatasetKind::T5 {
            let decoder_seq_len = config.data.decoder_seq_len;
            let mut t5 = T5DatasetConfig::new(seq_len, decoder_seq_len, tokenizer.clone(), cache);
            if let Some(bos) = bos {
                t5 = t5.with_bos(bos);
            }
            if let Some(eos) = eos {
                t5 = t5.with_eos(eos);
            }
            return self.masked_of(config, t5, num_samples);
        }
        let bert = BertDatasetConfig::new(seq_len, tokenizer.clone(), cache)
            .with_classification_head(config.model.template().binary_head);
        self.masked_of(config, bert, num_samples)
    }

    /// As [`masked`](Self::masked), of a kind of samples.
    fn masked_of<K>(
        &self,
        config: &TrainConfig,
        masked: MaskedDatasetConfig<K>,
        num_samples: Option<u64>,
    ) -> Result<Arc<dyn Samples>, TrainError>
    where
        K: MaskedKind<Dataset: Samples + 'static>,
        BlendedDataset<K::Dataset>: Samples + 'static,
    {
        let documents = self.parts.iter().map(|part| {
            let name = || part.tokens.name().into();
            let documents = part.documents.clone();
            documents.ok_or_else(|| DataError::NoSentences { name: name() })
        });
        let documents: Vec<DocumentRange> = documents.collect::<Result<_, _>>()?;
        let masked = masked
            .with_seed(config.run.seed)
            .with_short_sequence_probability(config.data.short_sequence_probability)
            .with_masking(config.data.masking().of_data());
        let masked = match num_samples {
            Some(num_samples) => masked.with_num_samples(num_samples),
            None => masked,
        };
        // `epochs` is refused with these data sets, so no sizes are needed.
        let weights = self.weights(&vec![0; documents.len()]);
        if let ([only], None) = (documents.as_slice(), &weights) {
            return Ok(Arc::new(masked.build(only, report)?));
        }
        let mut blend = BlendedDatasetConfig::new(masked);
        if let Some(weights) = weights {
            blend = blend.with_weights(weights);
        }
        let blend = blend.build(&documents, report)?;
        if let Some(needed) = num_samples {
            check_enough(config, Samples::num_samples(&blend), needed)?;
        }
        Ok(Arc::new(blend))
    }
}
