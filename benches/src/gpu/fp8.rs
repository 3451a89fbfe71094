//! FP8 products at the shapes of Llama-3-8B's layers, and the casts that make their operands,
//! compared with PyTorch's.

use std::{collections::BTreeMap, ffi::OsString, path::PathBuf, process::ExitCode};

use burn::{
    prelude::Device,
    tensor::{DType, Distribution, Tensor},
};
use clap::Parser;
use megaburn::{
    cuda::{
        self, CudaQueue,
        gemm::{
            Fp8IntoOptions, Fp8Kind, Fp8Matrix, Fp8ProductOptions, fp8_product, fp8_product_into,
        },
    },
    kernels::fp8::{BlockCastOptions, CastOptions, amax, block_cast, cast},
};

use super::{
    device_clock::DeviceClock,
    gemm::{cube, time},
    peer_times,
};
use crate::{
    Failure,
    report::{Args, Report, Table},
};

/// Number of tokens.
const T: usize = 8192;
/// The numbers of input and output features of the two linear layers of attention and the two of the
/// MLP.
const LAYERS: [[usize; 2]; 4] = [[4096, 6144], [4096, 4096], [4096, 28672], [14336, 4096]];
/// The matrices that are cast have these numbers of columns: a block's hidden size and the MLP's
/// width.
const WIDTHS: [usize; 2] = [4096, 14336];

#[derive(Debug, Parser)]
struct Fp8Args {
    #[command(flatten)]
    report: Args,
    /// The output of `peer/fp8.py` in the same run.
    #[arg(long, value_name = "FILE")]
    peer: Option<PathBuf>,
    /// Measure only what has this text in its name, e.g. `8192x4096x6144 dgrad`.
    #[arg(long, default_value = "")]
    only: String,
}

/// Runs the measurement.
pub fn main(command: Vec<OsString>) -> ExitCode {
    match run(&Fp8Args::parse_from(command)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Fp8Args) -> Result<(), Failure> {
    cuda::start()?;
    let about = "FP8 on one GPU, shapes of Llama-3-8B with 8192 tokens, normally distributed \
                 numbers with a scale per tensor. Products (tokens x in x out) are e4m3 forward, \
                 e5m2 by e4m3 for input gradients in bf16 and for weight gradients, which are \
                 added to an f32 buffer; PyTorch's `_scaled_mm` writes these to new memory. `fast` \
                 means fast accumulation. The time is the device's for 30 after 3, enqueued \
                 without a wait in between, after 0.1 s of rest; the median of three such means. \
                 Casts read bf16 once and write bytes; PyTorch's are compiled. Their time is the \
                 device's mean of 20, enqueued while it is busy.";
    let mut report = Report::new("fp8", about);
    report.text(&format!("cuBLASLt {}", cuda::gemm::version()));
    let bench = Bench {
        device: Device::cuda(0),
        peer: peer_times(args.peer.as_deref())?,
        only: args.only.clone(),
    };
    report.table(&bench.products()?);
    report.table(&bench.block_products()?);
    report.table(&bench.casts(if args.report.quick { 2 } else { 20 })?);
    report.finish(&args.report)
}

struct Bench {
    device: Device,
    peer: BTreeMap<String, f64>,
    only: String,
}

impl Bench {
    fn wants(&self, name: &str) -> bool {
        name.contains(&self.only)
    }

    /// The last cells of a row: the time and rate, PyTorch's rate, and PyTorch's time by ours.
    fn cells(&self, name: &str, milliseconds: f64, rate: impl Fn(f64) -> String) -> [String; 4] {
        let theirs = self.peer.get(name).copied();
        let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".into());
        let cells = [
            format!("{milliseconds:.3}"),
            rate(milliseconds),
            or_none(theirs.map(&rate)),
            or_none(theirs.map(|theirs| format!("{:.3}", theirs / milliseconds))),
        ];
        println!("{name}  {}", cells.join("  "));
        cells
    }

    fn normal(&self, rows: usize, cols: usize) -> Tensor<2> {
        let normal = Distribution::Normal(0.0, 1.0);
        Tensor::random([rows, cols], normal, (&self.device, DType::BF16))
    }

    /// A random matrix in FP8.
    fn matrix(&self, rows: usize, cols: usize, kind: Fp8Kind) -> Result<Fp8Matrix, Failure> {
        let x = cube(&self.normal(rows, cols));
        let found = cast(x.clone(), amax(x), options(kind, [true, false]));
        let values = found.straight.ok_or("the cast has no result")?;
        Ok(Fp8Matrix::with_one_scale(values, found.scale_inv, kind))
    }

    /// A random matrix in e4m3 with scales of neighbours, or of blocks.
    fn blocks(&self, rows: usize, cols: usize, square: bool) -> Result<Fp8Matrix, Failure> {
        let found = block_cast(
            cube(&self.normal(rows, cols)),
            blocks(square, [true, false]),
        );
        Ok(found.straight.ok_or("the cast has no result")?)
    }

    fn products(&self) -> Result<Table, Failure> {
        let head = ["shape", "form", "ms", "TFLOP/s", "PyTorch", "ratio"];
        let mut table = Table::new("FP8 products through cuBLASLt", &head);
        let [e4m3, e5m2] = [Fp8Kind::E4m3, Fp8Kind::E5m2];
        let probe = cube(&self.normal(1, 1));
        let queue = CudaQueue::of(&probe).ok_or("the tensor is not on a CUDA device")?;
        for [i, o] in LAYERS {
            let shape = format!("{T}x{i}x{o}");
            let sum = cube(&Tensor::<2>::zeros([o, i], (&self.device, DType::F32)));
            for (form, [m, n, k], kind) in [
                ("fprop", [T, o, i], e4m3),
                ("dgrad", [T, i, o], e5m2),
                ("wgrad f32 +=", [o, i, T], e5m2),
            ] {
                let a = self.matrix(m, k, kind)?;
                let b = self.matrix(n, k, e4m3)?;
                for fast_accum in [true, false] {
                    let form = format!("{form}{}", if fast_accum { " fast" } else { "" });
                    let name = format!("{shape} {form}");
                    if !self.wants(&name) {
                        continue;
                    }
                    let step = || {
                        let (a, b) = (a.clone(), b.clone());
                        if k == T {
                            let options = Fp8IntoOptions {
                                add: true,
                                tune: true,
                                fast_accum,
                                sums_tokens: true,
                            };
                            return fp8_product_into(a, b, &sum, options);
                        }
                        let options = Fp8ProductOptions {
                            dtype: DType::BF16,
                            tune: true,
                            fast_accum,
                            sums_tokens: false,
                        };
                        fp8_product(a, b, options).map(drop)
                    };
                    let milliseconds = time(&queue, step)? * 1e3;
                    let flops = 2.0 * (m * n * k) as f64;
                    let rate = |milliseconds: f64| format!("{:.0}", flops / milliseconds / 1e9);
                    let mut row = vec![shape.clone(), form];
                    row.extend(self.cells(&name, milliseconds, rate));
                    table.row(row);
                }
            }
        }
        Ok(table)
    }

    /// Products with scales of 128 neighbours, and those of weights with scales of blocks.
    fn block_products(&self) -> Result<Table, Failure> {
        let head = ["shape", "form", "ms", "TFLOP/s", "PyTorch", "ratio"];
        let mut table = Table::new("FP8 products with scales of blocks through cuBLASLt", &head);
        let probe = cube(&self.normal(1, 1));
        let queue = CudaQueue::of(&probe).ok_or("the tensor is not on a CUDA device")?;
        for [i, o] in LAYERS {
            let shape = format!("{T}x{i}x{o}");
            let sum = cube(&Tensor::<2>::zeros([o, i], (&self.device, DType::F32)));
            for (form, [m, n, k]) in [
                ("fprop", [T, o, i]),
                ("dgrad", [T, i, o]),
                ("wgrad f32 +=", [o, i, T]),
            ] {
                let form = format!("{form} blocks");
                let name = format!("{shape} {form}");
                if !self.wants(&name) {
                    continue;
                }
                let a = self.blocks(m, k, false)?;
                let b = self.blocks(n, k, k != T)?;
                let step = || {
                    let (a, b) = (a.clone(), b.clone());
                    if k == T {
                        let options = Fp8IntoOptions {
                            add: true,
                            tune: true,
                            fast_accum: false,
                            sums_tokens: true,
                        };
                        return fp8_product_into(a, b, &sum, options);
                    }
                    let options = Fp8ProductOptions {
                        dtype: DType::BF16,
                        tune: true,
                        fast_accum: false,
                        sums_tokens: false,
                    };
                    fp8_product(a, b, options).map(drop)
                };
                let milliseconds = time(&queue, step)? * 1e3;
                let flops = 2.0 * (m * n * k) as f64;
                let rate = |milliseconds: f64| format!("{:.0}", flops / milliseconds / 1e9);
                let mut row = vec![shape.clone(), form];
                row.extend(self.cells(&name, milliseconds, rate));
                table.row(row);
            }
        }
        Ok(table)
    }

    fn casts(&self, rounds: usize) -> Result<Table, Failure> {
        let head = ["operation", "ms", "TB/s", "PyTorch", "ratio"];
        let mut table = Table::new("Casts to e4m3", &head);
        let clock = DeviceClock::new(&self.device, rounds)?;
        for width in WIDTHS {
            let x = cube(&self.normal(T, width));
            let largest = amax(x.clone());
            let cast_to = |results| {
                let options = options(Fp8Kind::E4m3, results);
                drop(cast(x.clone(), largest.clone(), options));
            };
            let both = || {
                let options = options(Fp8Kind::E4m3, [true, true]);
                drop(cast(x.clone(), amax(x.clone()), options));
            };
            let cast_blocks =
                |square, results| drop(block_cast(x.clone(), blocks(square, results)));
            let operations: [(&str, usize, &dyn Fn()); 7] = [
                ("amax", 2, &|| drop(amax(x.clone()))),
                ("cast", 3, &|| cast_to([true, false])),
                ("cast, transposed", 3, &|| cast_to([false, true])),
                ("cast, both", 4, &|| cast_to([true, true])),
                ("amax and cast, both", 6, &both),
                ("cast of neighbors, both", 4, &|| {
                    cast_blocks(false, [true, true])
                }),
                ("cast of blocks, both", 4, &|| {
                    cast_blocks(true, [true, true])
                }),
            ];
            for (operation, bytes, step) in operations {
                let name = format!("{operation} {T}x{width}");
                if !self.wants(&name) {
                    continue;
                }
                let milliseconds = clock.forward(step)?;
                let bytes = (bytes * T * width) as f64;
                let rate = |milliseconds: f64| format!("{:.2}", bytes / milliseconds / 1e9);
                let mut row = vec![name.clone()];
                row.extend(self.cells(&name, milliseconds, rate));
                table.row(row);
            }
        }
        Ok(table)
    }
}

fn options(kind: Fp8Kind, [straight, transposed]: [bool; 2]) -> CastOptions {
    CastOptions {
        kind,
        largest: match kind {
            Fp8Kind::E4m3 => 448.0,
            Fp8Kind::E5m2 => 57344.0,
        },
        power_of_two: false,
        straight,
        transposed,
    }
}

fn blocks(square: bool, [straight, transposed]: [bool; 2]) -> BlockCastOptions {
    BlockCastOptions {
        kind: Fp8Kind::E4m3,
        largest: 448.0,
        power_of_two: true,
        square,
        straight,
        transposed,
    }
}
