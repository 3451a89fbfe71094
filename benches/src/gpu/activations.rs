//! Activation memory that forward holds for backward on a GPU, compared with the formula of
//! `megaburn::models::activation_memory`, and the cost of recomputing some of it.

use std::{
    collections::BTreeMap, convert::Infallible, ffi::OsString, process::ExitCode, time::Instant,
};

use burn::{
    prelude::{Device, Int},
    tensor::{DType, Tensor, TensorData},
};
use clap::Parser;
use megaburn::{
    collective::Group,
    cuda,
    models::{
        Decoder, DecoderConfig, Family,
        activation_memory::{ActivationMemory, StageEnds},
        decoder::{ModelOptions, Recompute, RecomputeBlocks},
    },
    parallel::{load_params, read_params},
};

use super::ranks::gib;
use crate::{
    Failure,
    report::{Args, Report, Table},
};

#[derive(Debug, Parser)]
struct ActivationsArgs {
    #[command(flatten)]
    report: Args,
    /// Layers of Llama-3-8B's shape.
    #[arg(long, default_value_t = 4)]
    layers: usize,
    /// Tokens of a sequence.
    #[arg(long, default_value_t = 8192)]
    seq_len: usize,
    /// Sequences of a micro-batch.
    #[arg(long, default_value_t = 1)]
    micro_batch: usize,
    /// Number of timed passes.
    #[arg(long, default_value_t = 5)]
    passes: usize,
}

/// Runs the measurement.
pub fn main(command: Vec<OsString>) -> ExitCode {
    match run(&ActivationsArgs::parse_from(command)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The recompute settings to measure, by name.
fn ways(layers: usize) -> Vec<(String, Recompute)> {
    let none = Recompute::default();
    let blocks = |blocks| Recompute {
        blocks: Some(blocks),
        ..none
    };
    let half = layers / 2;
    vec![
        ("nothing".into(), none),
        ("norm".into(), Recompute { norm: true, ..none }),
        (
            "activation".into(),
            Recompute {
                activation: true,
                ..none
            },
        ),
        (
            "norm, activation".into(),
            Recompute {
                norm: true,
                activation: true,
                ..none
            },
        ),
        (
            "core_attention".into(),
            Recompute {
                core_attention: true,
                ..none
            },
        ),
        ("mlp".into(), Recompute { mlp: true, ..none }),
        (
            "norm, mlp".into(),
            Recompute {
                norm: true,
                mlp: true,
                ..none
            },
        ),
        (
            format!("block {half}"),
            blocks(RecomputeBlocks::Block(half)),
        ),
        ("uniform 1".into(), blocks(RecomputeBlocks::Uniform(1))),
        ("uniform 2".into(), blocks(RecomputeBlocks::Uniform(2))),
        (
            "uniform 1, offload".into(),
            Recompute {
                offload: true,
                ..blocks(RecomputeBlocks::Uniform(1))
            },
        ),
    ]
}

fn run(args: &ActivationsArgs) -> Result<(), Failure> {
    let ActivationsArgs {
        layers,
        seq_len,
        micro_batch,
        passes,
        ..
    } = *args;
    cuda::start()?;
    let device = Device::cuda(0).autodiff();
    let config = DecoderConfig {
        vocab: 128_256,
        hidden: 4096,
        ffn: 14_336,
        layers,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        max_seq_len: seq_len,
        ..Family::LLAMA.template()
    };
    let about = format!(
        "Forward and backward of {layers} layers of Llama-3-8B's shape (vocabulary 128256, the \
        loss without all logits) in bf16, {micro_batch} sequences of {seq_len} tokens, on one \
        GPU. \"Held\" is the tensor memory after the forward pass minus that before; the formula \
        is `megaburn::models::activations`; the paper's formula is for a layer without recompute \
        (Korthikanti et al. 2022, with dropout masks, which this model does not have), times the \
        layers. The time is the median of {passes} passes."
    );
    let mut report = Report::new("activations", &about);
    let head = [
        "computed again",
        "held GiB",
        "formula",
        "held / formula",
        "paper's",
        "ms",
        "of nothing",
    ];
    let mut table = Table::new(
        format!("{layers} layers, {micro_batch} x {seq_len} tokens"),
        &head,
    );
    let mut of_nothing = None;
    for (name, recompute) in ways(layers) {
        let options = ModelOptions {
            recompute,
            fused_linear_cross_entropy: true,
            ..ModelOptions::default()
        };
        let model = in_bf16(config.init(&Group::single(0), &options, &device)?);
        let activations = ActivationMemory {
            recompute,
            fused_loss: true,
            ..ActivationMemory::new(config.clone(), seq_len, micro_batch)
        };
        let formula = activations.stage(
            0..layers,
            StageEnds {
                first: true,
                last: true,
            },
            1,
        ) as f64;
        let papers = (layers * activations.layer_by_paper_formula()) as u64;
        let (held, milliseconds) = measured(&model, args, &device)?;
        let nothing = *of_nothing.get_or_insert(milliseconds);
        table.row(vec![
            name,
            format!("{:.3}", gib(held)),
            format!("{:.3}", gib(formula as u64)),
            format!("{:.3}", held as f64 / formula),
            format!("{:.3}", gib(papers)),
            format!("{milliseconds:.1}"),
            format!("{:.3}", milliseconds / nothing),
        ]);
    }
    report.table(&table);
    report.finish(&args.report)
}

fn in_bf16(model: Decoder) -> Decoder {
    let mut params: BTreeMap<_, _> = read_params(&model).into_iter().collect();
    let next = |path: &str, _: &[usize]| {
        let data = params.remove(path).expect("each value is read once");
        Ok::<_, Infallible>(data.convert_dtype(DType::BF16))
    };
    match load_params(model, next) {
        Ok(model) => model,
        Err(never) => match never {},
    }
}

/// The bytes held after forward, and the median milliseconds of a forward and its backward.
fn measured(
    model: &Decoder,
    args: &ActivationsArgs,
    device: &Device,
) -> Result<(u64, f64), Failure> {
    let plain = device.clone().inner();
    let shape = [args.seq_len, args.micro_batch];
    let ids = |factor: usize| {
        let ids = (0..shape[0] * shape[1])
            .map(|i| (i * factor % 128_251) as i64)
            .collect();
        Tensor::<2, Int>::from_data(TensorData::new::<i64, _>(ids, shape), &plain)
    };
    let tokens = ids(7919);
    let labels = ids(104_729);
    let allocated = || cuda::memory::allocated(&plain).ok_or("the tensor is not on a GPU");
    let mut held = 0;
    let mut times = Vec::new();
    // The first three passes load kernels and tune GEMMs, so they are not timed.
    for pass in 0..args.passes + 3 {
        plain.sync()?;
        let before = allocated()?;
        let started = Instant::now();
        let loss = model.loss(tokens.clone(), labels.clone());
        held = allocated()?.saturating_sub(before);
        drop(loss.backward());
        plain.sync()?;
        if pass >= 3 {
            times.push(started.elapsed().as_secs_f64() * 1e3);
        }
    }
    times.sort_by(f64::total_cmp);
    Ok((held, times[times.len() / 2]))
}
