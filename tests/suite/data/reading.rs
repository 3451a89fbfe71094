//! How documents are put into samples: packing, the mask after an eos, fill-in-the-middle.

use std::{fs, sync::Arc};

use megaburn::{
    data::{
        ByteTokenizer, Corpus, FimConfig, IndexedDataset, PackedSampler, PackedSamplerConfig,
        PreprocessConfig, Sample, SampleLog, Sampler, Samples, TokenDataset, Tokenizer,
        TokenizerTrainer,
    },
    report::metrics::{MetricsRecord, StepMetrics, read_metrics},
    train::{ConfigLayers, TrainConfig, config::Packing},
};
use megaburn_test_support::{
    run::Run,
    text::{fresh_seed, write_random_documents},
};

use super::training::{config, data_set, source};
use crate::runs::{
    child::{Ended, Ranks},
    resume::train,
};

const SEQ_LEN: usize = 48;
const EOS: u32 = 257;

fn start(run: &Run, config: &TrainConfig) -> Ended {
    let path = run.path("reading.toml");
    fs::write(&path, config.to_toml()).unwrap();
    let args = ["--config".to_string(), path.display().to_string()];
    Ranks::threads(&args).wait_all().remove(0)
}

fn steps(run: &Run) -> Vec<StepMetrics> {
    let records = read_metrics(run.path("run/metrics.jsonl")).unwrap();
    let step = |record| match record {
        MetricsRecord::Step(step) => Some(step),
        MetricsRecord::Eval(_) => None,
    };
    records.into_iter().filter_map(step).collect()
}

fn packed(run: &Run, layout: &str, steps: u64) -> TrainConfig {
    let mut config = config(run, layout, steps);
    config.data.path = Some(run.path("a").display().to_string());
    config.data.cache_dir = Some(run.path("cache").display().to_string());
    config.data.validation_fraction = 0.0;
    config.data.seq_len = SEQ_LEN;
    config.data.documents = true;
    config.data.document_multiple = 8;
    config.data.packing = Packing::BestFit;
    config
}

fn sampler(run: &Run, seed: u64) -> PackedSampler {
    let set = Arc::new(IndexedDataset::open(run.path("a")).unwrap());
    let config = PackedSamplerConfig::new(SEQ_LEN).with_multiple(8);
    let config = config.with_shuffle(seed, 0);
    config
        .init(&TokenDataset::indexed(set, 260), |_| ())
        .unwrap()
}

#[test]
fn packed_documents_train_alike_under_every_layout() {
    let whole = Run::new();
    data_set(&whole, "a", 120);
    let expected = train(packed(&whole, "tp1", 5), 5, 2);
    let samples = sampler(&whole, packed(&whole, "tp1", 5).run.seed);
    let mut log = SampleLog::new();
    for index in 0..40 {
        log.record(index, &samples.tokens(index).unwrap()).unwrap();
    }
    assert!(expected.samples == log);
    for layout in ["dp2-cp2", "tp2-dp2-sp", "pp2-dp2"] {
        let run = Run::new();
        let mut config = packed(&whole, layout, 5);
        config.run.dir = run.path("run").display().to_string();
        let found = train(config, 5, 5);
        assert!(found.samples == log, "{layout}");
        for (step, (found, expected)) in found.losses.iter().zip(&expected.losses).enumerate() {
            let difference = (found - expected).abs() / expected;
            assert!(
                difference < 1e-4,
                "{layout} step {step}: {found} {expected}"
            );
        }
    }
    // The rest of the run is another way of reading.
    let mut joined = packed(&whole, "tp1", 8);
    joined.data.packing = Packing::None;
    let ended = start(&whole, &joined);
    assert_eq!(ended.code, Some(2), "{ended:#?}");
    let message = "data.packing is best_fit there and none here";
    assert!(ended.stderr.contains(message), "{ended:#?}");
}

#[test]
fn packing_and_padding_are_printed_and_recorded() {
    let run = Run::new();
    data_set(&run, "a", 120);
    let mut config = packed(&run, "dp2-cp2", 3);
    config.train.log_interval = 1;
    let samples = sampler(&run, config.run.seed);
    let ended = start(&run, &config);
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    let line = format!("packing  {}", samples.stats());
    assert!(ended.stdout.contains(&line), "{ended:#?}");
    assert!(
        ended.stderr.contains("packing the documents of"),
        "{ended:#?}"
    );
    let num_labels = |index| match samples.sample(index).unwrap() {
        Sample::Documents(documents) => documents.iter().map(|of| of.len() as u64 - 1).sum(),
        Sample::Tokens(_) | Sample::Bert(_) | Sample::T5(_) => 0,
    };
    for (step, first) in steps(&run).iter().zip((0..).step_by(8)) {
        let held: u64 = (first..first + 8).map(num_labels).sum();
        let padding = 1.0 - held as f64 / (8 * SEQ_LEN) as f64;
        assert_eq!(step.tokens, held);
        assert!((step.padding.unwrap() - padding).abs() < 1e-9, "{step:?}");
        let line = format!("padding {:.1}%", 100.0 * padding);
        assert!(ended.stdout.contains(&line), "{line} {ended:#?}");
    }
    // The second start packs nothing.
    let mut again = config;
    again.train.steps = 4;
    let ended = start(&run, &again);
    assert!(
        ended.stdout.contains(&line) && ended.code == Some(0),
        "{ended:#?}"
    );
    assert!(!ended.stderr.contains("packing the"), "{ended:#?}");
}

#[test]
fn labels_after_an_eos_can_be_left_out_of_the_loss() {
    let run = Run::new();
    let path = data_set(&run, "a", 120);
    let mut config = config(&run, "tp2-dp2-sp", 3);
    config.data.path = Some(path);
    config.data.validation_fraction = 0.0;
    config.data.seq_len = SEQ_LEN;
    config.data.eod_mask_loss = true;
    let set = Arc::new(IndexedDataset::open(run.path("a")).unwrap());
    let tokens = TokenDataset::indexed(set, 260);
    let samples = Sampler::shuffled(tokens, SEQ_LEN, config.run.seed).unwrap();
    assert_eq!(start(&run, &config).code, Some(0));
    let num_kept = |index| {
        let tokens = samples.tokens(index).unwrap();
        tokens[..SEQ_LEN]
            .iter()
            .filter(|token| **token != EOS)
            .count() as u64
    };
    for (step, first) in steps(&run).iter().zip((0..).step_by(8)) {
        assert_eq!(step.tokens, (first..first + 8).map(num_kept).sum::<u64>());
        assert!(step.tokens < 8 * SEQ_LEN as u64);
    }
}

#[test]
fn documents_are_filled_in_the_middle() {
    let run = Run::new();
    let text = fs::read_to_string(run.path("text.txt")).unwrap();
    let corpus = Corpus::from_documents("text", vec![text]).unwrap();
    let special = ["<fim_prefix>", "<fim_middle>", "<fim_suffix>"].map(String::from);
    let trained = TokenizerTrainer::new(300)
        .with_special_tokens(special)
        .train(&corpus)
        .unwrap();
    trained.save(run.path("bpe"), false).unwrap();
    let lines = "[data.fim]\nrate = 0.8\nspm_rate = 0.3\n";
    let layers = ConfigLayers::new()
        .with_file(run.path("config.toml"))
        .unwrap();
    let layers = layers.with_text("fim", lines).unwrap();
    let refused = start(&run, &layers.clone().load().unwrap());
    assert_eq!(refused.code, Some(2), "{refused:#?}");
    assert!(
        refused.stderr.contains("fill-in-the-middle cannot be used"),
        "{refused:#?}"
    );
    let path = format!("data.tokenizer={}", run.path("bpe").display());
    let mut config = layers.with_set(&path).unwrap().load().unwrap();
    config.run.dir = run.path("run").display().to_string();
    config.data.validation_fraction = 0.0;
    let seed = config.run.seed;
    let tokenizer: Arc<dyn Tokenizer> = Arc::new(trained.into_tokenizer());
    let tokens = TokenDataset::new(&corpus, tokenizer.as_ref()).unwrap();
    let seq_len = config.data.seq_len;
    let samples = Arc::new(Sampler::shuffled(tokens, seq_len, seed).unwrap());
    let fim = FimConfig::new(0.8).with_spm_rate(0.3);
    let expected = fim.build(samples, tokenizer, seq_len, seed).unwrap();
    let mut log = SampleLog::new();
    for index in 0..16 {
        log.record(index, &expected.tokens(index).unwrap()).unwrap();
    }
    assert!(train(config, 2, 2).samples == log);
}

#[test]
fn generated_data_has_a_floor_and_other_tokens_for_evaluation() {
    let run = Run::new();
    let mut config = config(&run, "tp2-dp2-sp", 60);
    config.data.train = vec![source("synthetic:markov?tokens=100000", None, None)];
    config.data.valid = vec![source("synthetic:markov?tokens=100000", None, None)];
    config.data.test = vec![source("synthetic:markov?tokens=90000", None, Some("later"))];
    let ended = start(&run, &config);
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    assert!(
        ended
            .stdout
            .contains("no mean loss below 1.2080 is possible"),
        "{ended:#?}"
    );
    let records = read_metrics(run.path("run/metrics.jsonl")).unwrap();
    let evals = records.into_iter().filter_map(|record| match record {
        MetricsRecord::Eval(eval) if eval.step == 60 => Some(eval.eval_loss),
        _ => None,
    });
    let evals: Vec<_> = evals.collect();
    // Equally likely symbols have ln 64 = 4.16.
    assert_eq!(evals.len(), 2);
    assert!(
        evals.iter().all(|loss| (1.208..4.1).contains(loss)),
        "{evals:?}"
    );
    assert_ne!(evals[0], evals[1]);
    config.data.train[0].path = "mock:none".into();
    let ended = start(&run, &config);
    assert_eq!(ended.code, Some(2), "{ended:#?}");
    assert!(
        ended.stderr.contains("`mock:none` cannot be generated"),
        "{ended:#?}"
    );
}

#[test]
fn samples_that_are_read_ahead_are_the_same() {
    let whole = Run::new();
    let path = data_set(&whole, "a", 120);
    let read = |layout, num_workers| {
        let run = Run::new();
        let mut config = config(&run, layout, 6);
        config.data.path = Some(path.clone());
        config.data.num_workers = num_workers;
        train(config, 6, 3)
    };
    let expected = read("tp1", None);
    for (layout, num_workers) in [("tp2-dp2-sp", 3), ("pp2-dp2", 1), ("dp4", 16)] {
        let found = read(layout, Some(num_workers));
        assert!(found.samples == expected.samples, "{layout}");
        for (found, expected) in found.losses.iter().zip(&expected.losses) {
            assert!((found - expected).abs() < 1e-4 * expected, "{layout}");
        }
    }
}

#[test]
fn another_part_for_training_is_refused_on_resume() {
    let run = Run::new();
    data_set(&run, "a", 120);
    let mut first = packed(&run, "tp1", 3);
    first.data.validation_fraction = 0.01;
    train(first.clone(), 2, 2);
    let mut other = first;
    other.data.valid = vec![source(&data_set(&run, "b", 50), None, None)];
    let ended = start(&run, &other);
    assert_eq!(ended.code, Some(2), "{ended:#?}");
    let message = "are for training there and 0..";
    assert!(ended.stderr.contains(message), "{ended:#?}");
}

#[test]
fn documents_without_eos_are_named() {
    let run = Run::new();
    let text = run.path("b.jsonl");
    write_random_documents(&text, 50, 90, fresh_seed());
    let out = run.path("b");
    PreprocessConfig::new(vec![text], out.clone())
        .run(&ByteTokenizer, |_| ())
        .unwrap();
    let started = |sets: &[&str]| {
        let mut config = config(&run, "tp1", 2);
        config.data.path = Some(out.display().to_string());
        config.data.validation_fraction = 0.0;
        let text = config.to_toml();
        let mut layers = ConfigLayers::new().with_text("b", &text).unwrap();
        for set in sets {
            layers = layers.with_set(set).unwrap();
        }
        start(&run, &layers.load().unwrap())
    };
    for (sets, key) in [
        (vec!["data.documents=true"], "`data.documents` is set"),
        (
            vec!["data.eod_mask_loss=true"],
            "`data.eod_mask_loss` is set",
        ),
        (
            vec!["data.fim.rate=0.3", "data.fim.spm_rate=0.1"],
            "`data.fim` is set",
        ),
    ] {
        let ended = started(&sets);
        assert_eq!(ended.code, Some(2), "{ended:#?}");
        assert!(ended.stderr.contains(key), "{ended:#?}");
        assert!(ended.stderr.contains("--append-eod"), "{ended:#?}");
    }
    // The index shows where documents end.
    let sets = [
        "data.documents=true",
        "data.packing=best_fit",
        "data.seq_len=96",
    ];
    let ended = started(&sets);
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    let other = format!("run.dir={}", run.path("other").display());
    let ended = started(&["data.fim.rate=0", &other]);
    assert_eq!(ended.code, Some(0), "{ended:#?}");
}
