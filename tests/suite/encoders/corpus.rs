//! Random documents of sentences, encoded with WordPiece.

use std::{fs, path::PathBuf};

use megaburn::{
    data::{HfTokenizer, PreprocessConfig},
    mesh::{PositionRng, Purpose},
    train::{ConfigLayers, TrainConfig},
};
use tempfile::TempDir;

use megaburn_test_support::layout_grid::EPSILON;

/// The words of the documents, of which some have two pieces.
const WORDS: [&str; 20] = [
    "river", "rivers", "goes", "where", "it", "rain", "rains", "hill", "hills", "the", "a",
    "cloud", "clouds", "falls", "on", "and", "stone", "stones", "then", "stays",
];

/// Sentences in which each word follows from its neighbours.
const KNOWN: [&str; 4] = [
    "the river goes where it goes",
    "rain falls on a hill",
    "clouds and stones then goes",
    "a stone stays where rain falls",
];

/// The tokens of the vocabulary besides the special ones.
const PIECES: &str = "river\ngoes\nwhere\nit\nrain\nhill\nthe\na\ncloud\nfalls\non\nand\nstone\nthen\n\
    stays\n##s\n.\n";

/// The tokens that T5 needs besides.
const OF_T5: &str = "[BOS]\n[EOS]\n<extra_id_0>\n<extra_id_1>\n<extra_id_2>\n<extra_id_3>\n";

/// The sizes of a small BERT.
const BERT: [&str; 4] = [
    "model.family=bert",
    "model.layers=2",
    "data.seq_len=24",
    "optimizer.lr=1e-3",
];

/// The sizes of a small T5.
const T5: [&str; 6] = [
    "model.family=t5",
    "model.layers=4",
    "model.encoder_layers=2",
    "data.seq_len=24",
    "data.decoder_seq_len=12",
    "optimizer.lr=1e-3",
];

/// A data set of sentences in a temporary folder, with the model that reads it.
#[derive(Debug)]
pub(crate) struct Sentences {
    dir: TempDir,
    model: &'static [&'static str],
}

impl Sentences {
    /// `num` documents of 2 to 9 sentences of 2 to 8 random words, drawn from `seed`.
    pub(crate) fn new(num: u64, seed: u64) -> Self {
        Self::of(num, seed, |rng, first| {
            let words = (1..=2 + rng.below(first, 7)).map(|at| {
                let word = rng.below(first + at, WORDS.len() as u64);
                WORDS[word as usize]
            });
            words.collect::<Vec<_>>().join(" ")
        })
    }

    /// `num` documents of sentences that are drawn from [`KNOWN`], so that words follow from their
    /// neighbours.
    pub(crate) fn known(num: u64, seed: u64) -> Self {
        Self::of(num, seed, |rng, first| {
            KNOWN[rng.below(first, KNOWN.len() as u64) as usize].into()
        })
    }

    /// `num` documents of 2 to 9 sentences, whose words `sentence` draws from a generator, from a number
    /// on.
    fn of(num: u64, seed: u64, sentence: impl Fn(&PositionRng, u64) -> String) -> Self {
        let sentences = Self {
            dir: tempfile::tempdir().unwrap(),
            model: &BERT,
        };
        let vocab = format!("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n{PIECES}{OF_T5}");
        fs::write(sentences.path("vocab.txt"), vocab).unwrap();
        let document = |number: u64| {
            let rng = PositionRng::new(seed, Purpose::Sampling, "sentences").with_stream(number);
            let spelled = |index: u64| {
                let words = sentence(&rng, 100 * (index + 1));
                let (head, rest) = words.split_at(1);
                format!("{}{rest}.", head.to_uppercase())
            };
            let text: Vec<String> = (0..2 + rng.below(0, 8)).map(spelled).collect();
            format!("{{\"text\": \"{}\"}}\n", text.join(" "))
        };
        let text: String = (0..num).map(document).collect();
        fs::write(sentences.path("text.jsonl"), text).unwrap();
        let tokenizer = HfTokenizer::open(sentences.path("vocab.txt")).unwrap();
        PreprocessConfig::new(vec![sentences.path("text.jsonl")], sentences.path("text"))
            .with_split_sentences(true)
            .run(&tokenizer, |_| ())
            .unwrap();
        sentences
    }

    /// The same data set for a small T5.
    pub(crate) fn for_t5(self) -> Self {
        Self { model: &T5, ..self }
    }

    /// The path of a file of the folder: `text.jsonl`, `vocab.txt`, or another one.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// `KEY=VALUE` settings of a small model on this data set.
    pub(crate) fn settings(&self) -> Vec<String> {
        let path = |name: &str| self.path(name).display().to_string();
        let own = [
            format!("run.dir={}", path("run")),
            format!("data.path={}", path("text")),
            format!("data.tokenizer={}", path("vocab.txt")),
            format!("data.cache_dir={}", path("cache")),
            format!("optimizer.eps={EPSILON}"),
        ];
        let sizes = [
            "model.hidden=16",
            "model.ffn=24",
            "model.heads=4",
            "data.validation_fraction=0",
            "train.steps=3",
            "optimizer.warmup_steps=0",
        ];
        let all = self.model.iter().chain(&sizes);
        own.into_iter()
            .chain(all.map(|set| (*set).into()))
            .collect()
    }

    /// The configuration of a run with further settings.
    pub(crate) fn config(&self, sets: &[&str]) -> TrainConfig {
        let own = self.settings();
        let all = own.iter().map(String::as_str).chain(sets.iter().copied());
        all.fold(ConfigLayers::new(), |layers, set| {
            layers.with_set(set).unwrap()
        })
        .load()
        .unwrap()
    }
}
