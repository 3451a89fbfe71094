//! Documents of sentences of random words, for models with an encoder.

use std::{
    fmt::Write,
    fs,
    path::{Path, PathBuf},
};

use megaburn::{
    data::{HfTokenizer, PreprocessConfig},
    mesh::{PositionRng, Purpose},
};

const WORDS: u64 = 200;
/// Number of sentinels of T5.
const SENTINELS: u64 = 20;
const DOCUMENTS: u64 = 60;

/// A data set of sentences.
pub(crate) struct Sentences {
    /// The prefix of its files.
    pub(crate) prefix: PathBuf,
    /// The vocabulary of its WordPiece tokenizer.
    pub(crate) vocabulary: PathBuf,
    /// A folder for the index of its samples.
    pub(crate) cache: PathBuf,
}

impl Sentences {
    /// Writes documents of 2 to 9 sentences of 3 to 12 words into `folder`.
    pub(crate) fn write(folder: &Path, seed: u64) -> Result<Self, String> {
        let found = Self {
            prefix: folder.join("sentences"),
            vocabulary: folder.join("vocab.txt"),
            cache: folder.join("cache"),
        };
        let mut vocabulary = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n[BOS]\n[EOS]\n".to_string();
        let sentinels = (0..SENTINELS).map(|index| format!("<extra_id_{index}>\n"));
        vocabulary.extend(sentinels);
        vocabulary.extend((0..WORDS).map(|word| format!("w{word}\n")));
        let texts = (0..DOCUMENTS).map(|number| {
            text(&PositionRng::new(
                seed,
                Purpose::Sampling,
                &number.to_string(),
            ))
        });
        let file = folder.join("sentences.jsonl");
        let failed = |error: std::io::Error| error.to_string();
        fs::write(&found.vocabulary, vocabulary).map_err(failed)?;
        fs::write(&file, texts.collect::<String>()).map_err(failed)?;
        let tokenizer = HfTokenizer::open(&found.vocabulary).map_err(|error| error.to_string())?;
        PreprocessConfig::new(vec![file], found.prefix.clone())
            .with_split_sentences(true)
            .run(&tokenizer, |_| ())
            .map_err(|error| error.to_string())?;
        Ok(found)
    }
}

/// A line of JSON with a document.
fn text(rng: &PositionRng) -> String {
    let mut at = 0;
    let mut drawn = |below| {
        at += 1;
        rng.below(at, below)
    };
    let mut text = String::new();
    for _ in 0..2 + drawn(8) {
        let _ = write!(text, "W{}", drawn(WORDS));
        for _ in 0..2 + drawn(10) {
            let _ = write!(text, " w{}", drawn(WORDS));
        }
        text.push_str(". ");
    }
    format!("{{\"text\": \"{text}\"}}\n")
}
