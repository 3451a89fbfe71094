//! The rows of the table: what is run, and what it is compared with.

use burn::prelude::Device;

use crate::{
    collectives,
    layers::LayerCase,
    training::Training,
    world::{Over, Values, compare, without_panic},
};

/// The most that values may differ from Flex's, relative to them.
const TOLERANCE: f64 = 1e-4;

/// As [`TOLERANCE`], where numbers are rounded to bf16 or FP8: a sum in another order may round another
/// way.
const TOLERANCE_OF_ROUNDED: f64 = 2e-2;

/// A row: what is run on a device, and on Flex.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) name: String,
    what: What,
}

#[derive(Debug)]
enum What {
    Collectives(Over),
    Layer(LayerCase),
    Training(Training, f64),
}

impl Row {
    /// Runs the row on a device and compares with Flex: collectives bit for bit, the others with one
    /// rank. Returns the largest relative distance.
    pub(crate) fn run(&self, device: &Device) -> Result<f64, String> {
        let flex = Device::flex();
        let of = |found: Result<Values, String>, expected: Result<Values, String>, tolerance| {
            let expected = expected.map_err(|why| format!("on Flex: {why}"))?;
            compare(&found?, &expected, tolerance)
        };
        without_panic(|| match &self.what {
            What::Collectives(over) => {
                let expected = collectives::run(Over::Threads, &flex);
                of(collectives::run(*over, device), expected, 0.0)
            }
            What::Layer(layer) => of(layer.run(2, device), layer.run(1, &flex), TOLERANCE),
            What::Training(training, tolerance) => {
                let expected = training.alone().run(&flex);
                of(training.run(device), expected, *tolerance)
            }
        })
    }
}

/// Trainings, with the names of their rows.
const TRAININGS: &[(&str, Training)] = &[
    ("Llama, AdamW", Training::new("tp2-dp2", &[])),
    (
        "Llama, sequence parallel, fused loss",
        Training::new("tp2-sp", &["train.fused_linear_cross_entropy=true"]),
    ),
    ("Llama, over TCP", Training::new("tp2", &[]).over_tcp()),
    ("Llama, pipeline", Training::new("pp2", &[])),
    ("Llama, context parallel", Training::new("cp2", &[])),
    ("Llama, ZeRO-1", Training::new("dp2", &["parallel.zero=1"])),
    (
        "Llama, ZeRO-2, by checkpoints to Flex and back",
        Training::new("tp2-dp2", &["parallel.zero=2"]).moving(),
    ),
    ("Llama, ZeRO-3", Training::new("dp2", &["parallel.zero=3"])),
    (
        "Llama, Muon, recomputed layers",
        Training::new("tp2", &["optimizer.name=muon", "recompute.method=uniform"]),
    ),
    (
        "Llama, Lion",
        Training::new("tp2", &["optimizer.name=lion"]),
    ),
    (
        "GPT-2, dropout, SGD",
        Training::new(
            "tp2",
            &[
                "model.family=gpt2",
                "model.kv_heads=4",
                "train.hidden_dropout=0.1",
                "train.attention_dropout=0.1",
                "optimizer.name=sgd",
            ],
        ),
    ),
    ("Gemma 2", Training::new("tp2-sp", &["model.family=gemma2"])),
    (
        "DeepSeek-V3, latent attention, expert parallel",
        Training::new(
            "dp2-ep2",
            &[
                "model.family=deepseek_v3",
                "model.kv_heads=4",
                "model.experts.num=4",
                "moe.bias_update=sign",
            ],
        ),
    ),
    (
        "gpt-oss, sinks, experts split",
        Training::new("tp2-sp", &["model.family=gpt_oss", "model.experts.num=4"]),
    ),
    (
        "Mixtral, expert parallel",
        Training::new(
            "dp2-ep2",
            &[
                "model.family=mixtral",
                "model.experts.num=4",
                "model.experts.top_k=2",
            ],
        ),
    ),
];

/// Trainings whose numbers are rounded.
const ROUNDED: &[(&str, Training)] = &[
    (
        "Llama in FP8, one scale per matrix",
        Training::new("tp2-sp", &["precision.recipe=tensorwise"]),
    ),
    ("Llama in bf16", Training::new("tp2", &["train.dtype=bf16"])),
];

/// All rows, in the order of the table.
pub(crate) fn rows() -> Vec<Row> {
    let row = |name: &str, what| Row {
        name: name.to_owned(),
        what,
    };
    let mut rows = vec![
        row("collectives, 3 threads", What::Collectives(Over::Threads)),
        row(
            "collectives, 3 ranks over TCP",
            What::Collectives(Over::Tcp),
        ),
    ];
    rows.extend(LayerCase::ALL.map(|layer| row(layer.name(), What::Layer(layer))));
    for (trainings, tolerance) in [(TRAININGS, TOLERANCE), (ROUNDED, TOLERANCE_OF_ROUNDED)] {
        for (name, training) in trainings {
            let name = format!("training: {name} ({})", training.layout);
            rows.push(row(&name, What::Training(*training, tolerance)));
        }
    }
    rows
}
