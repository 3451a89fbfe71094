//! Runs whose list of data sets changes, and the keys of its entries.

use std::{fs, sync::Arc};

use megaburn::{
    data::{
        BlendedSampler, IndexedDataset, SampleLog, Sampler, Samples, SequenceRange, TokenDataset,
    },
    train::{TrainConfig, config::SourceConfig},
};
use megaburn_test_support::run::Run;

use super::training::{config, data_set, source};
use crate::runs::{child::Ranks, resume::train};

const SEQ_LEN: usize = 16;

/// A configuration that mixes these data sets by weight.
fn mixed(run: &Run, layout: &str, steps: u64, sets: &[(&str, f64)]) -> TrainConfig {
    let mut config = config(run, layout, steps);
    let entry = |(name, weight): &(&str, f64)| {
        source(&run.path(name).display().to_string(), Some(*weight), None)
    };
    config.data.train = sets.iter().map(entry).collect();
    config.data.validation_fraction = 0.0;
    assert_eq!(config.data.seq_len, SEQ_LEN);
    config
}

/// The samples of a data set that is number `number` of the run.
fn sampler(run: &Run, name: &str, number: usize, seed: u64) -> Sampler {
    let set = Arc::new(IndexedDataset::open(run.path(name)).unwrap());
    let tokens = TokenDataset::indexed(set, 260);
    Sampler::shuffled_source(tokens, SEQ_LEN, seed, number).unwrap()
}

fn log(samples: &dyn Samples, range: std::ops::Range<u64>) -> SampleLog {
    let mut log = SampleLog::new();
    for index in range {
        log.record(index, &samples.tokens(index).unwrap()).unwrap();
    }
    log
}

#[test]
fn data_sets_can_be_added_later() {
    let run = Run::new();
    for (name, num_documents) in [("a", 60), ("b", 40), ("c", 50)] {
        data_set(&run, name, num_documents);
    }
    let first = mixed(&run, "tp2-dp2-sp", 8, &[("a", 0.7), ("b", 0.3)]);
    let seed = first.run.seed;
    let [a, b, c] = [("a", 0), ("b", 1), ("c", 2)].map(|(name, n)| sampler(&run, name, n, seed));
    let before = BlendedSampler::new(vec![a.clone(), b.clone()], Some(&[0.7, 0.3]), seed).unwrap();
    let read = before.num_read(64);
    let after = BlendedSampler::new(vec![c, b, a], Some(&[0.5, 0.2, 0.3]), seed).unwrap();
    let after = after.continued(64, vec![0, read[1], read[0]]);

    assert!(train(first, 8, 8).samples == log(&before, 0..64));
    let more = |layout| mixed(&run, layout, 20, &[("c", 0.5), ("b", 0.2), ("a", 0.3)]);
    assert!(train(more("dp4"), 14, 12).samples == log(&after, 64..112));
    // The mixture of the checkpoint continues with every layout.
    assert!(train(more("tp2"), 17, 17).samples == log(&after, 96..136));

    // The change is in the output and in the metrics.
    let start = |config: &TrainConfig| {
        let path = run.path("added.toml");
        fs::write(&path, config.to_toml()).unwrap();
        let args = ["--config".to_string(), path.display().to_string()];
        Ranks::threads(&args).wait_all().remove(0)
    };
    data_set(&run, "d", 30);
    let ended = start(&mixed(&run, "tp1", 20, &[("a", 1.0), ("d", 1.0)]));
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    let path = |name| run.path(name).display().to_string();
    let [num_c, num_b, num_a] = [0, 1, 2].map(|source| after.num_read(136)[source]);
    let old = format!(
        "{} 50.0% (new), {} 20.0% (continues at its sample {}), {} 30.0% (continues at its sample {})",
        path("c"),
        path("b"),
        read[1],
        path("a"),
        read[0]
    );
    let new = format!(
        "{} 50.0% (continues at its sample {num_a}), {} 50.0% (new) from sample 136 on",
        path("a"),
        path("d")
    );
    assert!(num_c > 0 && num_b > read[1]);
    let change = format!("changed  data.train: {old} -> {new}");
    assert!(ended.stdout.contains(&change), "{ended:#?}");
    let metrics = fs::read_to_string(run.path("run/metrics.jsonl")).unwrap();
    assert!(metrics.contains("from sample 136 on"), "{metrics}");

    // Nothing is kept, or a file has changed.
    let ended = start(&mixed(&run, "tp1", 30, &[("b", 1.0), ("c", 1.0)]));
    assert_eq!(ended.code, Some(2), "{ended:#?}");
    assert!(
        ended
            .stderr
            .contains("the run reads none of these data sets"),
        "{ended:#?}"
    );
    fs::remove_file(run.path("a.bin")).unwrap();
    fs::remove_file(run.path("a.idx")).unwrap();
    fs::remove_file(run.path("a.megaburn")).unwrap();
    data_set(&run, "a", 61);
    let ended = start(&mixed(&run, "tp1", 30, &[("a", 1.0), ("d", 1.0)]));
    assert_eq!(ended.code, Some(2), "{ended:#?}");
    assert!(ended.stderr.contains("a has changed since"), "{ended:#?}");
}

#[test]
fn epochs_and_splits_of_a_data_set_are_its_own() {
    let run = Run::new();
    for (name, num_documents) in [("a", 60), ("b", 40)] {
        data_set(&run, name, num_documents);
    }
    let mut config = mixed(&run, "tp1", 6, &[("a", 1.0), ("b", 1.0)]);
    let seed = config.run.seed;
    let entry = |source: &SourceConfig, epochs, split: Option<&str>| SourceConfig {
        weight: None,
        epochs: Some(epochs),
        split: split.map(String::from),
        ..source.clone()
    };
    let train_list = &mut config.data.train;
    train_list[0] = entry(&train_list[0], 3.0, None);
    train_list[1] = entry(&train_list[1], 0.5, Some("1,1"));
    let set = Arc::new(IndexedDataset::open(run.path("b")).unwrap());
    let [half, ..] = SequenceRange::split(&set, &[1.0, 1.0]).unwrap();
    let half = TokenDataset::indexed(set, 260).part("training", half.tokens().unwrap());
    let half = Sampler::shuffled_source(half, SEQ_LEN, seed, 1).unwrap();
    let whole = sampler(&run, "a", 0, seed);
    let weights = [&whole, &half].map(|sampler| sampler.num_samples() as f64);
    let weights = [weights[0] * 3.0, weights[1] * 0.5];
    let expected = BlendedSampler::new(vec![whole, half], Some(&weights), seed).unwrap();
    assert!(train(config, 6, 6).samples == log(&expected, 0..48));
}

#[test]
fn a_run_that_began_with_one_data_set_gets_a_list() {
    let run = Run::new();
    let [a, b] = [("a", 60), ("b", 40)].map(|(name, number)| data_set(&run, name, number));
    let begin = run.args(
        "tp1",
        2,
        &[&format!("data.path={a}"), "data.validation_fraction=0"],
    );
    assert_eq!(Ranks::threads(&begin).wait_all().remove(0).code, Some(0));
    let list = format!("data.train=[{{path={b:?}}},{{path={a:?}}}]");
    let dir = run.path("run").display().to_string();
    let resume = ["--resume", &dir, "--steps", "4", "--set", &list].map(String::from);
    let ended = Ranks::threads(&resume).wait_all().remove(0);
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    let change = format!("{a} 100.0% -> {b} ");
    assert!(ended.stdout.contains(&change), "{ended:#?}");
    assert!(
        ended
            .stdout
            .contains("(continues at its sample 16) from sample 16 on"),
        "{ended:#?}"
    );
}
