//! The masked samples of Megatron-Core for BERT and T5, which `tests/tools/megatron_masked.py`
//! wrote down.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use flate2::Crc;
use megaburn_data::{
    BertDatasetConfig, BertSample, BlendedDatasetConfig, DocumentRange, HfTokenizer,
    IndexedDataset, MaskingConfig, T5DatasetConfig, T5Sample,
};
use serde_json::{Value, json};

const PARTS: [&str; 3] = ["train", "valid", "test"];

fn fixture(name: &str) -> PathBuf {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures");
    PathBuf::from(folder).join("megatron-masked").join(name)
}

fn cases(kind: &str) -> Vec<Value> {
    let text = fs::read_to_string(fixture("samples.json")).unwrap();
    let mut cases: Value = serde_json::from_str(&text).unwrap();
    let cases = cases[kind].as_array_mut().unwrap();
    assert!(cases.len() > 1);
    std::mem::take(cases)
}

/// The part of a data set that a case reads, and its tokenizer.
fn source(case: &Value) -> (DocumentRange, Arc<HfTokenizer>) {
    let name = case["set"].as_str().unwrap();
    let set = Arc::new(IndexedDataset::open(fixture(name)).unwrap());
    let weights = case["split"].as_array().unwrap().iter();
    let weights: Vec<f64> = weights.map(|weight| weight.as_f64().unwrap()).collect();
    let parts = DocumentRange::split(&set, &weights).unwrap();
    let part = PARTS.iter().position(|part| case["part"] == *part).unwrap();
    let tokenizer = HfTokenizer::open(fixture(name).join("vocab.txt")).unwrap();
    (parts[part].clone(), Arc::new(tokenizer))
}

fn number(case: &Value, key: &str) -> u64 {
    case[key].as_u64().unwrap()
}

fn masking(case: &Value) -> MaskingConfig {
    let masking = &case["masking"];
    MaskingConfig::new(masking["probability"].as_f64().unwrap())
        .with_max_ngram(number(masking, "max_ngram") as usize)
        .with_whole_words(masking["whole_words"] == true)
        .with_longer_ngrams(masking["longer_ngrams"] == true)
        .with_geometric(masking["geometric"] == true)
}

fn bert(case: &Value, tokenizer: Arc<HfTokenizer>, cache: &Path) -> BertDatasetConfig {
    BertDatasetConfig::new(number(case, "seq_len") as usize, tokenizer, cache)
        .with_seed(number(case, "seed"))
        .with_num_samples(number(case, "num_samples"))
        .with_short_sequence_probability(case["short"].as_f64().unwrap())
        .with_masking(masking(case))
        .with_classification_head(case["segments"] == true)
}

fn t5(case: &Value, tokenizer: Arc<HfTokenizer>, cache: &Path) -> T5DatasetConfig {
    let decoder_seq_len = number(case, "decoder_seq_len") as usize;
    let seq_len = number(case, "seq_len") as usize;
    T5DatasetConfig::new(seq_len, decoder_seq_len, tokenizer, cache)
        .with_seed(number(case, "seed"))
        .with_num_samples(number(case, "num_samples"))
        .with_short_sequence_probability(case["short"].as_f64().unwrap())
        .with_masking(masking(case))
}

/// The names and numbers of the fields of a sample, in Megatron-Core's order.
type Fields = Vec<(&'static str, Vec<i64>)>;

fn ids(tokens: &[u32]) -> Vec<i64> {
    tokens.iter().copied().map(i64::from).collect()
}

fn flags(mask: &[bool]) -> Vec<i64> {
    mask.iter().copied().map(i64::from).collect()
}

fn bert_fields(sample: &BertSample) -> Fields {
    vec![
        ("text", ids(&sample.text)),
        ("types", ids(&sample.types)),
        ("labels", sample.labels.clone()),
        ("is_random", flags(&[sample.is_random])),
        ("padding_mask", flags(&sample.padding_mask)),
        ("loss_mask", flags(&sample.loss_mask)),
        ("truncated", flags(&[sample.truncated])),
    ]
}

fn t5_fields(sample: &T5Sample) -> Fields {
    vec![
        ("text_enc", ids(&sample.text_enc)),
        ("text_dec", ids(&sample.text_dec)),
        ("labels", sample.labels.clone()),
        ("loss_mask", flags(&sample.loss_mask)),
        ("truncated", flags(&[sample.truncated])),
        ("enc_mask", flags(&sample.enc_mask)),
        ("dec_mask", flags(&sample.dec_mask)),
    ]
}

fn sum(numbers: impl IntoIterator<Item = i64>) -> u32 {
    let mut crc = Crc::new();
    for number in numbers {
        crc.update(&(number as i32).to_le_bytes());
    }
    crc.sum()
}

/// Compares the index and all samples with those of a case.
fn compare(case: &Value, num_samples: u64, npy: &[u8], fields: impl Fn(u64) -> Fields) {
    let about = format!("{} {} {}", case["set"], case["seed"], case["part"]);
    assert_eq!(num_samples, number(case, "num_rows"), "{about}");
    let index = npy[128..].as_chunks::<4>().0.iter();
    let index = index.map(|bytes| i64::from(u32::from_le_bytes(*bytes)));
    assert_eq!(json!(sum(index)), case["index"], "{about}");
    for (name, numbers) in fields(0) {
        let found = match numbers.as_slice() {
            [flag] => json!(flag),
            numbers => json!(numbers),
        };
        assert_eq!(found, case["first"][name], "{about}: {name} of sample 0");
    }
    for (index, expected) in (0..).zip(case["samples"].as_array().unwrap()) {
        let fields = fields(index);
        let found = sum(fields.iter().flat_map(|(_, numbers)| numbers.clone()));
        assert_eq!(
            json!(found),
            *expected,
            "{about}: sample {index}: {fields:?}"
        );
    }
}

/// The bytes of the only array in a folder.
fn npy(cache: &Path) -> Vec<u8> {
    let paths = fs::read_dir(cache).unwrap();
    let paths = paths.map(|entry| entry.unwrap().path());
    let is_array = |path: &PathBuf| path.extension().is_some_and(|ending| ending == "npy");
    let paths: Vec<_> = paths.filter(is_array).collect();
    assert_eq!(paths.len(), 1, "{paths:?}");
    fs::read(&paths[0]).unwrap()
}

#[test]
fn samples_of_bert_are_those_of_megatron() {
    let dir = tempfile::tempdir().unwrap();
    for (at, case) in cases("bert").iter().enumerate() {
        let cache = dir.path().join(at.to_string());
        let (source, tokenizer) = source(case);
        let built = bert(case, tokenizer, &cache).build(&source, |_| ());
        let built = built.unwrap();
        compare(case, built.num_samples(), &npy(&cache), |index| {
            bert_fields(&built.sample(index).unwrap())
        });
        let last = built.num_samples();
        let error = built.sample(last).unwrap_err().to_string();
        assert!(
            error.contains(&format!("there is no sample {last}")),
            "{error}"
        );
    }
}

#[test]
fn samples_of_t5_are_those_of_megatron() {
    let dir = tempfile::tempdir().unwrap();
    for (at, case) in cases("t5").iter().enumerate() {
        let cache = dir.path().join(at.to_string());
        let (source, tokenizer) = source(case);
        let built = t5(case, tokenizer, &cache).build(&source, |_| ());
        let built = built.unwrap();
        compare(case, built.num_samples(), &npy(&cache), |index| {
            t5_fields(&built.sample(index).unwrap())
        });
        let error = built.sample(u64::MAX).unwrap_err().to_string();
        assert!(
            error.contains("there is no sample 18446744073709551615"),
            "{error}"
        );
    }
}

#[test]
fn the_file_is_byte_for_byte_that_of_megatron() {
    let dir = tempfile::tempdir().unwrap();
    let case = &cases("bert")[0];
    let (source, tokenizer) = source(case);
    bert(case, tokenizer, dir.path())
        .build(&source, |_| ())
        .unwrap();
    let expected = fs::read(fixture("bert-sample_index.npy")).unwrap();
    assert_eq!(npy(dir.path()), expected);
}

/// Both data sets, of which each is read as a whole.
fn both() -> [DocumentRange; 2] {
    ["plain", "odd"].map(|name| {
        let set = IndexedDataset::open(fixture(name)).unwrap();
        DocumentRange::all(Arc::new(set))
    })
}

#[test]
fn samples_of_a_blend_are_those_of_megatron() {
    let dir = tempfile::tempdir().unwrap();
    let blends = cases("blends");
    let weights = |case: &Value| {
        let weights = case["weights"].as_array().unwrap().iter();
        weights.map(|weight| weight.as_f64().unwrap()).collect()
    };
    let compare = |case: &Value, positions: Vec<(usize, u64)>, samples: &dyn Fn(u64) -> Fields| {
        let positions = positions.into_iter();
        let index = positions.flat_map(|(set, sample)| [set as i64, sample as i64]);
        assert_eq!(json!(sum(index)), case["index"]);
        let fields = |index| samples(index).into_iter().flat_map(|(_, numbers)| numbers);
        let sums: Vec<u32> = (0..number(case, "num_rows"))
            .map(|index| sum(fields(index)))
            .collect();
        assert_eq!(json!(sums), case["samples"]);
    };

    let case = &blends[0];
    let (_, tokenizer) = source(case);
    let config = BlendedDatasetConfig::new(bert(case, tokenizer, dir.path()));
    let built = config.with_weights(weights(case)).build(&both(), |_| ());
    let built = built.unwrap();
    let positions = (0..built.num_samples()).map(|index| built.position(index).unwrap());
    compare(case, positions.collect(), &|index| {
        bert_fields(&built.sample(index).unwrap())
    });

    let case = &blends[1];
    let (_, tokenizer) = source(case);
    let config = BlendedDatasetConfig::new(t5(case, tokenizer, dir.path()));
    let built = config.with_weights(weights(case)).build(&both(), |_| ());
    let built = built.unwrap();
    let positions = (0..built.num_samples()).map(|index| built.position(index).unwrap());
    compare(case, positions.collect(), &|index| {
        t5_fields(&built.sample(index).unwrap())
    });
}
