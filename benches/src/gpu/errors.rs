//! Errors of the fused operations in bf16 against their definition in f64, compared with PyTorch's.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use burn::{
    prelude::{Device, Int},
    tensor::{DType, Distribution, Tensor, TensorData},
};
use clap::Parser;
use megaburn::{
    cuda,
    kernels::{
        AttentionOptions, CrossEntropyOptions, SoftmaxMask, attention, bias_gelu_tanh,
        cross_entropy, layer_norm, reference, rms_norm, scale_mask_softmax, swiglu,
    },
};

use super::peer_times;
use crate::{
    Failure,
    report::{Args, Report, Table},
};

#[derive(Debug, Parser)]
struct ErrorsArgs {
    #[command(flatten)]
    report: Args,
    /// The output of `peer/kernel_errors.py` in the same run.
    #[arg(long, value_name = "FILE")]
    peer: Option<PathBuf>,
    /// The folder of the random inputs that `peer/kernel_errors.py` wrote; without it, new inputs
    /// are drawn.
    #[arg(long, value_name = "FOLDER")]
    numbers: Option<PathBuf>,
}

/// Runs the measurement.
pub fn main(command: Vec<OsString>) -> ExitCode {
    match run(&ErrorsArgs::parse_from(command)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

struct Errors {
    numbers: Option<PathBuf>,
    peer: BTreeMap<String, f64>,
    table: Table,
}

impl Errors {
    fn row(&mut self, name: String, found: &[f64], expected: &[f64]) -> Result<(), Failure> {
        if found.len() != expected.len() {
            return Err(format!("{name}: {} for {}", found.len(), expected.len()).into());
        }
        let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
        let apart = norm(&mut found.iter().zip(expected).map(|(a, b)| a - b));
        let ours = apart / norm(&mut expected.iter().copied());
        let theirs = self.peer.get(&name);
        let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".into());
        self.table.row(vec![
            name,
            format!("{ours:.2e}"),
            or_none(theirs.map(|theirs| format!("{theirs:.2e}"))),
            or_none(theirs.map(|theirs| format!("{:.2}", ours / theirs))),
        ]);
        Ok(())
    }
}

/// Standard normal numbers that bf16 represents exactly, read from the file `name` in `folder`, or
/// newly drawn if there is no folder.
fn normal<const D: usize>(
    folder: Option<&Path>,
    name: &str,
    shape: [usize; D],
) -> Result<TensorData, Failure> {
    let Some(folder) = folder else {
        let x = Tensor::<D>::random(shape, Distribution::Normal(0.0, 1.0), &Device::flex());
        return Ok(x.cast(DType::BF16).cast(DType::F64).into_data());
    };
    let path = folder.join(name);
    let bytes = fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let expected = shape.iter().product::<usize>() * 2;
    if bytes.len() != expected {
        let found = bytes.len();
        return Err(format!("{}: {found} bytes, not {expected}", path.display()).into());
    }
    let data = TensorData::from_bytes_vec(bytes, shape, DType::BF16);
    Ok(data.convert::<f64>())
}

fn leaf<const D: usize>(data: &TensorData, device: &Device, dtype: DType) -> Tensor<D> {
    Tensor::from_data(data.clone(), (&device.clone().autodiff(), dtype)).require_grad()
}

fn host<const D: usize>(x: Tensor<D>) -> Result<Vec<f64>, Failure> {
    let data = x.try_into_data().map_err(|error| error.to_string())?;
    Ok(data.iter::<f64>().collect())
}

/// Adds rows for the values and for the gradients of all inputs: `$fast` runs in bf16 on the GPU,
/// `$plain` in f64 on the CPU.
macro_rules! measure {
    ($errors:expr, $name:expr, [$($input:ident: $shape:expr),+], $fast:expr, $plain:expr) => {{
        let folder = $errors.numbers.clone();
        let file_of = |input: &str| format!("{} {input}", $name);
        $(let $input = normal(folder.as_deref(), &file_of(stringify!($input)), $shape)?;)+
        let drawn: TensorData;
        let [mut found, mut expected] = [const { Vec::<(&str, Vec<f64>)>::new() }; 2];
        {
            $(let $input = leaf(&$input, &Device::cuda(0), DType::BF16);)+
            #[allow(clippy::redundant_closure_call, reason = "the closure is the macro's argument")]
            let y = ($fast)($($input.clone()),+);
            let data = normal(folder.as_deref(), &file_of("weight"), y.dims())?;
            drawn = data.clone();
            found.push(("values", host(y.clone())?));
            let weight = Tensor::from_data(data, (&y.device(), y.dtype()));
            let grads = (y * weight).sum().backward();
            $(found.push((
                stringify!($input),
                host($input.grad(&grads).ok_or("no gradient")?)?,
            ));)+
        }
        {
            $(let $input = leaf(&$input, &Device::flex(), DType::F64);)+
            #[allow(clippy::redundant_closure_call, reason = "the closure is the macro's argument")]
            let y = ($plain)($($input.clone()),+);
            expected.push(("values", host(y.clone())?));
            let weight = Tensor::from_data(drawn, (&y.device(), DType::F64));
            let grads = (y * weight).sum().backward();
            $(expected.push((
                stringify!($input),
                host($input.grad(&grads).ok_or("no gradient")?)?,
            ));)+
        }
        for ((what, found), (_, expected)) in found.into_iter().zip(expected) {
            $errors.row(format!("{} {what}", $name), &found, &expected)?;
        }
    }};
}

fn run(args: &ErrorsArgs) -> Result<(), Failure> {
    cuda::start()?;
    let about = "Fused operations on one GPU in bf16 against their definition in f64 on the CPU, \
                on the same numbers: the norm of the difference over the norm of the result, of \
                values and of each input's gradient. PyTorch's error against f64 is in the \
                columns next to it, on the same numbers if `--numbers` is given.";
    let mut report = Report::new("kernel-errors", about);
    let mut errors = Errors {
        numbers: args.numbers.clone(),
        peer: peer_times(args.peer.as_deref())?,
        table: Table::new(
            "Relative errors",
            &["operation", "megaburn", "PyTorch", "ratio"],
        ),
    };
    for (name, options, d) in [
        ("attention causal 128", AttentionOptions::causal(), 128),
        ("attention whole 64", AttentionOptions::default(), 64),
    ] {
        measure!(
            errors,
            name,
            [q: [700, 1, 8, d], k: [700, 1, 2, d], v: [700, 1, 2, d]],
            |q, k, v| attention(q, k, v, options.clone()),
            |q, k, v| reference::attention(q, k, v, options.clone())
        );
    }
    measure!(
        errors,
        "rms_norm",
        [x: [700, 1, 4096], w: [4096]],
        |x: Tensor<3>, w| rms_norm(x, w, 1e-5),
        |x: Tensor<3>, w| reference::rms_norm(x, w, 1e-5)
    );
    measure!(
        errors,
        "layer_norm",
        [x: [700, 1, 4096], w: [4096], b: [4096]],
        |x: Tensor<3>, w, b| layer_norm(x, w, Some(b), 1e-5),
        |x: Tensor<3>, w, b| reference::layer_norm(x, w, Some(b), 1e-5)
    );
    measure!(
        errors,
        "softmax",
        [x: [1, 4, 700, 700]],
        |x| scale_mask_softmax(x, SoftmaxMask::Causal, 0.5),
        |x| reference::scale_mask_softmax(x, SoftmaxMask::Causal, 0.5)
    );
    measure!(
        errors,
        "swiglu",
        [x: [700, 1, 8192]],
        |x: Tensor<3>| swiglu(x),
        |x: Tensor<3>| reference::swiglu(x)
    );
    measure!(
        errors,
        "bias_gelu",
        [x: [700, 1, 4096], b: [4096]],
        |x: Tensor<3>, b| bias_gelu_tanh(x, b),
        |x: Tensor<3>, b| reference::bias_gelu_tanh(x, b)
    );
    let labels = |device: Device| {
        let labels = TensorData::new(
            (0..700).map(|i| 37 * i % 8000).collect::<Vec<i32>>(),
            [700, 1],
        );
        Tensor::<2, Int>::from_data(labels, &device)
    };
    measure!(
        errors,
        "cross_entropy",
        [x: [700, 1, 8000]],
        |x: Tensor<3>| {
            cross_entropy(x, labels(Device::cuda(0)), CrossEntropyOptions::new(8000), |sums| sums)
        },
        |x: Tensor<3>| {
            reference::cross_entropy(x, labels(Device::flex()), CrossEntropyOptions::new(8000))
        }
    );
    report.table(&errors.table);
    report.finish(&args.report)
}
