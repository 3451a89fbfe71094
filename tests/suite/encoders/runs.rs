//! Runs of BERT on the command line.

use std::{fs, sync::Arc};

use burn::prelude::Device;
use megaburn::{
    collective::{Group, ProcessGroups},
    data::{BertDatasetConfig, DocumentRange, HfTokenizer, IndexedDataset, Sample},
    mesh::Layout,
    report::metrics::{EvalMetrics, MetricsRecord, StepMetrics, read_metrics},
    train::{RunData, Trainer},
};

use super::corpus::Sentences;
use crate::{
    models::round_trip::{megaburn, succeed, text},
    runs::child::Ended,
};
use megaburn_test_support::text::fresh_seed;

fn start(sentences: &Sentences, layout: &str, steps: u64, sets: &[&str]) -> Ended {
    let steps = steps.to_string();
    let mut args = vec!["train", "--layout", layout, "--steps", &steps];
    let own = sentences.settings();
    let own = own.iter().filter(|set| !set.starts_with("train.steps"));
    let all = own.map(String::as_str).chain(sets.iter().copied());
    args.extend(all.flat_map(|set| ["--set", set]));
    megaburn(&args)
}

/// The steps and the evaluations of a run.
fn measured(sentences: &Sentences) -> (Vec<StepMetrics>, Vec<EvalMetrics>) {
    let records = read_metrics(sentences.path("run/metrics.jsonl")).unwrap();
    let mut steps = Vec::new();
    let mut evals = Vec::new();
    for record in records {
        match record {
            MetricsRecord::Step(step) => steps.push(step),
            MetricsRecord::Eval(eval) => evals.push(eval),
        }
    }
    (steps, evals)
}

/// Most sequences are shorter than a sample, which is then padded.
const SETS: [&str; 7] = [
    "data.short_sequence_probability=0.9",
    "train.global_batch=4",
    "train.micro_batch=1",
    "data.validation_fraction=0.2",
    "train.eval_interval=2",
    "train.checkpoint_interval=2",
    "optimizer.decay_steps=8",
];

#[test]
fn a_run_resumes_under_another_layout_evaluates_and_is_exported() {
    let seed = fresh_seed();
    let [whole, split] = [seed; 2].map(|seed| Sentences::new(60, seed));
    let ended = start(&whole, "tp1", 4, &SETS);
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    for (layout, steps) in [("tp2-sp", 2), ("pp2", 4)] {
        let ended = start(&split, layout, steps, &SETS);
        assert_eq!(ended.code, Some(0), "{ended:#?}");
    }
    let (steps, evals) = measured(&whole);
    let (found, found_evals) = measured(&split);
    let close = |a: f64, b: f64| (a - b).abs() <= 1e-5 * b;
    assert_eq!((found.len(), steps.len()), (4, 4));
    assert_eq!((found_evals.len(), evals.len()), (2, 2));
    for (found, step) in found.iter().zip(&steps) {
        assert_eq!(found.tokens, step.tokens);
        assert!(close(found.loss, step.loss), "{found:?}, {step:?}");
        let order = [found, step].map(|of| of.sop_loss.unwrap());
        assert!(close(order[0], order[1]), "{found:?}, {step:?}");
        // At most 15% of the tokens are masked.
        assert!(step.tokens < 4 * 24 / 5);
    }
    assert!(steps.iter().any(|step| step.padding.unwrap() > 0.0));
    for (found, eval) in found_evals.iter().zip(&evals) {
        assert!(close(found.eval_loss, eval.eval_loss));
        assert!(close(found.sop_loss.unwrap(), eval.sop_loss.unwrap()));
    }
    let back = whole.path("back");
    succeed(&["convert", "export", text(&whole.path("run")), text(&back)]);
    succeed(&["verify", text(&whole.path("run")), text(&back)]);
    let config = fs::read_to_string(back.join("config.json")).unwrap();
    assert!(config.contains("BertForPreTraining"), "{config}");
    // A run starts from the exported model.
    let init = format!("model.init={}", back.display());
    let dir = format!("run.dir={}", whole.path("next").display());
    let own = [
        "data.path",
        "data.tokenizer",
        "data.cache_dir",
        "data.seq_len",
    ];
    let mut args = vec!["train", "--layout", "tp1", "--steps", "1"];
    let settings = whole.settings();
    let kept = settings
        .iter()
        .filter(|set| own.iter().any(|key| set.starts_with(key)));
    let sets = [&init, &dir].into_iter().chain(kept);
    args.extend(sets.flat_map(|set| ["--set", set.as_str()]));
    args.extend([
        "--set",
        "data.dataset=bert",
        "--set",
        "optimizer.warmup_steps=0",
    ]);
    succeed(&args);
}

#[test]
fn other_masks_are_another_run() {
    let sentences = Sentences::new(30, fresh_seed());
    let sets = ["train.global_batch=4", "train.micro_batch=2"];
    assert_eq!(start(&sentences, "tp1", 2, &sets).code, Some(0));
    for set in [
        "data.masking.probability=0.2",
        "data.short_sequence_probability=0.5",
        "run.seed=5",
    ] {
        let ended = start(&sentences, "tp1", 3, &[&sets[..], &[set]].concat());
        assert_eq!(ended.code, Some(2), "{ended:#?}");
        let key = set.split('=').next().unwrap();
        assert!(ended.stderr.contains(key), "{ended:#?}");
    }
    // More epochs are another order of samples.
    let ended = start(&sentences, "tp1", 500, &sets);
    assert_eq!(ended.code, Some(2), "{ended:#?}");
    let said = "the number of epochs that train.steps needs";
    assert!(ended.stderr.contains(said), "{ended:#?}");
}

/// Masked words follow from their neighbours, so that a model that sees both sides predicts them; the
/// frequencies of words alone leave 2.4 nats.
#[test]
fn an_encoder_learns_what_the_neighbours_say() {
    let sentences = Sentences::known(200, fresh_seed());
    let sets = [
        "train.global_batch=16",
        "train.micro_batch=16",
        "model.hidden=32",
        "model.ffn=64",
        "optimizer.lr=1e-2",
        "data.masking.max_ngram=1",
        "optimizer.warmup_steps=20",
        "data.seq_len=32",
    ];
    let ended = start(&sentences, "tp1", 400, &sets);
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    let (steps, _) = measured(&sentences);
    let last = steps[380..].iter().map(|step| step.loss).sum::<f64>() / 20.0;
    assert!(steps[0].loss > 2.5 && last < 1.8, "{last}");
}

/// Samples of the trainer are those of the data set, in order.
#[test]
fn the_samples_of_a_run_are_those_of_megatrons_data_set() {
    let sentences = Sentences::new(40, fresh_seed());
    let config = sentences.config(&["train.global_batch=4", "train.micro_batch=4"]);
    let path = config.data.path.clone().unwrap();
    let tokenizer = Arc::new(HfTokenizer::open(sentences.path("vocab.txt")).unwrap());
    let source = DocumentRange::all(Arc::new(IndexedDataset::open(path).unwrap()));
    let set = BertDatasetConfig::new(24, tokenizer, sentences.path("other"))
        .with_seed(config.run.seed)
        .with_num_samples(12)
        .build(&source, |_| ())
        .unwrap();
    let data = Arc::new(RunData::load(&config).unwrap());
    let groups = ProcessGroups::new(&Group::single(config.run.seed), Layout::SINGLE).unwrap();
    let device = Device::flex().autodiff();
    let mut trainer = Trainer::new(Arc::new(config), groups, device, data).unwrap();
    for step in 0..3 {
        let (numbers, samples) = trainer.micro_batch(0).unwrap();
        assert_eq!(numbers, 4 * step..4 * step + 4);
        for (number, sample) in numbers.zip(samples) {
            let Sample::Bert(sample) = sample else {
                panic!("another kind of sample");
            };
            assert_eq!(*sample, set.sample(number).unwrap());
        }
        trainer.step().unwrap();
    }
}
