use std::sync::Arc;

use megaburn_mesh::{PositionRng, Purpose};
use xxhash_rust::xxh3::Xxh3;

use super::{decisions::KeyedDecisions, transform::Transform};
use crate::{
    error::DataError,
    samples::{Sample, Samples},
    tokenizer::Tokenizer,
};

/// Samples whose documents are transformed for fill-in-the-middle
/// ([`FimConfig`](crate::FimConfig)).
///
/// A sample is a pure function of the sample below, the seed and its index. Transformed documents
/// are longer; a sample keeps its length, and what no longer fits is cut off at its end.
#[derive(Debug)]
pub struct FimSamples {
    samples: Arc<dyn Samples>,
    tokenizer: Arc<dyn Tokenizer>,
    transform: Transform,
    seq_len: usize,
    rng: PositionRng,
}

impl FimSamples {
    pub(super) fn new(
        samples: Arc<dyn Samples>,
        tokenizer: Arc<dyn Tokenizer>,
        transform: Transform,
        seq_len: usize,
        seed: u64,
    ) -> Self {
        Self {
            samples,
            tokenizer,
            transform,
            seq_len,
            rng: PositionRng::new(seed, Purpose::DataOrder, "fim"),
        }
    }
}

impl Samples for FimSamples {
    fn num_samples(&self) -> u64 {
        self.samples.num_samples()
    }

    /// The order depends on all settings, the ids of the tokens and the tokenizer.
    fn order_hash(&self) -> u64 {
        let of = &self.transform;
        let mut hash = Xxh3::new();
        let mut add = |value: u64| hash.update(&value.to_le_bytes());
        add(self.samples.order_hash());
        add(self.tokenizer.hash());
        for rate in [of.rate, of.spm_rate, of.fragment_rate] {
            add(rate.to_bits());
        }
        for id in [
            of.sentinels.prefix,
            of.sentinels.middle,
            of.sentinels.suffix,
        ] {
            add(id.into());
        }
        add(of.split_token.map_or(u64::MAX, u64::from));
        add(of.no_prefix.is_some().into());
        hash.update(of.no_prefix.as_deref().unwrap_or_default().as_bytes());
        hash.digest()
    }

    fn sample(&self, index: u64) -> Result<Sample, DataError> {
        let mut decisions = KeyedDecisions::new(self.rng.with_stream(index));
        let mut transformed = |tokens: &[u32]| {
            let tokenizer = self.tokenizer.as_ref();
            self.transform.documents(tokens, tokenizer, &mut decisions)
        };
        match self.samples.sample(index)? {
            Sample::Tokens(tokens) => {
                let mut tokens = transformed(&tokens)?;
                tokens.truncate(self.seq_len + 1);
                Ok(Sample::Tokens(tokens))
            }
            Sample::Documents(documents) => {
                let mut room = self.seq_len;
                let mut fitting = Vec::with_capacity(documents.len());
                for document in documents {
                    if room == 0 {
                        break;
                    }
                    // A document has one token more than inputs.
                    let mut document = transformed(&document)?;
                    document.truncate(room + 1);
                    room -= document.len().saturating_sub(1);
                    fitting.push(document);
                }
                Ok(Sample::Documents(fitting))
            }
            // Masked sentences have no middle to move.
            masked @ (Sample::Bert(_) | Sample::T5(_)) => Ok(masked),
        }
    }
}
