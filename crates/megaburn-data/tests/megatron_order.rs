//! The order of samples of Megatron-Core, which `tests/tools/megatron_order.py` wrote down.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use flate2::Crc;
use megaburn_data::{
    BlendedDatasetConfig, GptDatasetConfig, IndexedDataset, Samples, SequenceRange,
};
use serde_json::{Value, json};

const PARTS: [&str; 3] = ["train", "valid", "test"];

fn fixture(name: &str) -> PathBuf {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures");
    PathBuf::from(folder).join("megatron-order").join(name)
}

fn cases(kind: &str) -> Vec<Value> {
    let text = fs::read_to_string(fixture("order.json")).unwrap();
    let mut cases: Value = serde_json::from_str(&text).unwrap();
    let cases = cases[kind].as_array_mut().unwrap();
    assert!(cases.len() > 10);
    std::mem::take(cases)
}

/// The part of a data set that a case reads.
fn source(name: &str, case: &Value) -> SequenceRange {
    let set = Arc::new(IndexedDataset::open(fixture(name)).unwrap());
    let weights = case["split"].as_array().unwrap().iter();
    let weights: Vec<f64> = weights.map(|weight| weight.as_f64().unwrap()).collect();
    let parts = SequenceRange::split(&set, &weights).unwrap();
    let part = PARTS.iter().position(|part| case["part"] == *part).unwrap();
    parts[part].clone()
}

fn config(case: &Value, cache: PathBuf) -> GptDatasetConfig {
    let seq_len = case["seq_len"].as_u64().unwrap() as usize;
    let config = GptDatasetConfig::new(seq_len, 1000, cache);
    let config = config.with_seed(case["seed"].as_u64().unwrap());
    match case["num_samples"].as_u64() {
        Some(num_samples) => config.with_num_samples(num_samples),
        None => config,
    }
}

/// A CRC-32 of the tokens of each sample.
fn sums(samples: &dyn Samples) -> Value {
    let sum = |index| {
        let mut crc = Crc::new();
        for token in samples.tokens(index).unwrap() {
            crc.update(&token.to_le_bytes());
        }
        crc.sum()
    };
    let sums: Vec<u32> = (0..samples.num_samples()).map(sum).collect();
    json!(sums)
}

/// The bytes of the only file in a folder whose name ends like this.
fn npy(cache: &PathBuf, ending: &str) -> Vec<u8> {
    let paths = fs::read_dir(cache)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let is_named = |path: &PathBuf| path.to_str().unwrap().ends_with(ending);
    let paths: Vec<PathBuf> = paths.filter(is_named).collect();
    assert_eq!(paths.len(), 1, "{paths:?}");
    fs::read(&paths[0]).unwrap()
}

/// The numbers of an array of `size` bytes each.
fn numbers(npy: &[u8], size: usize) -> Value {
    let numbers = npy[128..].chunks_exact(size).map(|bytes| {
        let mut word = [0; 8];
        word[..size].copy_from_slice(bytes);
        u64::from_le_bytes(word)
    });
    json!(numbers.collect::<Vec<_>>())
}

#[test]
fn samples_of_a_data_set_are_those_of_megatron() {
    let dir = tempfile::tempdir().unwrap();
    for (number, case) in cases("gpt").iter().enumerate() {
        let about = format!(
            "{} {} {} {}",
            case["set"], case["seed"], case["seq_len"], case["part"]
        );
        let cache = dir.path().join(number.to_string());
        let source = source(case["set"].as_str().unwrap(), case);
        let built = config(case, cache.clone()).build(&source, |_| ()).unwrap();
        for name in ["document_index", "sample_index", "shuffle_index"] {
            let found = npy(&cache, &format!("-{name}.npy"));
            assert_eq!(numbers(&found, 4), case[name], "{about} {name}");
        }
        assert_eq!(sums(&built), case["tokens"], "{about}");
        let error = built.tokens(built.num_samples()).unwrap_err().to_string();
        let last = built.num_samples();
        assert!(
            error.contains(&format!("there is no sample {last}")),
            "{error}"
        );
    }
}

#[test]
fn samples_of_a_blend_are_those_of_megatron() {
    let dir = tempfile::tempdir().unwrap();
    for (number, case) in cases("blends").iter().enumerate() {
        let about = format!("{} {} {}", case["sets"], case["seed"], case["part"]);
        let cache = dir.path().join(number.to_string());
        let sets = case["sets"].as_array().unwrap().iter();
        let sources: Vec<_> = sets
            .map(|set| source(set.as_str().unwrap(), case))
            .collect();
        let mut blend = BlendedDatasetConfig::new(config(case, cache.clone()));
        if let Some(weights) = case["weights"].as_array() {
            let weights = weights.iter().map(|weight| weight.as_f64().unwrap());
            blend = blend.with_weights(weights.collect());
        }
        let built = blend.build(&sources, |_| ()).unwrap();
        for (name, size) in [("dataset_index", 2), ("dataset_sample_index", 8)] {
            let found = npy(&cache, &format!("-{name}.npy"));
            assert_eq!(numbers(&found, size), case[name], "{about} {name}");
        }
        assert_eq!(sums(&built), case["tokens"], "{about}");
        let error = built.tokens(u64::MAX).unwrap_err().to_string();
        assert!(
            error.contains("there is no sample 18446744073709551615"),
            "{error}"
        );
    }
}

#[test]
fn files_are_byte_for_byte_those_of_megatron() {
    let dir = tempfile::tempdir().unwrap();
    let cache = dir.path().join("gpt");
    let case = &cases("gpt")[0];
    let built = config(case, cache.clone()).build(&source("a", case), |_| ());
    assert_eq!(built.unwrap().num_epochs(), 2);
    for name in ["document_index", "sample_index", "shuffle_index"] {
        let expected = fs::read(fixture(&format!("a-{name}.npy"))).unwrap();
        assert_eq!(npy(&cache, &format!("-{name}.npy")), expected, "{name}");
    }

    let cache = dir.path().join("blend");
    let case = &cases("blends")[0];
    let blend = BlendedDatasetConfig::new(config(case, cache.clone()));
    let blend = blend.with_weights(vec![0.3, 0.7]);
    let sources = ["a", "b"].map(|name| source(name, case));
    blend.build(&sources, |_| ()).unwrap();
    for name in ["dataset_index", "dataset_sample_index"] {
        let expected = fs::read(fixture(&format!("ab-{name}.npy"))).unwrap();
        assert_eq!(npy(&cache, &format!("-{name}.npy")), expected, "{name}");
    }
}

#[test]
fn labels_follow_tokens_as_in_another_script_of_megatron() {
    let folder = fixture("../megatron-dataset");
    let order = fs::read_to_string(folder.join("order.json")).unwrap();
    let order: Value = serde_json::from_str(&order).unwrap();
    let set = Arc::new(IndexedDataset::open(folder.join("data_document")).unwrap());
    let parts = SequenceRange::split(&set, &[90.0, 6.0, 4.0]).unwrap();
    let cache = tempfile::tempdir().unwrap();
    let seq_len = order["sequence_length"].as_u64().unwrap() as usize;
    let config = GptDatasetConfig::new(seq_len, 256, cache.path());
    let built: Vec<_> = (0..3)
        .map(|part| {
            let asked = order["requested"][part].as_u64().unwrap();
            let config = config.clone().with_num_samples(asked);
            config.build(&parts[part], |_| ()).unwrap()
        })
        .collect();
    let lengths: Vec<u64> = built.iter().map(Samples::num_samples).collect();
    assert_eq!(json!(lengths), order["lengths"]);
    let tokens = |part: usize, index| built[part].tokens(index as u64).unwrap();
    for (index, expected) in order["train"].as_array().unwrap().iter().enumerate() {
        assert_eq!(json!(tokens(0, index)), *expected);
    }
    let first = order["train_first_token_of_every_sample"].as_array();
    for (index, expected) in first.unwrap().iter().enumerate() {
        assert_eq!(json!(tokens(0, index)[0]), *expected);
    }
    for (index, expected) in order["valid"].as_array().unwrap().iter().enumerate() {
        assert_eq!(json!(tokens(1, index)[..seq_len]), *expected);
    }
}
