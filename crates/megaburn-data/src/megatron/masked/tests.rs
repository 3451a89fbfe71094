//! Tests on data sets and vocabularies that are made up here. `tests/megatron_masked.rs` compares
//! with Megatron-Core.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use rstest::rstest;
use tempfile::TempDir;

use super::*;
use crate::{
    error::DataError,
    index_cache::IndexEvent,
    indexed::IndexedDataset,
    megatron::documents::DocumentRange,
    preprocess::PreprocessConfig,
    tokenizer::{ByteTokenizer, HfTokenizer, Tokenizer},
};

const NUM_WORDS: u32 = 40;
const CLS: u32 = NUM_WORDS;
const SEP: u32 = NUM_WORDS + 1;
const MASK: u32 = NUM_WORDS + 2;
/// The first of the sentinels.
const SENTINEL: u32 = NUM_WORDS + 5;

/// A data set of documents with random words, and a tokenizer.
struct Case {
    dir: TempDir,
    source: DocumentRange,
    tokenizer: Arc<HfTokenizer>,
}

impl Case {
    /// Documents with these numbers of sentences, of up to `most` words each.
    fn new(num_sentences: &[usize], most: usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let words = (0..NUM_WORDS).map(|id| format!("w{id}"));
        let special = ["[CLS]", "[SEP]", "[MASK]", "[PAD]", "[UNK]"].map(String::from);
        let sentinels = (0..3).map(|number| format!("<extra_id_{number}>"));
        let vocab: Vec<String> = words.chain(special).chain(sentinels).collect();
        fs::write(dir.path().join("vocab.txt"), vocab.join("\n")).unwrap();
        let tokenizer = HfTokenizer::open(dir.path().join("vocab.txt")).unwrap();
        let sentence = || {
            let words = (0..fastrand::usize(1..=most)).map(|_| fastrand::u32(..NUM_WORDS));
            let words: Vec<String> = words.map(|id| format!("w{id}")).collect();
            words.join(" ")
        };
        let document = |count: &usize| {
            let sentences: Vec<String> = (0..*count).map(|_| sentence()).collect();
            serde_json::json!({ "text": sentences }).to_string()
        };
        let lines: Vec<String> = num_sentences.iter().map(document).collect();
        fs::write(dir.path().join("a.jsonl"), lines.join("\n")).unwrap();
        let input = dir.path().join("a.jsonl");
        let config = PreprocessConfig::new(vec![input], dir.path().join("a")).with_plain_text(true);
        config.run(&tokenizer, |_| ()).unwrap();
        let set = Arc::new(IndexedDataset::open(dir.path().join("a")).unwrap());
        let source = DocumentRange::all(set);
        Self {
            dir,
            source,
            tokenizer: Arc::new(tokenizer),
        }
    }

    fn cache(&self) -> PathBuf {
        self.dir.path().join("cache")
    }

    fn bert(&self, config: &BertDatasetConfig) -> Result<BertDataset, DataError> {
        config.build(&self.source, |_| ())
    }

    fn t5(&self, config: &T5DatasetConfig) -> Result<T5Dataset, DataError> {
        config.build(&self.source, |_| ())
    }
}

#[test]
fn a_sample_of_bert_gives_back_its_sentences() {
    let case = Case::new(&[9, 1, 4, 2, 13], 6);
    for seed in [fastrand::u64(..1 << 31), 3] {
        let config =
            BertDatasetConfig::new(70, case.tokenizer.clone(), case.cache()).with_seed(seed);
        let built = case.bert(&config.with_num_samples(40)).unwrap();
        let mut is_random = BTreeSet::new();
        let mut num_masked = 0;
        for index in 0..built.num_samples() {
            let sample = built.sample(index).unwrap();
            assert_eq!(sample, built.sample(index).unwrap());
            is_random.insert(sample.is_random);
            let last = sample.padding_mask.iter().rposition(|is_text| *is_text);
            let len = last.unwrap() + 1;
            // Only a random token can look like padding.
            let is_text = |at| sample.padding_mask[at] || sample.loss_mask[at];
            assert!((0..len).all(is_text));
            let mut text = Vec::new();
            for at in 0..len {
                let label = sample.labels[at];
                assert_eq!(
                    sample.loss_mask[at],
                    label != -1,
                    "a vocabulary whose pad is not 0"
                );
                text.push(match sample.loss_mask[at] {
                    true => label as u32,
                    false => sample.text[at],
                });
            }
            assert_eq!(text[0], CLS);
            assert_eq!(text[len - 1], SEP);
            let b = text.iter().position(|token| *token == SEP).unwrap() + 1;
            let types: Vec<u32> = (0..70).map(|at| u32::from(at >= b && at < len)).collect();
            assert_eq!(sample.types, types);
            let words = text.iter().filter(|token| **token < NUM_WORDS).count();
            assert_eq!(words, len - 3, "two segments");
            num_masked += sample.loss_mask.iter().filter(|masked| **masked).count();
            assert!(sample.text[len..].iter().all(|token| *token == 0));
            assert!(!sample.truncated || len <= 70);
        }
        assert_eq!(is_random.len(), 2, "both orders occur");
        assert!(
            num_masked > 40,
            "only {num_masked} tokens of all samples are masked"
        );
    }
}

#[test]
fn masked_tokens_are_replaced_in_their_proportions() {
    let case = Case::new(&[30; 12], 9);
    let config = BertDatasetConfig::new(200, case.tokenizer.clone(), case.cache())
        .with_seed(fastrand::u64(..1000));
    let config = config
        .with_masking(MaskingConfig::new(0.5))
        .with_num_samples(60);
    let built = case.bert(&config).unwrap();
    let (mut num_masked, mut num_replaced, mut num_same) = (0.0, 0.0, 0.0);
    for index in 0..built.num_samples() {
        let sample = built.sample(index).unwrap();
        for at in 0..200 {
            if sample.loss_mask[at] {
                num_masked += 1.0;
                num_replaced += f64::from(u8::from(sample.text[at] == MASK));
                num_same += f64::from(u8::from(i64::from(sample.text[at]) == sample.labels[at]));
            }
        }
    }
    assert!(num_masked > 2000.0);
    assert!(
        (num_replaced / num_masked - 0.8).abs() < 0.05,
        "{num_replaced} {num_masked}"
    );
    assert!(
        (num_same / num_masked - 0.1).abs() < 0.04,
        "{num_same} {num_masked}"
    );
}

#[test]
fn a_sample_of_t5_gives_back_its_sentences() {
    let case = Case::new(&[7, 1, 12], 5);
    let config = T5DatasetConfig::new(30, 40, case.tokenizer.clone(), case.cache())
        .with_seed(fastrand::u64(..1 << 31));
    let sentinels = (0..30).map(|id| format!("w{id}"));
    // Words as sentinels, so that there are always enough of them; spans are then found by number.
    let config = config.with_sentinels(sentinels).with_num_samples(50);
    let built = case.t5(&config).unwrap();
    for index in 0..built.num_samples() {
        let sample = built.sample(index).unwrap();
        let len = |mask: &[bool]| mask.iter().filter(|is_text| **is_text).count();
        let (num_encoded, num_decoded) = (len(&sample.enc_mask), len(&sample.dec_mask));
        assert_eq!(len(&sample.loss_mask), num_decoded);
        assert_eq!(sample.text_dec[0], CLS, "BERT's first token begins a text");
        assert_eq!(sample.labels[num_decoded - 1], i64::from(SEP));
        let shifted: Vec<i64> = sample.text_dec[1..num_decoded]
            .iter()
            .map(|token| i64::from(*token))
            .collect();
        assert_eq!(sample.labels[..num_decoded - 1], shifted);
        assert!(
            sample.labels[num_decoded..]
                .iter()
                .all(|label| *label == -1)
        );
        assert!(num_encoded <= 28 && sample.text_enc.len() == 30);
        assert!(
            sample.text_enc[num_encoded..]
                .iter()
                .all(|token| *token == 0)
        );
    }
}

#[test]
fn the_mapping_is_built_once_and_again_when_damaged() {
    let case = Case::new(&[5, 6], 4);
    let config =
        BertDatasetConfig::new(16, case.tokenizer.clone(), case.cache()).with_num_samples(20);
    let build = |config: &BertDatasetConfig| {
        let mut events = Vec::new();
        let built = config
            .build(&case.source, |event| events.push(event))
            .unwrap();
        let samples: Vec<_> = (0..built.num_samples())
            .map(|index| built.sample(index).unwrap())
            .collect();
        (samples, events)
    };
    let (expected, events) = build(&config);
    let is_mapping = |event: &IndexEvent| matches!(event, IndexEvent::Mapping { .. });
    assert!(events.len() == 1 && is_mapping(&events[0]), "{events:?}");
    assert_eq!(build(&config), (expected.clone(), vec![]));
    // Masks are not a part of the mapping.
    let masking = MaskingConfig::new(0.3).with_whole_words(false);
    assert_eq!(build(&config.clone().with_masking(masking)).1, []);
    assert_eq!(build(&config.clone().with_seed(1)).1.len(), 1);

    fs::remove_dir_all(case.cache()).unwrap();
    build(&config);
    let files = fs::read_dir(case.cache()).unwrap();
    let paths: Vec<_> = files.map(|entry| entry.unwrap().path()).collect();
    assert_eq!(paths.len(), 2);
    let is_array = |path: &&PathBuf| path.extension().unwrap() == "npy";
    let path = paths.iter().find(is_array).unwrap();
    let bytes = fs::read(path).unwrap();
    fs::write(path, &bytes[..bytes.len() - 1]).unwrap();
    let (samples, events) = build(&config);
    assert_eq!(samples, expected);
    assert!(
        matches!(&events[0], IndexEvent::Damaged { .. }),
        "{events:?}"
    );
    for value in [0xff, 3, 0] {
        let mut damaged = bytes.clone();
        damaged[128..].fill(value);
        fs::write(path, &damaged).unwrap();
        let built = case.bert(&config).unwrap();
        let error = built.sample(0).unwrap_err().to_string();
        assert!(
            error.contains("is damaged: sample 0 has the sentences"),
            "{error}"
        );
    }
}

#[test]
fn an_epoch_is_made_without_a_number_of_samples() {
    let case = Case::new(&[2, 3, 1, 2], 3);
    let one = case
        .bert(&BertDatasetConfig::new(
            90,
            case.tokenizer.clone(),
            case.cache(),
        ))
        .unwrap();
    assert_eq!(
        one.num_samples(),
        3,
        "a document of one sentence has no pair"
    );
    let config = BertDatasetConfig::new(90, case.tokenizer.clone(), case.cache())
        .with_classification_head(false);
    let all = case.bert(&config).unwrap();
    assert_eq!(all.num_samples(), 4);
    let sample = all.sample(0).unwrap();
    assert!(!sample.is_random && sample.types.iter().all(|kind| *kind == 0));
    let more = case.bert(&config.with_num_samples(5)).unwrap();
    assert_eq!(more.num_samples(), 8);
    assert_ne!(more.order_hash(), all.order_hash());
}

/// Changes a configuration.
type Change = fn(BertDatasetConfig) -> BertDatasetConfig;

#[rstest]
#[case(4, |config: BertDatasetConfig| config, "the sequence length 4 has not space")]
#[case(usize::MAX, |config: BertDatasetConfig| config, "or is too large; give 5 to")]
#[case(9, |config: BertDatasetConfig| config.with_seed(2_147_483_647), "the seed 2147483647 is above 2147483646")]
#[case(9, |config: BertDatasetConfig| config.with_num_samples(0), "the number of samples is 0")]
#[case(
    9,
    |config: BertDatasetConfig| config.with_short_sequence_probability(1.5),
    "a short sample is 1.5; give one from 0 to 1"
)]
#[case(9, |config: BertDatasetConfig| config.with_short_sequence_probability(1e-12), "below 1 of 2147483647")]
#[case(
    9,
    |config: BertDatasetConfig| config.with_masking(MaskingConfig::new(1.0)),
    "the masking probability is 1; give one between 0 and 1"
)]
#[case(
    9,
    |config: BertDatasetConfig| config.with_masking(MaskingConfig::new(0.1).with_max_ngram(0)),
    "the longest n-gram has 0 words"
)]
#[case(
    9,
    |config: BertDatasetConfig| config.with_tokens("[CLS]", "</s>", "[MASK]"),
    "the tokenizer has no token `</s>`, which ends a segment (sep)"
)]
fn settings_that_cannot_be_are_refused(
    #[case] seq_len: usize,
    #[case] change: Change,
    #[case] why: &str,
) {
    let case = Case::new(&[3, 3], 3);
    let config = BertDatasetConfig::new(seq_len, case.tokenizer.clone(), case.cache());
    let error = case.bert(&change(config)).unwrap_err().to_string();
    assert!(error.contains(why), "{error}");
    assert!(!case.cache().exists());
}

#[test]
fn what_the_data_or_the_tokenizer_lacks_is_named() {
    let case = Case::new(&[1, 1, 1], 3);
    let error = case.bert(&BertDatasetConfig::new(
        9,
        case.tokenizer.clone(),
        case.cache(),
    ));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("none of the 3 documents of "), "{error}");
    assert!(error.contains(" has 2 or more sentences"), "{error}");
    assert!(error.contains("--split-sentences"), "{error}");
    let config =
        BertDatasetConfig::new(9, case.tokenizer.clone(), case.cache()).with_num_samples(u64::MAX);
    let error = case.bert(&config).unwrap_err().to_string();
    assert!(error.contains("bytes of memory are needed"), "{error}");

    let config = BertDatasetConfig::new(9, Arc::new(ByteTokenizer), case.cache());
    let error = case.bert(&config);
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("no token `[CLS]`, which begins a sample"),
        "{error}"
    );
    let config = T5DatasetConfig::new(9, 9, Arc::new(ByteTokenizer), case.cache());
    let error = case.t5(&config);
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("no token `<extra_id_0>`, which stands for"),
        "{error}"
    );
}

#[test]
fn too_few_sentinels_and_a_short_decoder_are_named() {
    let case = Case::new(&[40; 3], 6);
    assert_eq!(case.tokenizer.token_to_id("<extra_id_0>"), Some(SENTINEL));
    let masking = MaskingConfig::new(0.4).with_max_ngram(1);
    let all = |decoder_seq_len| {
        let config =
            T5DatasetConfig::new(64, decoder_seq_len, case.tokenizer.clone(), case.cache());
        let built = case.t5(&config.with_masking(masking.clone())).unwrap();
        let samples = (0..built.num_samples()).map(|index| built.sample(index));
        samples.filter_map(Result::err).next().unwrap().to_string()
    };
    let error = all(99);
    assert!(
        error.contains("masked spans, and the tokenizer only 3 sentinels"),
        "{error}"
    );
    let config = T5DatasetConfig::new(64, 9, case.tokenizer.clone(), case.cache());
    let sentinels = (0..NUM_WORDS).map(|id| format!("w{id}"));
    let config = config
        .with_masking(masking.clone())
        .with_sentinels(sentinels);
    let built = case.t5(&config).unwrap();
    let samples = (0..built.num_samples()).map(|index| built.sample(index));
    let error = samples.filter_map(Result::err).next().unwrap().to_string();
    assert!(
        error.contains("tokens for the decoder, whose sequence length is 9"),
        "{error}"
    );
    let error = case
        .t5(&T5DatasetConfig::new(
            64,
            1,
            case.tokenizer.clone(),
            case.cache(),
        ))
        .unwrap_err();
    assert!(
        error.to_string().contains("decoder's sequence length 1"),
        "{error}"
    );
}

#[test]
fn sentinels_may_be_spelled_with_a_space_as_in_mt5() {
    let case = Case::new(&[9; 3], 6);
    let vocab = fs::read_to_string(case.dir.path().join("vocab.txt")).unwrap();
    let path = case.dir.path().join("mt5.txt");
    fs::write(&path, vocab.replace("<extra_id_", "\u{2581}<extra_id_")).unwrap();
    let tokenizer = HfTokenizer::open(&path).unwrap();
    assert_eq!(tokenizer.token_to_id("<extra_id_0>"), None);
    let read = |tokenizer: HfTokenizer| {
        let config = T5DatasetConfig::new(16, 16, Arc::new(tokenizer), case.cache());
        let built = case.t5(&config).unwrap();
        (0..built.num_samples())
            .map(|index| built.sample(index).unwrap())
            .collect::<Vec<_>>()
    };
    let (mt5, t5) = (
        tokenizer,
        HfTokenizer::open(case.dir.path().join("vocab.txt")),
    );
    let samples = read(mt5);
    assert!(
        samples
            .iter()
            .any(|sample| sample.text_enc.contains(&SENTINEL))
    );
    assert_eq!(samples, read(t5.unwrap()));
}

#[test]
fn a_token_outside_the_vocabulary_is_named() {
    let case = Case::new(&[6, 6], 3);
    let few: Vec<String> = ["[CLS]", "[SEP]", "[MASK]", "[UNK]"]
        .map(String::from)
        .to_vec();
    let path = case.dir.path().join("few.txt");
    fs::write(&path, few.join("\n")).unwrap();
    let tokenizer = HfTokenizer::open(&path).unwrap();
    let config = BertDatasetConfig::new(12, Arc::new(tokenizer), case.cache());
    let built = case.bert(&config).unwrap();
    let samples = (0..built.num_samples()).map(|index| built.sample(index));
    let error = samples.filter_map(Result::err).next().unwrap().to_string();
    assert!(error.contains("is outside the vocabulary of"), "{error}");
}
