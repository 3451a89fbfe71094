//! Every layout trains an encoder as one rank does.

use megaburn::mesh::Layout;
use rstest::rstest;

use super::corpus::Sentences;
use crate::layouts::grid::{Trained, compare_within, train};
use megaburn_test_support::text::fresh_seed;

/// The layouts, with settings of the run.
const LAYOUTS: [(&str, &[&str]); 19] = [
    ("tp1", &["train.micro_batch=1"]),
    ("dp2", &["train.micro_batch=1"]),
    ("dp3", &["train.micro_batch=2"]),
    ("tp2", &["train.micro_batch=3"]),
    ("tp4", &["train.micro_batch=2"]),
    ("tp2-sp", &["train.micro_batch=2"]),
    ("tp4-sp", &["train.micro_batch=6"]),
    ("pp2", &["train.micro_batch=1"]),
    ("tp2-pp2-sp", &["train.micro_batch=2"]),
    ("tp2-pp2-dp2-sp", &["train.micro_batch=1"]),
    ("pp2", &["train.micro_batch=1", "parallel.chunks=2"]),
    (
        "tp2-pp2-sp",
        &["train.micro_batch=1", "parallel.schedule=zb-h1"],
    ),
    ("pp2-dp2", &["train.micro_batch=1", "parallel.zero=3"]),
    ("dp2", &["train.micro_batch=1", "parallel.zero=1"]),
    ("dp3", &["train.micro_batch=1", "parallel.zero=3"]),
    ("dp2", &["train.micro_batch=2", "train.pad_batch=true"]),
    (
        "tp2-dp2-sp",
        &[
            "train.micro_batch=3",
            "parallel.zero=3",
            "parallel.bucket_size=3000",
        ],
    ),
    (
        "tp2-sp",
        &[
            "train.micro_batch=2",
            "recompute.modules=[\"norm\", \"activation\", \"core_attention\", \"mlp\"]",
        ],
    ),
    (
        "pp2",
        &[
            "train.micro_batch=1",
            "recompute.method=uniform",
            "recompute.num_layers=1",
        ],
    ),
];

#[rstest]
#[case::bert(&[])]
#[case::without_binary_head(&["model.parts.binary_head=false", "model.parts.token_types=0"])]
#[case::before(&["model.family=megatron-bert"])]
#[case::unlike_any(&[
    "model.parts.norm=rms",
    "model.parts.positions=rotary",
    "model.parts.activation=relu",
    "model.parts.mlp_bias=false",
    "model.tied=false",
    "model.kv_heads=2",
])]
#[case::dropped(&["train.hidden_dropout=0.1", "train.attention_dropout=0.2"])]
fn every_layout_trains_an_encoder_as_one_rank_does(#[case] sets: &[&str]) {
    let sentences = Sentences::new(40, fresh_seed());
    let config = |more: &[&str]| {
        // Four stages have a layer each.
        let batch = ["train.global_batch=6", "model.layers=4"];
        sentences.config(&[&batch, sets, more].concat())
    };
    let expected = train(config(&["train.micro_batch=6"]), Layout::SINGLE);
    assert!(expected.steps[2].loss != expected.steps[0].loss);
    for (layout, more) in LAYOUTS {
        let found = train(config(more), layout.parse().unwrap());
        let name = format!("{sets:?}, {layout}, {more:?}");
        // The gradients of the heads are differences of a few rows, which cancel.
        compare_within(&found, &expected, &name, 5e-5);
        compare_order(&found, &expected, &name);
    }
}

/// Compares the losses of the binary head.
fn compare_order(found: &Trained, expected: &Trained, name: &str) {
    for (found, expected) in found.steps.iter().zip(&expected.steps) {
        let (Some(found), Some(expected)) = (found.sop_loss, expected.sop_loss) else {
            assert_eq!(found.sop_loss, expected.sop_loss, "{name}");
            continue;
        };
        let relative = (found - expected).abs() / expected;
        assert!(relative <= 1e-5, "{name}: {found}, on one rank {expected}");
    }
}
