//! Every layout trains an encoder-decoder model as one rank does.

use megaburn::mesh::Layout;
use rstest::rstest;

use crate::{
    encoders::corpus::Sentences,
    layouts::grid::{compare_within, train},
};
use megaburn_test_support::text::fresh_seed;

/// The layouts, with settings of the run.
const LAYOUTS: [(&str, &[&str]); 21] = [
    ("tp1", &["train.micro_batch=1"]),
    ("dp2", &["train.micro_batch=1"]),
    ("dp3", &["train.micro_batch=2"]),
    ("tp2", &["train.micro_batch=3"]),
    ("tp4", &["train.micro_batch=2"]),
    ("tp2-sp", &["train.micro_batch=2"]),
    ("tp4-sp", &["train.micro_batch=6"]),
    ("pp2", &["train.micro_batch=1"]),
    ("pp4", &["train.micro_batch=2"]),
    ("tp2-pp2-sp", &["train.micro_batch=2"]),
    ("tp2-pp2-dp2-sp", &["train.micro_batch=1"]),
    ("pp2", &["train.micro_batch=1", "parallel.chunks=2"]),
    ("dp2", &["train.micro_batch=1", "parallel.zero=1"]),
    ("dp4", &["train.micro_batch=1", "train.pad_batch=true"]),
    ("dp2", &["train.micro_batch=3", "parallel.zero=3"]),
    (
        "tp2-dp3-sp",
        &[
            "train.micro_batch=1",
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
    // A group of three layers would reach from the encoder into the decoder.
    (
        "tp2-sp",
        &[
            "train.micro_batch=3",
            "recompute.method=uniform",
            "recompute.num_layers=3",
            "recompute.offload=true",
        ],
    ),
    ("pp2", &["train.micro_batch=2", "parallel.schedule=zb-v"]),
    (
        "tp2-pp2-dp3-sp",
        &[
            "train.micro_batch=1",
            "parallel.schedule=zb-h1",
            "parallel.zero=2",
        ],
    ),
];

#[rstest]
#[case::t5(&[])]
#[case::first_version(&[
    "model.parts.activation=relu",
    "model.tied=true",
    "model.parts.logits_scaling=4",
])]
#[case::more_encoder(&["model.encoder_layers=3", "data.decoder_seq_len=8"])]
#[case::of_megatron(&[
    "model.parts.positions=learned",
    "model.parts.norm=layer",
    "model.parts.activation=gelu",
    "model.parts.qkv_bias=true",
    "model.parts.output_bias=true",
    "model.parts.mlp_bias=true",
])]
#[case::rotated(&["model.parts.positions=rotary", "model.kv_heads=2"])]
#[case::norms_of_the_stream(&["model.parts.norm_placement=post", "model.parts.embedding_norm=true"])]
#[case::dropped(&["train.hidden_dropout=0.1", "train.attention_dropout=0.2"])]
fn every_layout_trains_an_encoder_decoder_as_one_rank_does(#[case] sets: &[&str]) {
    let sentences = Sentences::new(40, fresh_seed()).for_t5();
    let config = |more: &[&str]| {
        let batch = ["train.global_batch=6"];
        sentences.config(&[&batch, sets, more].concat())
    };
    let expected = train(config(&["train.micro_batch=6"]), Layout::SINGLE);
    assert!(expected.steps[2].loss != expected.steps[0].loss);
    for (layout, more) in LAYOUTS {
        let found = train(config(more), layout.parse().unwrap());
        let name = format!("{sets:?}, {layout}, {more:?}");
        // A bias begins at zero, so its distance is one of three updates: 7.3e-5 was seen.
        compare_within(&found, &expected, &name, 1.5e-4);
    }
}
