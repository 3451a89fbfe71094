//! GEMMs of a Llama layer through cuBLASLt, in the forms that training uses, compared with
//! PyTorch's.

use std::{ffi::OsString, path::PathBuf, process::ExitCode, thread, time::Duration};

use burn::{
    backend::Cube,
    prelude::Device,
    tensor::{DType, Distribution, Tensor},
};
use burn_cubecl::tensor::CubeTensor;
use clap::Parser;
use megaburn::cuda::{
    self, CudaQueue,
    gemm::{
        GemmOptions, ProductIntoOptions, ProductOptions, Tuning, product, product_into, set_options,
    },
    tensor::transposed,
    timing::elapsed,
};

use super::peer_times;
use crate::{
    Failure,
    report::{Args, Report, Table},
};

/// Tokens, input features and output features of each GEMM.
const SHAPES: [[usize; 3]; 8] = [
    [8192, 8192, 8192],
    [4096, 4096, 4096],
    [4096, 4096, 6144],
    [4096, 4096, 28672],
    [4096, 14336, 4096],
    [4096, 4096, 32000],
    [8192, 4096, 28672],
    [8192, 14336, 4096],
];
/// Number of GEMMs in one timing.
const ROUNDS: usize = 30;
const FORMS: [(&str, Form); 5] = [
    ("fprop", Form::Fprop),
    ("dgrad", Form::Dgrad),
    ("wgrad bf16", Form::Wgrad),
    ("wgrad f32", Form::WgradF32),
    ("wgrad f32 +=", Form::WgradAdd),
];

#[derive(Clone, Copy, Debug)]
enum Form {
    Fprop,
    Dgrad,
    Wgrad,
    WgradF32,
    WgradAdd,
}

#[derive(Debug, Parser)]
struct GemmArgs {
    #[command(flatten)]
    report: Args,
    /// The output of `peer/gemm.py` in the same run.
    #[arg(long, value_name = "FILE")]
    peer: Option<PathBuf>,
    /// Take cuBLASLt's first suggestion instead of timing several.
    #[arg(long)]
    untuned: bool,
    /// How many of cuBLASLt's suggestions to time.
    #[arg(long, default_value_t = Tuning::default().suggestions)]
    suggestions: usize,
    /// The fraction of an earlier suggestion's time that a later one must stay below to replace it.
    #[arg(long, default_value_t = Tuning::default().clearly)]
    clearly: f32,
    /// Measure only GEMMs whose shape and form contain this text, e.g. `8192x8192x8192 dgrad`.
    #[arg(long, default_value = "")]
    only: String,
}

/// Runs the measurement.
pub fn main(command: Vec<OsString>) -> ExitCode {
    match run(&GemmArgs::parse_from(command)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &GemmArgs) -> Result<(), Failure> {
    cuda::start()?;
    let GemmArgs {
        suggestions,
        clearly,
        ..
    } = *args;
    let options = GemmOptions {
        tune: !args.untuned,
        tuning: Tuning {
            suggestions,
            clearly,
        },
        ..GemmOptions::default()
    };
    let device = Device::cuda(0);
    set_options(&device, options);
    let peer = peer_times(args.peer.as_deref())?;
    let about = "Matrix products of bf16 matrices with fp32 accumulation on one GPU, shapes of \
                 Llama-3-8B (tokens x in x out), uniform random numbers: forward X W (NN), input \
                 gradient dY Wᵀ (NT), weight gradient Xᵀ dY (TN) in bf16, in f32, and added to an f32 \
                 buffer. The time is the device's for 30 after 3, enqueued without a wait in between, \
                 after 0.1 s of rest; the median of three such means. `floor` of the last is what its bytes \
                 take at 4.3 TB/s (read X, dY and the buffer, write the buffer).";
    let mut report = Report::new("gemm", about);
    let library = cuda::libraries::loaded("libcublasLt.so").unwrap_or_default();
    report.text(&format!(
        "cuBLASLt {} ({}); {suggestions} suggestions; a later one is chosen only below {clearly} \
        of an earlier one's time.",
        cuda::gemm::version(),
        library.display()
    ));
    let head = [
        "shape",
        "form",
        "ms",
        "TFLOP/s",
        "PyTorch",
        "ratio",
        "byte floor ms",
    ];
    let mut table = Table::new("cuBLASLt through `enqueue`", &head);
    for [t, i, o] in SHAPES {
        let random = |rows: usize, cols: usize| -> Tensor<2> {
            let shape = [rows, cols];
            Tensor::random(
                shape,
                Distribution::Uniform(-1.0, 1.0),
                (&device, DType::BF16),
            )
        };
        let x = random(t, i);
        let w = random(i, o);
        let dy = random(t, o);
        let queue = CudaQueue::of(&cube(&x)).ok_or("the tensor is not on a CUDA device")?;
        let sum = Tensor::<2>::zeros([i, o], (&device, DType::F32));
        for (name, form) in FORMS {
            let key = format!("{t}x{i}x{o} {name}");
            if !key.contains(&args.only) {
                continue;
            }
            let to = |dtype| ProductOptions {
                scale: 1.0,
                dtype,
                tune: true,
            };
            let added = ProductIntoOptions {
                add: true,
                tune: true,
            };
            let step = |[x, w, dy, sum]: [CubeTensor; 4]| match form {
                Form::Fprop => product(x, w, None, to(DType::BF16)).map(drop),
                Form::Dgrad => product(dy, transposed(w), None, to(DType::BF16)).map(drop),
                Form::Wgrad => product(transposed(x), dy, None, to(DType::BF16)).map(drop),
                Form::WgradF32 => product(transposed(x), dy, None, to(DType::F32)).map(drop),
                Form::WgradAdd => product_into(transposed(x), dy, &sum, added),
            };
            let operands = || [&x, &w, &dy, &sum].map(cube);
            let seconds = time(&queue, || step(operands()))?;
            let flops = 2.0 * (t * i * o) as f64;
            let theirs = peer.get(&key).map(|milliseconds| milliseconds / 1e3);
            let rate = |seconds: f64| format!("{:.0}", flops / seconds / 1e12);
            let floor = match form {
                Form::WgradAdd => {
                    let bytes = 2 * (t * i + t * o) + 8 * i * o;
                    format!("{:.3}", bytes as f64 / 4.3e12 * 1e3)
                }
                _ => String::new(),
            };
            table.row(vec![
                format!("{t}x{i}x{o}"),
                name.into(),
                format!("{:.3}", seconds * 1e3),
                rate(seconds),
                theirs.map_or("-".into(), rate),
                theirs.map_or("-".into(), |theirs| format!("{:.3}", theirs / seconds)),
                floor,
            ]);
        }
    }
    report.table(&table);
    report.finish(&args.report)
}

/// Seconds of one call on the device: the median of three means.
pub(super) fn time(
    queue: &CudaQueue,
    step: impl Fn() -> Result<(), cuda::CudaError>,
) -> Result<f64, Failure> {
    let mut means = Vec::new();
    for _ in 0..3 {
        step()?;
    }
    for _ in 0..3 {
        queue.on_device_thread(|| Ok(()))?;
        // A GPU at its power limit slows down, so this program and the peer's pause equally long.
        thread::sleep(Duration::from_millis(100));
        let mut result = Ok(());
        let milliseconds = elapsed(queue, || result = (0..ROUNDS).try_for_each(|_| step()))?;
        result?;
        means.push(f64::from(milliseconds) / 1e3 / ROUNDS as f64);
    }
    means.sort_by(f64::total_cmp);
    Ok(means[1])
}

/// The tensor as CubeCL's.
pub(super) fn cube(tensor: &Tensor<2>) -> CubeTensor {
    let primitive = tensor.clone().try_into_primitive::<Cube>();
    cuda::tensor::from_backend(primitive.expect("the tensor is on a GPU"))
}
