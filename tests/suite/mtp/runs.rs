//! Runs with multi-token prediction: resumed, evaluated, exported.

use std::fs;

use burn::{
    prelude::{Device, Int},
    tensor::{Tensor, TensorData},
};
use megaburn::{
    collective::Group,
    mesh::PackedRows,
    models::{
        DecoderConfig, Family,
        decoder::{ModelOptions, MtpTargets, StageLosses, shift_for_depth},
    },
    parallel::{BatchContext, PackedDocuments, Router},
    report::metrics::{EvalMetrics, MetricsRecord, read_metrics},
};
use rstest::rstest;
use serde_json::Value;

use crate::{
    models::round_trip::{succeed, text},
    runs::child::Ranks,
    runs::resume::{assert_goes_on, train},
};
use megaburn_test_support::run::Run;

const DEEPSEEK: [&str; 6] = [
    "model.mtp_layers=2",
    "model.family=deepseek_v3",
    "model.kv_heads=4",
    "model.experts.layer_freq=[0]*1+[1]*1",
    "moe.bias_update=sign",
    "moe.global_aux_loss=0.02",
];

fn evaluations(run: &Run) -> Vec<EvalMetrics> {
    let records = read_metrics(run.path("run/metrics.jsonl"))
        .unwrap()
        .into_iter();
    let eval = |record| match record {
        MetricsRecord::Eval(eval) => Some(eval),
        MetricsRecord::Step(_) => None,
    };
    records.filter_map(eval).collect()
}

/// Every pair of values of two columns occurs.
#[rstest]
#[case("tp1", "train.dtype=f32", "parallel.zero=0")]
#[case("tp1", "train.dtype=bf16", "parallel.zero=3")]
#[case("tp2-dp2-ep4-sp", "train.dtype=f32", "parallel.zero=3")]
#[case("tp2-dp2-ep4-sp", "train.dtype=bf16", "parallel.zero=0")]
#[case("pp2-dp2-ep2", "train.dtype=f32", "parallel.zero=0")]
#[case("pp2-dp2-ep2", "train.dtype=bf16", "parallel.zero=3")]
fn a_resumed_run_equals_the_uninterrupted_one_to_the_bit(
    #[case] layout: &str,
    #[case] dtype: &str,
    #[case] zero: &str,
) {
    let whole = Run::new();
    let halves = Run::new();
    let sets = [&DEEPSEEK[..], &[dtype, zero]].concat();
    Ranks::threads(&whole.args(layout, 8, &sets)).finish();
    Ranks::threads(&halves.args(layout, 4, &sets)).finish();
    Ranks::threads(&halves.args(layout, 8, &sets)).finish();
    assert_eq!(
        (whole.numbers().len(), whole.numbers()),
        (8, halves.numbers())
    );
    assert_eq!(whole.tensors(8), halves.tensors(8));
    let further = |run: &Run| {
        run.steps()
            .into_iter()
            .map(|step| step.mtp_losses)
            .collect::<Vec<_>>()
    };
    assert_eq!(further(&whole), further(&halves));
    // One dense layer, one layer with experts, and two depths.
    assert_eq!(
        whole.steps().pop().unwrap().experts.unwrap().busiest.len(),
        3
    );
}

#[test]
fn runs_go_on_under_other_layouts() {
    const STEPS: u64 = 8;
    let run = Run::new();
    let config = |layout: &str| {
        let mut config = run.config(layout, STEPS);
        config.model.mtp_layers = 2;
        config.model.tied = false;
        config
    };
    let whole = train(config("pp2-dp2"), STEPS, STEPS / 2);
    for layout in ["tp1", "tp2-sp", "cp2", "pp2", "dp4", "tp2-pp2-dp2-sp"] {
        let resumed = train(config(layout), STEPS, 0);
        assert_goes_on(&resumed, &whole, STEPS / 2, layout);
    }
}

/// The reported loss is the main model's, so it is the same with and without multi-token
/// prediction.
#[test]
fn evaluation_reports_each_depth_beside_the_loss() {
    let with = Run::new();
    let without = Run::new();
    let many = Run::new();
    let sets = [
        "model.mtp_layers=2",
        "train.eval_interval=1",
        "optimizer.eps=1e-5",
        "optimizer.lr=1e-3",
    ];
    Ranks::threads(&with.args("tp1", 3, &sets)).finish();
    Ranks::threads(&without.args("tp1", 3, &sets[1..])).finish();
    let of_both = with.steps();
    let of_one = without.steps();
    assert_eq!(of_both[0].loss.to_bits(), of_one[0].loss.to_bits());
    assert!(
        of_both[2].loss != of_one[2].loss,
        "further tokens are learnt from"
    );
    assert!(of_one.iter().all(|step| step.mtp_losses.is_empty()));
    let [both, one] = [&with, &without].map(evaluations);
    assert_eq!((both.len(), one.len()), (3, 3));
    assert!(one.iter().all(|eval| eval.mtp_losses.is_empty()));
    // Of 16 tokens, 15 have a label for the first depth and 14 for the second. Before training all
    // tokens are about equally likely.
    for (depth, part) in [(0, 15.0 / 16.0), (1, 14.0 / 16.0)] {
        let found = both[0].mtp_losses[depth] / both[0].eval_loss;
        assert!(
            (found / part - 1.0).abs() < 0.02,
            "depth {depth}: {found}, not {part}"
        );
    }
    let line = fs::read_to_string(with.path("run/metrics.jsonl")).unwrap();
    assert_eq!(line.matches("\"mtp_losses\":[").count(), 6);
    for layout in ["tp2-dp2-sp", "pp2", "cp2"] {
        Ranks::threads(&many.args(layout, 3, &sets)).finish();
        for (found, expected) in evaluations(&many).iter().zip(&both) {
            let pairs = found.mtp_losses.iter().zip(&expected.mtp_losses);
            for (found, expected) in pairs.chain([(&found.eval_loss, &expected.eval_loss)]) {
                assert!(
                    (found - expected).abs() <= 1e-5 * expected,
                    "{layout}: {found}, {expected}"
                );
            }
        }
        fs::remove_dir_all(many.path("run")).unwrap();
    }
}

#[rstest]
#[case::llama(&["model.tied=false"], "model.layers.2.shared_head.head.weight", 3)]
#[case::tied(&[], "model.layers.3.embed_tokens.weight", 3)]
#[case::gpt2(&["model.family=gpt2", "model.kv_heads=4"], "transformer.h.3.enorm.bias", 6)]
fn every_family_is_exported_and_comes_back(
    #[case] sets: &[&str],
    #[case] name: &str,
    #[case] norms: usize,
) {
    let run = Run::new();
    let sets = [&["model.mtp_layers=2"], sets].concat();
    Ranks::threads(&run.args("pp2", 2, &sets)).finish();
    let [from, hf, again] = ["run", "hf", "again"].map(|name| run.path(name));
    succeed(&["convert", "export", text(&from), text(&hf)]);
    let config: Value = serde_json::from_slice(&fs::read(hf.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["num_nextn_predict_layers"], 2);
    let tensors = crate::models::published::read(&hf.join("model.safetensors"));
    assert!(tensors.contains_key(name), "{:?}", tensors.keys());
    let of_norms = |name: &&String| {
        [".enorm.", ".hnorm.", "shared_head.norm."]
            .iter()
            .any(|of| name.contains(of))
    };
    assert_eq!(tensors.keys().filter(of_norms).count(), 2 * norms);
    succeed(&["convert", "import", text(&hf), text(&again)]);
    succeed(&["verify", text(&from), text(&again)]);
}

const VOCAB: usize = 32;

/// Tokens, labels, and the inputs of two depths, for rows of equal length that contain documents
/// with these bounds.
fn batch(
    rows: &[Vec<i64>],
    bounds: &[usize],
    device: &Device,
) -> ([Tensor<2, Int>; 2], [MtpTargets; 2]) {
    let shape = [rows[0].len(), rows.len()];
    let ids = |depth: usize, none: i64| -> Vec<i64> {
        let rows: Vec<_> = rows
            .iter()
            .map(|row| shift_for_depth(row, bounds, depth, none))
            .collect();
        let place = |at: usize| rows.iter().map(move |row| row[at]);
        (0..shape[0]).flat_map(place).collect()
    };
    let tensor = |ids| Tensor::<2, Int>::from_data(TensorData::new(ids, shape), device);
    let ahead = [1, 2].map(|depth| {
        let labels = ids(depth + 1, -100);
        let counted = Some(labels.iter().map(|label| *label != -100).collect());
        MtpTargets {
            tokens: tensor(ids(depth, 0)),
            labels: tensor(labels),
            counted,
        }
    });
    ([tensor(ids(0, 0)), tensor(ids(1, -100))], ahead)
}

/// The losses of the model and of two depths.
fn losses(rows: &[Vec<i64>], bounds: &[usize], packed: bool) -> Vec<f64> {
    let device = Device::flex();
    let heads = 2;
    let kv_heads = 2;
    let head_dim = 8;
    let hidden = 16;
    let ffn = 24;
    let layers = 2;
    let sizes = DecoderConfig {
        vocab: VOCAB,
        hidden,
        ffn,
        layers,
        heads,
        ..Family::LLAMA.template()
    };
    let config = DecoderConfig {
        kv_heads,
        head_dim,
        mtp_layers: 2,
        ..sizes
    };
    let model = config
        .init(&Group::single(3), &ModelOptions::default(), &device)
        .unwrap();
    let documents = PackedRows::new(vec![bounds.to_vec(); rows.len()]).unwrap();
    let context = BatchContext {
        documents: packed.then(|| PackedDocuments::new(documents)),
        ..BatchContext::default()
    };
    let bounds = if packed {
        bounds.to_vec()
    } else {
        vec![0, rows[0].len()]
    };
    let ([tokens, labels], ahead) = batch(rows, &bounds, &device);
    let x = model.embed(tokens, &context);
    let x = model.forward_stage(0, x, &context);
    let StageLosses { main, mtp, .. } = model.losses(x, labels, &ahead, &context);
    [main]
        .into_iter()
        .chain(mtp)
        .map(|sum| sum.into_scalar::<f32>().into())
        .collect()
}

#[test]
fn documents_of_a_row_do_not_see_each_other_at_any_depth() {
    let row = |seed: i64, len: i64| {
        (0..len)
            .map(|at| (seed + at * at * 7) % VOCAB as i64)
            .collect::<Vec<_>>()
    };
    let short = row(3, 6);
    let long = row(8, 10);
    let both = vec![[short.clone(), long.clone()].concat()];
    let packed = losses(&both, &[0, 6, 16], true);
    let alone = [
        losses(&[short], &[0, 6], true),
        losses(&[long], &[0, 10], true),
    ];
    let as_one = losses(&both, &[0, 6, 16], false);
    for (depth, packed) in packed.iter().enumerate() {
        let sum = alone[0][depth] + alone[1][depth];
        assert!(
            (packed - sum).abs() < 1e-4,
            "depth {depth}: {packed}, alone {sum}"
        );
        assert!((packed - as_one[depth]).abs() > 1e-2, "depth {depth}");
    }
}

#[test]
fn experts_see_nothing_of_tokens_without_a_label() {
    let device = Device::flex().autodiff();
    let config = DecoderConfig {
        vocab: VOCAB,
        mtp_layers: 2,
        ..Family::DEEPSEEK_V3.template()
    };
    let model = config
        .init(&Group::single(3), &ModelOptions::default(), &device)
        .unwrap();
    let row: Vec<i64> = (0..8).collect();
    let ([tokens, labels], ahead) = batch(&[row], &[0, 8], &device.clone().inner());
    let context = BatchContext {
        loss_factor: Some(1.0),
        ..BatchContext::default()
    };
    let x = model.forward_stage(0, model.embed(tokens, &context), &context);
    let losses = model.losses(x, labels, &ahead, &context);
    drop(losses.total(0.3, 0.0).backward());
    let seen = |(index, router): (usize, &Router)| {
        (
            index,
            router.load().take().unwrap().tokens.iter().sum::<u64>(),
        )
    };
    // Assignments with two experts per token: three layers with experts, then the two depths, which
    // have 6 and 5 labels.
    let expected = [(1, 16), (2, 16), (3, 16), (4, 12), (5, 10)];
    assert_eq!(model.routers().map(seen).collect::<Vec<_>>(), expected);
}
