//! The fused operations at Llama-3-8B's shapes, 8192 tokens in bf16, compared with PyTorch's.

use std::{cell::RefCell, collections::BTreeMap, ffi::OsString, path::PathBuf, process::ExitCode};

use burn::{
    prelude::{Device, Int},
    tensor::{DType, Distribution, Tensor},
};
use clap::Parser;
use megaburn::{
    cuda,
    kernels::{
        AdamwState, AdamwStep, AttentionKernel, AttentionOptions, AttentionTiles,
        CrossEntropyOptions, NormOptions, RopeConfig, SoftmaxMask, adamw, apply_rope, attention,
        cross_entropy, layer_norm, rms_norm, rms_norm_add, scale_mask_softmax, swiglu,
    },
};

use super::{device_clock::DeviceClock, peer_times};
use crate::{
    Failure,
    report::{Args, Report, Table},
};

/// Number of tokens.
const T: usize = 8192;
/// Hidden size.
const H: usize = 4096;
/// Width of the MLP.
const FF: usize = 14336;
/// Vocabulary size.
const V: usize = 128_256;
const PARAMETERS: usize = 500_000_000;

#[derive(Debug, Parser)]
struct KernelsArgs {
    #[command(flatten)]
    report: Args,
    /// The output of `peer/kernels.py` in the same run.
    #[arg(long, value_name = "FILE")]
    peer: Option<PathBuf>,
    /// Measure only operations whose name contains this text.
    #[arg(long, default_value = "")]
    only: String,
    /// Measure attention with other tile shapes than those chosen, such as `forward=8,1,64 keys=4,64`.
    #[arg(long, value_name = "SHAPES", default_value = "")]
    attention_tiles: AttentionTiles,
}

/// Runs the measurement.
pub fn main(command: Vec<OsString>) -> ExitCode {
    match run(&KernelsArgs::parse_from(command)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &KernelsArgs) -> Result<(), Failure> {
    cuda::start()?;
    let about = "Fused operations on one GPU, bf16, shapes of Llama-3-8B with 8192 tokens, \
                normally distributed numbers. The device's time of one call, the mean of 20 \
                enqueued without a wait in between, the median of three such means; for a \
                backward, the mean of single calls, each after its forward. Both sides enqueue \
                while the GPU is still busy with something else, so that the host's time does \
                not count. Bytes: each input read once, each output written once (rms_norm_add: \
                sum and norm, and the gradients of both). Attention: causal, 32 heads of 128, 8 \
                of keys and values; the backward counted as 2.5 forwards.";
    let mut report = Report::new("kernels", about);
    let mut bench = Bench::new(args)?;
    bench.memory_bound()?;
    bench.attentions()?;
    report.table(&bench.bytes);
    report.table(&bench.flops);
    report.finish(&args.report)
}

struct Bench {
    device: Device,
    clock: DeviceClock,
    peer: BTreeMap<String, f64>,
    only: String,
    tiles: AttentionTiles,
    bytes: Table,
    flops: Table,
}

impl Bench {
    fn new(args: &KernelsArgs) -> Result<Self, Failure> {
        let device = Device::cuda(0);
        let rounds = if args.report.quick { 2 } else { 20 };
        let clock = DeviceClock::new(&device, rounds)?;
        let head = |unit| ["operation", "ms", unit, "PyTorch ms", unit, "time ratio"];
        Ok(Self {
            device,
            clock,
            peer: peer_times(args.peer.as_deref())?,
            only: args.only.clone(),
            tiles: args.attention_tiles,
            bytes: Table::new("Memory-bound operations", &head("TB/s")),
            flops: Table::new("Attention", &head("TFLOP/s")),
        })
    }

    fn wants(&self, name: &str) -> bool {
        name.contains(&self.only)
    }

    /// Random normal numbers, not part of a graph.
    fn normal<const D: usize>(&self, shape: [usize; D]) -> Tensor<D> {
        Tensor::random(
            shape,
            Distribution::Normal(0.0, 1.0),
            (&self.device, DType::BF16),
        )
    }

    /// Adds a row to the table of memory-bound operations.
    fn row(&mut self, name: &str, bytes: usize, milliseconds: f64) {
        let rate = |milliseconds: f64| format!("{:.2}", bytes as f64 / milliseconds / 1e9);
        let cells = self.cells(name, name, milliseconds, rate);
        self.bytes.row(cells);
    }

    fn cells(
        &self,
        name: &str,
        peer: &str,
        milliseconds: f64,
        rate: impl Fn(f64) -> String,
    ) -> Vec<String> {
        let theirs = self.peer.get(peer).copied();
        let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".into());
        let cells = vec![
            name.into(),
            format!("{milliseconds:.3}"),
            rate(milliseconds),
            or_none(theirs.map(|theirs| format!("{theirs:.3}"))),
            or_none(theirs.map(&rate)),
            or_none(theirs.map(|theirs| format!("{:.2}", milliseconds / theirs))),
        ];
        println!("{}", cells.join("  "));
        cells
    }

    /// Times an operation of the input `x` and of `parameters`, and the gradients of all of them.
    /// `forward` and `backward` are the bytes that each pass moves.
    fn both<const D: usize, const N: usize, const E: usize, const O: usize>(
        &mut self,
        name: &str,
        [forward, backward]: [usize; 2],
        x: Tensor<D>,
        parameters: [Tensor<1>; N],
        step: impl Fn(Tensor<D>, [Tensor<1>; N]) -> [Tensor<E>; O],
    ) -> Result<(), Failure> {
        if !self.wants(name) {
            return Ok(());
        }
        let time = self
            .clock
            .forward(|| drop(step(x.clone(), parameters.clone())))?;
        self.row(&format!("{name} fwd"), forward, time);
        let leaf = Tensor::from_inner(x).require_grad();
        let parameters = parameters.map(|p| Tensor::from_inner(p).require_grad());
        let time = self
            .clock
            .backward(|| step(leaf.clone(), parameters.clone()))?;
        self.row(&format!("{name} bwd"), backward, time);
        Ok(())
    }

    fn memory_bound(&mut self) -> Result<(), Failure> {
        let e = T * H * 2;
        let x = self.normal([T, 1, H]);
        if self.wants("copy") {
            let time = self.clock.forward(|| drop(x.clone() * 1.5))?;
            self.row("copy", 2 * e, time);
        }
        let gamma = self.normal([H]);
        let beta = self.normal([H]);
        self.both(
            "rms_norm",
            [2 * e, 3 * e],
            x.clone(),
            [gamma.clone()],
            |x, [gamma]| [rms_norm(x, gamma, 1e-5)],
        )?;
        let residual = self.normal([T, 1, H]);
        let tracked = Tensor::from_inner(residual.clone()).require_grad();
        self.both(
            "rms_norm_add",
            [4 * e, 4 * e],
            x.clone(),
            [gamma.clone()],
            |x, [gamma]| {
                let residual = if x.device().is_autodiff() {
                    &tracked
                } else {
                    &residual
                };
                <[_; 2]>::from(rms_norm_add(
                    x,
                    residual.clone(),
                    gamma,
                    NormOptions::new(1e-5),
                ))
            },
        )?;
        self.both(
            "layer_norm",
            [2 * e, 3 * e],
            x,
            [gamma, beta],
            |x, [gamma, beta]| [layer_norm(x, gamma, Some(beta), 1e-5)],
        )?;
        let f = T * FF * 2;
        let gate_up = self.normal([T, 1, 2 * FF]);
        self.both("swiglu", [3 * f, 5 * f], gate_up, [], |x, []| [swiglu(x)])?;
        let table = RopeConfig::new(128).init(0..T, &self.device)?;
        let heads = self.normal([T, 1, 32, 128]);
        self.both("rope", [2 * e, 2 * e], heads, [], |x, []| {
            [apply_rope(x, &table)]
        })?;
        let scores = self.normal([1, 32, 4096, 4096]);
        let s = 2 * 32 * 4096 * 4096;
        self.both("softmax", [2 * s, 3 * s], scores, [], |x, []| {
            [scale_mask_softmax(x, SoftmaxMask::Causal, 0.088)]
        })?;
        let logits = self.normal([T, 1, V]);
        let labels =
            Tensor::<2, Int>::random([T, 1], Distribution::Uniform(0.0, V as f64), &self.device);
        let l = T * V * 2;
        self.both("cross_entropy", [l, 2 * l], logits, [], |x, []| {
            [cross_entropy(
                x,
                labels.clone(),
                CrossEntropyOptions::new(V),
                |sums| sums,
            )]
        })?;
        self.adamw()
    }

    fn adamw(&mut self) -> Result<(), Failure> {
        if !self.wants("adamw") {
            return Ok(());
        }
        let device = self.device.clone();
        let flat = || Tensor::<1>::zeros([PARAMETERS], (&device, DType::F32));
        let grad = flat() + 0.01;
        let step = AdamwStep {
            lr: 1e-4,
            beta_1: 0.9,
            beta_2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
            grad_factor: 1.0,
            time: 10,
        };
        for (name, bytes) in [("adamw", 28), ("adamw and bf16", 30)] {
            let rounded = (bytes == 30).then(|| flat().cast(DType::BF16));
            let state = AdamwState {
                param: flat(),
                exp_avg: flat(),
                exp_avg_sq: flat(),
                rounded,
            };
            let state = RefCell::new(Some(state));
            let time = self.clock.forward(|| {
                let before = state.take().expect("the value is put back");
                state.replace(Some(adamw(before, grad.clone(), &step)));
            })?;
            self.row(name, PARAMETERS * bytes, time);
        }
        Ok(())
    }

    fn attentions(&mut self) -> Result<(), Failure> {
        let mut kernels = vec![("", AttentionKernel::Cubecl)];
        match cuda::cudnn::found() {
            Ok(version) => {
                println!("cuDNN {version}");
                kernels.push((" by cuDNN", AttentionKernel::Cudnn));
            }
            Err(error) => println!("without cuDNN's attention: {error}"),
        }
        for s in [512, 1024, 2048, 4096, 8192] {
            if !self.wants(&format!("attention {s}")) {
                continue;
            }
            for (by, kernel) in &kernels {
                let options = AttentionOptions {
                    kernel: *kernel,
                    tiles: self.tiles,
                    ..AttentionOptions::causal()
                };
                self.attention_of(s, by, &options)?;
            }
        }
        Ok(())
    }

    /// Times both passes over sequences of `s` tokens.
    fn attention_of(
        &mut self,
        s: usize,
        by: &str,
        options: &AttentionOptions,
    ) -> Result<(), Failure> {
        let b = T / s;
        let name = format!("attention {s}");
        let inputs = [32, 8, 8].map(|heads| self.normal([s, b, heads, 128]));
        let attend = |[q, k, v]: [Tensor<4>; 3]| attention(q, k, v, options.clone());
        let plans = cuda::cudnn::num_plans();
        let forward = self.clock.forward(|| drop(attend(inputs.clone())))?;
        if !by.is_empty() && cuda::cudnn::num_plans() == plans {
            return Err("cuDNN was not used: see the warnings".into());
        }
        let leaves = inputs.map(|x| Tensor::from_inner(x).require_grad());
        let backward = self.clock.backward(|| [attend(leaves.clone())])?;
        let flops = (2 * b * 32 * s * s * 128) as f64;
        for (what, factor, time) in [("fwd", 1.0, forward), ("bwd", 2.5, backward)] {
            let rate = |time: f64| format!("{:.0}", factor * flops / time / 1e9);
            for library in ["flash", "cudnn"] {
                let peer = format!("attention {s} {library} {what}");
                let label = format!("{name} {what}{by}, {library}");
                let cells = self.cells(&label, &peer, time, rate);
                self.flops.row(cells);
            }
        }
        Ok(())
    }
}
