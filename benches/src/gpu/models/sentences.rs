//! Documents of sentences of random words, for models with an encoder.

use std::{
    fmt::Write,
    fs,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use megaburn::{
    data::{HfTokenizer, PreprocessConfig},
    mesh::{PositionRng, Purpose},
};

use crate::Failure;

/// The special tokens of BERT, and those of T5 besides its sentinels.
const SPECIAL: &str = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n[BOS]\n[EOS]\n";
/// Number of sentinels of T5.
const SENTINELS: u64 = 100;
/// Number of words, with which the vocabulary has as many tokens as BERT's.
const WORDS: u64 = 30_522 - 7 - SENTINELS;
const DOCUMENTS: u64 = 1000;
/// Enough for several rows of 512 tokens.
const SENTENCES: u64 = 100;
const MAX_WORDS: u64 = 40;

/// A data set of sentences, which is written when it is first asked for.
pub(super) struct Sentences {
    folder: PathBuf,
    written: OnceLock<()>,
}

impl Sentences {
    pub(super) fn new(folder: &Path) -> Self {
        Self {
            folder: folder.to_path_buf(),
            written: OnceLock::new(),
        }
    }

    /// The prefix of the data set's files.
    pub(super) fn prefix(&self) -> PathBuf {
        self.folder.join("sentences")
    }

    /// `KEY=VALUE` settings of a run that reads the data set.
    pub(super) fn settings(&self) -> Result<[String; 3], Failure> {
        if self.written.get().is_none() {
            self.write()?;
            self.written.get_or_init(|| ());
        }
        let path = |name: &str| self.folder.join(name).display().to_string();
        Ok([
            format!("data.tokenizer={}", path("vocab.txt")),
            format!("data.cache_dir={}", path("cache")),
            "data.validation_fraction=0".to_string(),
        ])
    }

    fn write(&self) -> Result<(), Failure> {
        let mut vocab = SPECIAL.to_string();
        for sentinel in 0..SENTINELS {
            writeln!(vocab, "<extra_id_{sentinel}>")?;
        }
        for word in 0..WORDS {
            writeln!(vocab, "w{word}")?;
        }
        let vocab_file = self.folder.join("vocab.txt");
        fs::write(&vocab_file, vocab)?;
        let rng = PositionRng::new(1, Purpose::Sampling, "sentences");
        let mut text = String::new();
        let mut at = 0;
        let mut drawn = |below| {
            at += 1;
            rng.below(at, below)
        };
        for _ in 0..DOCUMENTS {
            text.push_str("{\"text\": \"");
            for _ in 0..SENTENCES {
                write!(text, "W{}", drawn(WORDS))?;
                for _ in 0..5 + drawn(MAX_WORDS - 5) {
                    write!(text, " w{}", drawn(WORDS))?;
                }
                text.push_str(". ");
            }
            text.push_str("\"}\n");
        }
        let text_file = self.folder.join("sentences.jsonl");
        fs::write(&text_file, text)?;
        let tokenizer = HfTokenizer::open(&vocab_file)?;
        PreprocessConfig::new(vec![text_file], self.prefix())
            .with_split_sentences(true)
            .run(&tokenizer, |_| ())?;
        Ok(())
    }
}
