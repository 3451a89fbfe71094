use std::fmt;

use megaburn_mesh::{PositionRng, Purpose};
use xxhash_rust::xxh3::xxh3_64;

use super::{
    mock::{MockContent, MockTokens},
    tokens::GeneratedTokens,
};
use crate::{
    dataset::TokenDataset,
    error::DataError,
    synthetic::{NUM_SYMBOLS, Synthetic, SyntheticKind},
    tokenizer::Tokenizer,
};

/// Tokens from the beginning of one part to that of the next.
const PART: u64 = 1 << 60;
/// Number of tokens if none is given.
const NUM_TOKENS: u64 = 100_000_000;
/// The distance of an echo if none is given.
const DISTANCE: u64 = 7;

/// Data that is generated when it is read, which a path names in place of a file:
///
/// | path | tokens | options |
/// |---|---|---|
/// | `mock:ascending` | the documents of Megatron-LM's `--mock-data` | `tokens` |
/// | `mock:random` | documents of these lengths with random tokens | `tokens`, `seed` |
/// | `synthetic:markov` | [`SyntheticKind::Markov`] | `tokens`, `seed` |
/// | `synthetic:echo` | [`SyntheticKind::Echo`] | `tokens`, `seed`, `distance` |
///
/// Options follow a question mark, and an ampersand separates them. Defaults: 100,000,000 tokens,
/// the seed 0, the distance 7.
///
/// ```
/// use megaburn_data::{ByteTokenizer, GeneratedPart, GeneratedSource};
///
/// let source = GeneratedSource::parse("synthetic:echo?distance=5&tokens=1000000").unwrap()?;
/// let train = source.dataset(GeneratedPart::Train, &ByteTokenizer)?;
/// assert_eq!(train.num_samples(128), 7812);
/// let floor = source.loss_floor(128).unwrap();
/// assert!((floor - 0.8367).abs() < 1e-4);
/// assert!(GeneratedSource::parse("corpus.jsonl").is_none());
/// # Ok::<(), megaburn_data::DataError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct GeneratedSource {
    name: String,
    kind: Kind,
    num_tokens: u64,
}

/// A part of generated data. Different parts have different tokens of the same kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GeneratedPart {
    /// For training.
    Train,
    /// For evaluation during training.
    Valid,
    /// For evaluation at the end.
    Test,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Ascending,
    Random { seed: u64 },
    Synthetic(Synthetic),
}

impl GeneratedSource {
    /// The data that `path` names; `None` if it is the path of a file. A file whose name begins
    /// with `mock:` or `synthetic:` is given as `./mock:..`.
    ///
    /// # Errors
    /// There is no such data, or it does not have such an option.
    pub fn parse(path: &str) -> Option<Result<Self, DataError>> {
        let (scheme, _) = path.split_once(':')?;
        matches!(scheme, "mock" | "synthetic").then(|| {
            Self::parsed(path).map_err(|why| DataError::Generated {
                path: path.into(),
                why,
            })
        })
    }

    fn parsed(path: &str) -> Result<Self, String> {
        let (base, query) = path.split_once('?').unwrap_or((path, ""));
        let mut options = Options::parse(query)?;
        let num_tokens = options.take("tokens", 1..=PART)?.unwrap_or(NUM_TOKENS);
        let mut seed = || Ok::<_, String>(options.take("seed", 0..=u64::MAX)?.unwrap_or(0));
        let synthetic = |kind, seed| {
            let law = Synthetic::new(kind, seed).map_err(|error| error.to_string())?;
            Ok::<_, String>(Kind::Synthetic(law))
        };
        let (kind, settings) = match base {
            "mock:ascending" => (Kind::Ascending, String::new()),
            "mock:random" => {
                let seed = seed()?;
                (Kind::Random { seed }, format!("&seed={seed}"))
            }
            "synthetic:markov" => {
                let seed = seed()?;
                (
                    synthetic(SyntheticKind::Markov, seed)?,
                    format!("&seed={seed}"),
                )
            }
            "synthetic:echo" => {
                let seed = seed()?;
                let distance = options.take("distance", 1..=PART)?.unwrap_or(DISTANCE);
                let kind = SyntheticKind::Echo {
                    distance: distance as usize,
                };
                (
                    synthetic(kind, seed)?,
                    format!("&seed={seed}&distance={distance}"),
                )
            }
            _ => return Err(format!("there is no `{base}`")),
        };
        options.finish(base)?;
        Ok(Self {
            name: format!("{base}?tokens={num_tokens}{settings}"),
            kind,
            num_tokens,
        })
    }

    /// The tokens of a part. Those of mock documents are of the tokenizer's vocabulary; synthetic
    /// ones are 0 to 63.
    ///
    /// # Errors
    /// The vocabulary is too small.
    pub fn dataset(
        &self,
        part: GeneratedPart,
        tokenizer: &dyn Tokenizer,
    ) -> Result<TokenDataset, DataError> {
        let num_ids = tokenizer.vocab_size();
        let needed = match self.kind {
            Kind::Synthetic(_) => NUM_SYMBOLS,
            Kind::Ascending | Kind::Random { .. } => 2,
        };
        if num_ids < needed {
            return Err(DataError::Generated {
                path: self.name.clone(),
                why: format!("its tokens need {needed} ids, but the tokenizer has {num_ids}"),
            });
        }
        let mock = |content| {
            let mock = MockTokens::new(content, num_ids, tokenizer.eos());
            (GeneratedTokens::Mock(mock), num_ids)
        };
        let (tokens, vocab_size) = match self.kind {
            Kind::Ascending => mock(MockContent::Ascending),
            Kind::Random { seed } => {
                let rng = PositionRng::new(seed, Purpose::Sampling, "mock.random");
                mock(MockContent::Random(rng))
            }
            Kind::Synthetic(law) => (GeneratedTokens::Synthetic(law), NUM_SYMBOLS),
        };
        let start = match part {
            GeneratedPart::Train => 0,
            GeneratedPart::Valid => PART,
            GeneratedPart::Test => 2 * PART,
        };
        let range = start..start + self.num_tokens;
        let set = TokenDataset::generated(&self.name, tokens, range, vocab_size);
        Ok(set.with_source_hash(self.hash()))
    }

    /// The path with all options.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Number of tokens of each part.
    pub fn num_tokens(&self) -> u64 {
        self.num_tokens
    }

    /// The lowest mean loss, in nats per token, that a model can reach on new samples of `seq_len`
    /// ([`Synthetic::floor`]); `None` for mock documents. Samples that are read again can be
    /// learned by heart.
    pub fn loss_floor(&self, seq_len: usize) -> Option<f64> {
        match self.kind {
            Kind::Synthetic(law) => Some(law.floor(seq_len)),
            Kind::Ascending | Kind::Random { .. } => None,
        }
    }

    /// A hash that differs between data with other tokens from the same tokenizer.
    pub fn hash(&self) -> u64 {
        xxh3_64(self.name.as_bytes())
    }
}

impl fmt::Display for GeneratedSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: generated, xxh3 {:016x}", self.name, self.hash())
    }
}

/// Options of a path that are not read yet.
struct Options<'a>(Vec<(&'a str, &'a str)>);

impl<'a> Options<'a> {
    fn parse(query: &'a str) -> Result<Self, String> {
        let mut options: Vec<(&str, &str)> = Vec::new();
        for option in query.split('&').filter(|option| !option.is_empty()) {
            let Some((key, value)) = option.split_once('=') else {
                return Err(format!("`{option}` is no option like tokens=1000"));
            };
            if options.iter().any(|(other, _)| *other == key) {
                return Err(format!("`{key}` is given twice"));
            }
            options.push((key, value));
        }
        Ok(Self(options))
    }

    fn take(
        &mut self,
        key: &str,
        range: std::ops::RangeInclusive<u64>,
    ) -> Result<Option<u64>, String> {
        let Some(at) = self.0.iter().position(|(other, _)| *other == key) else {
            return Ok(None);
        };
        let (_, value) = self.0.remove(at);
        let number = value.parse().ok().filter(|number| range.contains(number));
        let (least, most) = (range.start(), range.end());
        let bad = || format!("{key} is `{value}`, but must be a number from {least} to {most}");
        number.map(Some).ok_or_else(bad)
    }

    fn finish(&self, base: &str) -> Result<(), String> {
        match self.0.first() {
            Some((key, _)) => Err(format!("{base} has no option `{key}`")),
            None => Ok(()),
        }
    }
}
