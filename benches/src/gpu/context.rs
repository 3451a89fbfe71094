//! Times a rank's computation of ring attention, compared with its share of attention on one GPU,
//! and derives how fast keys and values must arrive to be hidden. It runs on one GPU and sends
//! nothing.
//!
//! ```sh
//! bench-context --tokens 4096,32768 --ranks 2,4,8
//! ```

use std::{array, ffi::OsString, process::ExitCode};

use burn::{
    prelude::Device,
    tensor::{DType, Distribution, Tensor},
};
use clap::{Parser, builder::RangedU64ValueParser};
use megaburn::{
    cuda::{self, CudaQueue, timing::elapsed},
    kernels::{
        AttentionOptions, OnlineSoftmaxMerge, PartialAttention, add_rows, partial_attention,
        partial_attention_gradients,
    },
};

use crate::{
    Failure,
    report::{Args, Report, Table},
};

#[derive(Debug, Parser)]
struct ContextArgs {
    #[command(flatten)]
    report: Args,
    /// Tokens of a rank.
    #[arg(long, value_delimiter = ',', default_value = "2048,4096,8192,32768")]
    tokens: Vec<usize>,
    /// Context-parallel ranks that split a sequence.
    #[arg(long, value_delimiter = ',', default_value = "2,4,8", value_parser = RangedU64ValueParser::<usize>::new().range(2..))]
    ranks: Vec<usize>,
    /// Number of timed passes.
    #[arg(long, default_value_t = 5, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    passes: usize,
}

/// Runs the measurement.
pub fn main(command: Vec<OsString>) -> ExitCode {
    match run(&ContextArgs::parse_from(command)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Query heads of Llama-3-8B.
const HEADS: usize = 32;
/// Key/value heads of Llama-3-8B.
const KV_HEADS: usize = 8;
/// Head size of Llama-3-8B.
const WIDTH: usize = 128;

/// A block of attention: first query and count, first key and count, and whether it is causal.
#[derive(Clone, Copy)]
struct Part {
    queries: [usize; 2],
    keys: [usize; 2],
    causal: bool,
}

/// The blocks that rank `rank` computes, in ring order; see `megaburn_parallel`'s
/// `context/parts.rs`.
fn ring(rank: usize, ranks: usize, len: usize) -> Vec<Part> {
    let all = [0, len];
    let front = [0, len / 2];
    let back = [len / 2, len - len / 2];
    let of_step = |step: usize| match (rank + ranks - step) % ranks {
        other if other == rank => Part {
            queries: all,
            keys: all,
            causal: true,
        },
        other if other < rank => Part {
            queries: all,
            keys: front,
            causal: false,
        },
        _ => Part {
            queries: back,
            keys: all,
            causal: false,
        },
    };
    (0..ranks).map(of_step).collect()
}

fn rows(x: &Tensor<4>, [start, len]: [usize; 2]) -> Tensor<4> {
    if len == x.dims()[0] {
        x.clone()
    } else {
        x.clone().narrow(0, start, len)
    }
}

fn options(part: &Part) -> AttentionOptions {
    AttentionOptions {
        causal: part.causal,
        ..AttentionOptions::default()
    }
}

/// Queries, keys and values of a sequence, and the gradient of the output.
struct Inputs {
    qkv: [Tensor<4>; 3],
    dout: Tensor<4>,
}

impl Inputs {
    fn random(len: usize, device: &Device) -> Self {
        let normal = |heads| {
            let normal = Distribution::Normal(0.0, 1.0);
            Tensor::<4>::random([len, 1, heads, WIDTH], normal, device).cast(DType::BF16)
        };
        Self {
            qkv: [HEADS, KV_HEADS, KV_HEADS].map(normal),
            dout: normal(HEADS),
        }
    }

    fn forward(&self, parts: &[Part]) -> PartialAttention {
        let [q, k, v] = &self.qkv;
        let mut sum = OnlineSoftmaxMerge::new(q.dims());
        for part in parts {
            let [k, v] = [k, v].map(|x| rows(x, part.keys));
            sum.add(
                part.queries[0],
                partial_attention(rows(q, part.queries), k, v, options(part)),
            );
        }
        sum.finish(DType::BF16)
    }

    /// The gradients, summed in f32. Those for keys and values of all blocks are added to one sum,
    /// although a ring keeps one per rank; the amount of addition is equal.
    fn backward(&self, parts: &[Part], whole: &PartialAttention) -> [Tensor<4>; 3] {
        let mut sums: [Option<Tensor<4>>; 3] = [None, None, None];
        for part in parts {
            let taken = [part.queries, part.keys, part.keys];
            let inputs: [_; 3] = array::from_fn(|i| rows(&self.qkv[i], taken[i]));
            let lse = whole
                .lse
                .clone()
                .narrow(2, part.queries[0], part.queries[1]);
            let of_queries = PartialAttention {
                out: rows(&whole.out, part.queries),
                lse,
            };
            let dout = rows(&self.dout, part.queries);
            let found = partial_attention_gradients(inputs, of_queries, dout, options(part));
            for ((sum, found), [start, _]) in sums.iter_mut().zip(found).zip(taken) {
                *sum = Some(match sum.take() {
                    None => found.cast(DType::F32),
                    Some(sum) => add_rows(sum, start, found),
                });
            }
        }
        sums.map(|sum| sum.expect("there is at least one part"))
    }
}

/// Mean milliseconds of a forward and of a backward pass.
fn times(
    inputs: &Inputs,
    parts: &[Part],
    passes: usize,
    queue: &CudaQueue,
) -> Result<[f64; 2], Failure> {
    let mut sums = [0.0; 2];
    for pass in 0..passes + 2 {
        let mut whole = None;
        let forward = elapsed(queue, || whole = Some(inputs.forward(parts)))?;
        let whole = whole.expect("the result was computed");
        let backward = elapsed(queue, || drop(inputs.backward(parts, &whole)))?;
        if pass >= 2 {
            sums[0] += f64::from(forward) / passes as f64;
            sums[1] += f64::from(backward) / passes as f64;
        }
    }
    Ok(sums)
}

fn run(args: &ContextArgs) -> Result<(), Failure> {
    cuda::start()?;
    let device = Device::cuda(0);
    let queue = CudaQueue::for_device(&device).ok_or("the device is not a CUDA device")?;
    let about = format!(
        "Causal attention of Llama-3-8B's heads in bf16, forward and backward, as a rank in the \
        middle of a ring computes it, on one GPU and without communication: attention to its own \
        chunk and to the other ranks' chunks, merged in f32, gradients summed in f32. `of one` \
        compares this with the same part of attention to the full sequence on one GPU. The last \
        columns are what a rank sends per step, and the bandwidth needed to hide it behind the \
        computation; NVLink of an H200 has 450 GB/s per direction. Milliseconds of the device, \
        the mean of {} passes.",
        args.passes
    );
    let head = [
        "tokens of a rank",
        "ranks",
        "forward",
        "TFLOP/s",
        "backward",
        "TFLOP/s",
        "of one, fwd",
        "bwd",
        "MB, fwd",
        "bwd",
        "hidden from GB/s, fwd",
        "bwd",
    ];
    let mut table = Table::new("ring attention, a rank's part", &head);
    for &len in &args.tokens {
        let inputs = Inputs::random(len, &device);
        let own = times(&inputs, &ring(0, 1, len), args.passes, &queue)?;
        for &ranks in &args.ranks {
            let parts = ring(ranks / 2, ranks, len);
            let found = times(&inputs, &parts, args.passes, &queue)?;
            let seq_len = len * ranks;
            let passes = args.passes.min(2);
            let whole = Inputs::random(seq_len, &device);
            let whole = times(&whole, &ring(0, 1, seq_len), passes, &queue)?;
            // Forward takes two GEMMs over all visible pairs and backward five: the factor 2.5
            // below.
            let pairs = (len * (seq_len + 1)) as f64 / 2.0;
            let flops = 2.0 * 2.0 * pairs * (HEADS * WIDTH) as f64;
            // Mean time of the `ranks - 1` steps over other ranks' chunks. There are as many
            // transfers, since nothing is left to receive during the last step.
            let per_step = |i: usize| (found[i] - own[i]) / (ranks - 1).max(1) as f64;
            let of_kv = (2 * len * KV_HEADS * WIDTH) as f64;
            // Backward also sends the gradient sums in f32, at the end of the preceding step.
            let sent = [2.0 * of_kv, (2.0 + 4.0) * of_kv];
            let mut cells = vec![len.to_string(), ranks.to_string()];
            for (i, factor) in [1.0, 2.5].into_iter().enumerate() {
                let rate = factor * flops / found[i] / 1e9;
                cells.extend([format!("{:.2}", found[i]), format!("{rate:.0}")]);
            }
            cells.extend([0, 1].map(|i| format!("{:.2}", found[i] * ranks as f64 / whole[i])));
            cells.extend(sent.map(|bytes| format!("{:.1}", bytes / 1e6)));
            cells.extend([0, 1].map(|i| format!("{:.0}", sent[i] / per_step(i) / 1e6)));
            table.row(cells);
        }
    }
    let mut report = Report::new("context", &about);
    report.table(&table);
    report.finish(&args.report)
}
