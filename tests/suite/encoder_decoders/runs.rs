//! Runs of T5 on the command line.

use std::{fs, sync::Arc};

use burn::prelude::Device;
use megaburn::{
    collective::{Group, ProcessGroups},
    data::{
        BlendedDatasetConfig, DocumentRange, HfTokenizer, IndexedDataset, Sample, Samples,
        T5DatasetConfig,
    },
    mesh::Layout,
    report::metrics::{EvalMetrics, MetricsRecord, StepMetrics, read_metrics},
    train::{ConfigLayers, RunData, Trainer},
};
use rstest::rstest;

use crate::{
    encoders::corpus::Sentences,
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

const SETS: [&str; 6] = [
    "train.global_batch=4",
    "train.micro_batch=1",
    "data.validation_fraction=0.2",
    "train.eval_interval=2",
    "train.checkpoint_interval=2",
    "optimizer.decay_steps=8",
];

/// Runs in one piece and in two are the same bit for bit under one layout, and within rounding under
/// others.
#[test]
fn a_run_resumes_evaluates_and_is_exported() {
    let seed = fresh_seed();
    let [whole, cut, moved] = [seed; 3].map(|seed| Sentences::new(60, seed).for_t5());
    let parts: [(&Sentences, &[(&str, u64)]); 3] = [
        (&whole, &[("tp1", 4)]),
        (&cut, &[("tp1", 2), ("tp1", 4)]),
        (&moved, &[("tp2-sp", 2), ("pp2", 4)]),
    ];
    for (sentences, parts) in parts {
        for (layout, steps) in parts {
            let ended = start(sentences, layout, *steps, &SETS);
            assert_eq!(ended.code, Some(0), "{ended:#?}");
        }
    }
    let (steps, evals) = measured(&whole);
    let losses = |steps: &[StepMetrics]| -> Vec<_> {
        steps
            .iter()
            .map(|step| (step.loss, step.grad_norm, step.tokens))
            .collect()
    };
    let (same, same_evals) = measured(&cut);
    assert_eq!(losses(&same), losses(&steps));
    let eval_losses =
        |evals: &[EvalMetrics]| -> Vec<_> { evals.iter().map(|eval| eval.eval_loss).collect() };
    assert_eq!(eval_losses(&same_evals), eval_losses(&evals));
    let (found, found_evals) = measured(&moved);
    let close = |a: f64, b: f64| (a - b).abs() <= 1e-5 * b;
    assert_eq!((found.len(), steps.len()), (4, 4));
    assert_eq!((found_evals.len(), evals.len()), (2, 2));
    for (found, step) in found.iter().zip(&steps) {
        assert_eq!(found.tokens, step.tokens);
        assert!(close(found.loss, step.loss), "{found:?}, {step:?}");
        // At most 3 of 22 tokens are masked, each with a sentinel, and a row ends with the eos.
        assert!((4..=4 * 7).contains(&step.tokens), "{step:?}");
        assert!(step.padding.unwrap() > 0.0);
    }
    for (found, eval) in found_evals.iter().zip(&evals) {
        assert!(close(found.eval_loss, eval.eval_loss));
    }
    let back = whole.path("back");
    succeed(&["convert", "export", text(&whole.path("run")), text(&back)]);
    succeed(&["verify", text(&whole.path("run")), text(&back)]);
    let config = fs::read_to_string(back.join("config.json")).unwrap();
    assert!(config.contains("T5ForConditionalGeneration"), "{config}");
    // A run starts from the exported model.
    let init = format!("model.init={}", back.display());
    let dir = format!("run.dir={}", whole.path("next").display());
    let mut args = vec!["train", "--layout", "tp1", "--steps", "1"];
    let settings = whole.settings();
    let kept = settings.iter().filter(|set| set.starts_with("data."));
    let sets = [&init, &dir].into_iter().chain(kept);
    args.extend(sets.flat_map(|set| ["--set", set.as_str()]));
    args.extend(["--set", "optimizer.warmup_steps=0"]);
    succeed(&args);
}

#[test]
fn other_samples_are_another_run() {
    let sentences = Sentences::new(30, fresh_seed()).for_t5();
    let sets = ["train.global_batch=4", "train.micro_batch=2"];
    assert_eq!(start(&sentences, "tp1", 2, &sets).code, Some(0));
    for set in [
        "data.masking.probability=0.2",
        "data.masking.max_ngram=3",
        "data.decoder_seq_len=16",
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

/// Masked words follow from their neighbours, which only the encoder reads; the order of the sentinels
/// and the frequencies of words alone leave 1.05 nats.
#[test]
fn a_decoder_learns_what_the_encoder_reads() {
    let sentences = Sentences::known(200, fresh_seed()).for_t5();
    let sets = [
        "train.global_batch=16",
        "train.micro_batch=16",
        "model.hidden=32",
        "model.ffn=64",
        "model.tied=false",
        "model.parts.init_std=0.1",
        "optimizer.lr=5e-3",
        "data.masking.max_ngram=1",
        "optimizer.warmup_steps=20",
        "data.seq_len=32",
    ];
    let ended = start(&sentences, "tp1", 400, &sets);
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    let (steps, _) = measured(&sentences);
    let last = steps[380..].iter().map(|step| step.loss).sum::<f64>() / 20.0;
    assert!(steps[0].loss > 2.5 && last < 0.85, "{last}");
}

/// Samples of the trainer are those of the data set, or of a blend of two, in order.
#[rstest]
fn the_samples_of_a_run_are_those_of_megatrons_data_set(#[values(false, true)] is_blend: bool) {
    let seed = fresh_seed();
    let sentences = Sentences::new(40, seed).for_t5();
    let other = Sentences::new(30, seed + 1).for_t5();
    let path = |of: &Sentences| of.path("text").display().to_string();
    let mut sets = sentences.settings();
    if is_blend {
        sets.retain(|set| !set.starts_with("data.path="));
        let part = |of, weight| format!("{{path = \"{}\", weight = {weight}}}", path(of));
        let parts = [part(&sentences, 1), part(&other, 2)];
        sets.push(format!("data.train=[{}]", parts.join(", ")));
    }
    sets.extend(["train.global_batch=4", "train.micro_batch=4"].map(String::from));
    let layers = sets.iter().fold(ConfigLayers::new(), |layers, set| {
        layers.with_set(set).unwrap()
    });
    let config = layers.load().unwrap();
    let tokenizer = Arc::new(HfTokenizer::open(sentences.path("vocab.txt")).unwrap());
    let source =
        |of: &Sentences| DocumentRange::all(Arc::new(IndexedDataset::open(path(of)).unwrap()));
    let set = T5DatasetConfig::new(24, 12, tokenizer, sentences.path("other"))
        .with_seed(config.run.seed)
        .with_num_samples(12);
    let expected: Box<dyn Samples> = match is_blend {
        true => {
            let blend = BlendedDatasetConfig::new(set).with_weights(vec![1.0, 2.0]);
            Box::new(
                blend
                    .build(&[source(&sentences), source(&other)], |_| ())
                    .unwrap(),
            )
        }
        false => Box::new(set.build(&source(&sentences), |_| ()).unwrap()),
    };
    let data = Arc::new(RunData::load(&config).unwrap());
    let groups = ProcessGroups::new(&Group::single(config.run.seed), Layout::SINGLE).unwrap();
    let device = Device::flex().autodiff();
    let mut trainer = Trainer::new(Arc::new(config), groups, device, data).unwrap();
    for step in 0..3 {
        let (numbers, samples) = trainer.micro_batch(0).unwrap();
        assert_eq!(numbers, 4 * step..4 * step + 4);
        for (number, sample) in numbers.zip(samples) {
            assert!(matches!(sample, Sample::T5(_)), "{sample:?}");
            assert_eq!(sample, expected.sample(number).unwrap());
        }
        trainer.step().unwrap();
    }
}
