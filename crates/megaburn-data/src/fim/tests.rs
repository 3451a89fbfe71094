//! Comparison with Megatron-LM, and that nothing is lost.

use std::{cmp::Ordering, sync::Arc};

use proptest::prelude::*;
use rstest::rstest;
use serde_json::Value;

use super::{
    FimConfig, FimSamples,
    decisions::{Decisions, KeyedDecisions},
    sentinels::Sentinels,
    transform::Transform,
};
use crate::{
    corpus::Corpus,
    error::DataError,
    samples::{Sample, Samples},
    tokenizer::{ByteTokenizer, HfTokenizer, Tokenizer, TokenizerTrainer},
};
use megaburn_mesh::{PositionRng, Purpose};

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures");
/// Ids that no tokenizer of the tests has.
const SENTINELS: Sentinels = Sentinels {
    prefix: 9001,
    middle: 9002,
    suffix: 9003,
};

fn tokenizer(name: &str) -> HfTokenizer {
    HfTokenizer::open(format!("{FIXTURES}/tokenizers/{name}")).unwrap()
}

fn transform(rate: f64, spm_rate: f64) -> Transform {
    Transform {
        sentinels: SENTINELS,
        rate,
        spm_rate,
        split_token: None,
        fragment_rate: rate,
        no_prefix: None,
    }
}

/// Decisions that Megatron-LM made.
struct Recorded(std::vec::IntoIter<Value>);

impl Decisions for Recorded {
    fn happens(&mut self, rate: f64) -> bool {
        let decision = self.0.next().unwrap();
        assert_eq!(decision["rate"], rate);
        decision["happens"].as_bool().unwrap()
    }

    fn boundaries(&mut self, len: usize) -> [usize; 2] {
        let decision = self.0.next().unwrap();
        assert_eq!(decision["len"], len);
        serde_json::from_value(decision["boundaries"].clone()).unwrap()
    }
}

#[test]
fn documents_are_transformed_as_by_megatron() {
    let fixture = std::fs::read(format!("{FIXTURES}/megatron-fim.json")).unwrap();
    let fixture: Value = serde_json::from_slice(&fixture).unwrap();
    let settings = &fixture["settings"];
    let rate = |name: &str| settings[name].as_f64().unwrap();
    let id = |value: &Value| value.as_u64().map(|id| id as u32);
    let tokens = |value: &Value| serde_json::from_value::<Vec<u32>>(value.clone()).unwrap();
    let (mut num_changed, mut num_split, mut num_excluded) = (0, 0, 0);
    let cases = fixture["cases"].as_array().unwrap();
    for case in cases {
        let tokenizer = tokenizer(case["tokenizer"].as_str().unwrap());
        let transform = Transform {
            sentinels: Sentinels {
                prefix: id(&settings["prefix"]).unwrap(),
                middle: id(&settings["middle"]).unwrap(),
                suffix: id(&settings["suffix"]).unwrap(),
            },
            rate: rate("rate"),
            spm_rate: rate("spm_rate"),
            split_token: id(&case["split_token"]),
            fragment_rate: rate("fragment_rate"),
            no_prefix: case["no_prefix"].as_str().map(String::from),
        };
        let sample = tokens(&case["sample"]);
        let mut decisions = Recorded(case["decisions"].as_array().unwrap().clone().into_iter());
        let mut ids = transform
            .documents(&sample, &tokenizer, &mut decisions)
            .unwrap();
        ids.truncate(sample.len());
        assert_eq!(ids, tokens(&case["expected"]), "{case}");
        assert_eq!(decisions.0.len(), 0, "{case}");
        num_changed += usize::from(ids != sample);
        num_split += usize::from(transform.split_token.is_some_and(|id| ids.contains(&id)));
        num_excluded += usize::from(transform.no_prefix.is_some());
    }
    assert!(num_changed > 40 && num_split > 10 && num_excluded > 20);
}

/// The texts of the documents between eos tokens, each in its first order. Where the suffix is
/// first, prefix and middle follow its end together.
fn undone(ids: &[u32], tokenizer: &dyn Tokenizer) -> Vec<String> {
    let text = |ids: &[u32]| tokenizer.decode(ids);
    let undo = |document: &[u32]| {
        if document.first() != Some(&SENTINELS.prefix) {
            return text(document);
        }
        let place = |id| document.iter().position(|token| *token == id).unwrap();
        let (suffix, middle) = (place(SENTINELS.suffix), place(SENTINELS.middle));
        let before = text(&document[1..suffix]);
        before + &text(&document[middle + 1..]) + &text(&document[suffix + 1..middle])
    };
    ids.split(|id| *id == tokenizer.eos()).map(undo).collect()
}

fn keyed(seed: u64, index: u64) -> KeyedDecisions {
    KeyedDecisions::new(PositionRng::new(seed, Purpose::DataOrder, "fim").with_stream(index))
}

/// Text of several scripts, with every kind of space and characters of one to four bytes.
fn text() -> impl Strategy<Value = String> {
    "[ a-z\n\t{}();#é€漢字\u{301}\u{FFFD}😀🇩🇪]{0,40}"
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn no_text_is_lost(
        documents in prop::collection::vec(text(), 1..4),
        cut in prop::collection::vec(0usize..4, 2),
        seed: u64,
        spm_rate in prop::sample::select(vec![0.0, 0.5, 1.0]),
        name in prop::sample::select(vec!["byte", "byte-level", "llama3", "llama2", "mistral"]),
    ) {
        let tokenizer: Box<dyn Tokenizer> = match name {
            "byte" => Box::new(ByteTokenizer),
            name => Box::new(tokenizer(name)),
        };
        let encode = |text: &String| tokenizer.encode(text).unwrap();
        let mut documents: Vec<_> = documents.iter().map(encode).collect();
        // A sample begins and ends anywhere, also inside a character. Next to a cut one,
        // SentencePiece decodes whole ones as U+FFFD too, and only without transformation.
        if !["llama2", "mistral"].contains(&name) {
            let num = documents[0].len();
            documents[0].drain(..cut[0].min(num));
            let last = documents.last_mut().unwrap();
            last.truncate(last.len().saturating_sub(cut[1]));
        }
        let tokens = documents.join(&tokenizer.eos());
        let transform = transform(1.0, spm_rate);
        let ids = transform.documents(&tokens, tokenizer.as_ref(), &mut keyed(seed, 0)).unwrap();
        let texts: Vec<String> =
            documents.iter().map(|document| tokenizer.decode(document)).collect();
        prop_assert_eq!(undone(&ids, tokenizer.as_ref()), &texts[..]);
        // A text may stay as it is if it is U+FFFD after a token that is no text, or if the
        // vocabulary has none of its characters.
        let num_sentinels = ids.iter().filter(|id| **id == SENTINELS.middle).count();
        let num_texts = documents.iter().filter(|document| !document.is_empty()).count();
        let may_stay = texts.concat().contains('\u{FFFD}') || name == "mistral";
        prop_assert!(num_sentinels == num_texts || may_stay, "{} of {}", num_sentinels, num_texts);
    }

    /// Bytes of which most are no text, cut anywhere, with special tokens among them.
    #[test]
    fn no_byte_of_a_cut_character_is_lost(
        text in "[a-z é漢😀]{3,30}",
        cut in 0usize..8,
        stray in prop::collection::vec((any::<prop::sample::Index>(), 0x80u32..259), 0..3),
        seed: u64,
        spm_rate in prop::sample::select(vec![0.0, 1.0]),
    ) {
        let mut tokens = ByteTokenizer.encode(&text).unwrap();
        for (at, token) in stray {
            if token != ByteTokenizer::EOS {
                tokens.insert(at.index(tokens.len()), token);
            }
        }
        let tokens = &tokens[cut.min(3)..];
        let tokens = &tokens[..tokens.len().saturating_sub(cut / 3)];
        let transform = transform(1.0, spm_rate);
        let ids = transform.documents(tokens, &ByteTokenizer, &mut keyed(seed, 3)).unwrap();
        if ids.first() == Some(&SENTINELS.prefix) {
            let place = |id| ids.iter().position(|token| *token == id).unwrap();
            let (suffix, middle) = (place(SENTINELS.suffix), place(SENTINELS.middle));
            let parts = [&ids[1..suffix], &ids[middle + 1..], &ids[suffix + 1..middle]];
            prop_assert_eq!(parts.concat(), tokens);
        } else {
            prop_assert_eq!(ids, tokens);
        }
    }
}

/// Samples of given tokens or documents.
#[derive(Debug)]
struct Given(Vec<Sample>);

impl Samples for Given {
    fn num_samples(&self) -> u64 {
        self.0.len() as u64
    }

    fn sample(&self, index: u64) -> Result<Sample, DataError> {
        Ok(self.0[(index % self.num_samples()) as usize].clone())
    }
}

fn code_tokenizer() -> Arc<dyn Tokenizer> {
    let text = "let größe = a + b;\n".repeat(9);
    let corpus = Corpus::from_documents("code", vec![text]).unwrap();
    let special = ["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<file>"];
    let trainer = TokenizerTrainer::new(280).with_special_tokens(special.map(String::from));
    Arc::new(trainer.train(&corpus).unwrap().into_tokenizer())
}

fn build(config: &FimConfig, samples: Vec<Sample>, seq_len: usize, seed: u64) -> FimSamples {
    config
        .build(Arc::new(Given(samples)), code_tokenizer(), seq_len, seed)
        .unwrap()
}

#[rstest]
fn a_sample_depends_on_seed_and_index_only(#[values(31, 64)] seq_len: usize) {
    let tokenizer = code_tokenizer();
    let mut tokens = tokenizer.encode(&"let b = 1;\n".repeat(40)).unwrap();
    tokens.truncate(seq_len + 1);
    let samples = vec![Sample::Tokens(tokens.clone()); 3];
    let read = |seed, indices: &[u64]| -> Vec<Vec<u32>> {
        let fim = build(&FimConfig::new(0.9), samples.clone(), seq_len, seed);
        indices.iter().map(|at| fim.tokens(*at).unwrap()).collect()
    };
    let forward = read(5, &[0, 1, 2, 3, 4, 5]);
    let mut backward = read(5, &[5, 4, 3, 2, 1, 0]);
    backward.reverse();
    assert_eq!(forward, backward);
    // Sample 3 is sample 0 in the next epoch.
    assert_ne!(forward[0], forward[3]);
    assert_ne!(forward, read(6, &[0, 1, 2, 3, 4, 5]));
    assert!(forward.iter().all(|sample| sample.len() == seq_len + 1));
}

#[test]
fn transformed_documents_fit_into_a_sample() {
    let tokenizer = code_tokenizer();
    let document = |text: &str| tokenizer.encode(text).unwrap();
    let documents = vec![
        document("let a = b;\n"),
        document("ab"),
        document("let größe"),
    ];
    let num_inputs = |documents: &[Vec<u32>]| -> usize {
        documents.iter().map(|document| document.len() - 1).sum()
    };
    let seq_len = num_inputs(&documents) + 7;
    let sample = vec![Sample::Documents(documents.clone())];
    let fim = build(&FimConfig::new(1.0), sample.clone(), seq_len, 3);
    let Sample::Documents(cut) = fim.sample(0).unwrap() else {
        panic!("documents stay documents");
    };
    assert_eq!(num_inputs(&cut), seq_len);
    assert_eq!(cut.len(), 3);
    let whole = build(&FimConfig::new(1.0), sample.clone(), 1000, 3);
    let Sample::Documents(whole) = whole.sample(0).unwrap() else {
        panic!("documents stay documents");
    };
    assert_eq!(cut[..2], whole[..2]);
    assert!(whole[2].starts_with(&cut[2]) && whole[2].len() > cut[2].len());
    let none = build(&FimConfig::new(0.0), sample.clone(), seq_len, 3);
    assert_eq!(none.sample(0).unwrap(), sample[0]);
}

#[test]
fn rates_are_frequencies() {
    let mut decisions = keyed(8, 1);
    let count = (0..20_000).filter(|_| decisions.happens(0.3)).count();
    assert!((5700..6300).contains(&count), "{count}");
    assert!((0..100).all(|_| decisions.happens(1.0) && !decisions.happens(0.0)));
    let mut seen = [[0; 4]; 4];
    for _ in 0..16_000 {
        let [first, second] = decisions.boundaries(3);
        seen[first][second] += 1;
    }
    // Of 16 equally likely pairs, those in descending order are turned around.
    for (first, second) in (0..4).flat_map(|first| (0..4).map(move |second| (first, second))) {
        let expected: i32 = match first.cmp(&second) {
            Ordering::Less => 2000,
            Ordering::Equal => 1000,
            Ordering::Greater => 0,
        };
        let count: i32 = seen[first][second];
        assert!((count - expected).abs() < 250, "{first} {second}: {count}");
    }
}

#[test]
fn each_setting_changes_the_hash_of_the_order() {
    let base = FimConfig::new(0.5);
    let configs = [
        base.clone(),
        FimConfig::new(0.25),
        base.clone().with_spm_rate(0.1),
        base.clone().with_split_sample("<file>"),
        base.clone()
            .with_split_sample("<file>")
            .with_fragment_rate(0.3),
        base.clone().with_no_prefix(""),
        base.clone().with_no_prefix("#!"),
        base.clone()
            .with_tokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ];
    let hash = |config: &FimConfig| build(config, Vec::new(), 8, 1).order_hash();
    let mut hashes: Vec<u64> = configs.iter().map(hash).collect();
    assert_eq!(hashes[0], hash(&base));
    hashes.sort_unstable();
    hashes.dedup();
    assert_eq!(hashes.len(), configs.len());
}

#[rstest]
#[case(FimConfig::new(1.5), "rate is 1.5; give a probability, from 0 to 1")]
#[case(FimConfig::new(0.5).with_spm_rate(f64::NAN), "spm_rate is NaN; give a probability")]
#[case(FimConfig::new(0.5).with_fragment_rate(0.5), "fragment_rate needs fragments; set split_sample")]
#[case(
    FimConfig::new(0.5).with_split_sample("<f>"),
    "the tokenizer has no token `<f>`; set split_sample to one of its vocabulary"
)]
#[case(
    FimConfig::new(0.5).with_split_sample("<file>").with_fragment_rate(-1.0),
    "fragment_rate is -1; give a probability"
)]
#[case(
    FimConfig::new(0.5).with_tokens("<file>", "<fim_middle>", "<file>"),
    "prefix and suffix are the same token, 6; name different ones"
)]
#[case(
    FimConfig::new(0.5).with_tokens("<file>", "<|end_of_text|>", "<fim_suffix>"),
    "middle and the end of documents are the same token, 1; name"
)]
#[case(
    FimConfig::new(0.5).with_split_sample("<|end_of_text|>"),
    "the end of documents and split_sample are the same token, 1; name"
)]
fn bad_settings_are_named(#[case] config: FimConfig, #[case] expected: &str) {
    let error = config
        .transform(code_tokenizer().as_ref())
        .unwrap_err()
        .to_string();
    let start = format!("fill-in-the-middle cannot be used: {expected}");
    assert!(error.starts_with(&start), "{error}");
}

#[test]
fn a_tokenizer_that_changes_text_is_refused() {
    let path = format!("{FIXTURES}/tokenizer-files/bert-uncased");
    let tokenizer = HfTokenizer::open(path).unwrap();
    let config = FimConfig::new(0.5).with_tokens("[CLS]", "[UNK]", "[PAD]");
    let error = config.transform(&tokenizer).unwrap_err().to_string();
    assert!(error.contains("the tokenizer changes texts: "), "{error}");
    let tokenizer = self::tokenizer("llama3");
    let config = FimConfig::new(0.5).with_tokens("a", "b", "c");
    config.transform(&tokenizer).unwrap();
}
