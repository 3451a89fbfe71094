//! Times the first call of each kernel in a process that finds no compiled kernels, and in a second
//! process that finds the kernels of the first.

use std::{
    collections::BTreeMap, env, ffi::OsString, process::Command, process::ExitCode, time::Instant,
};

use burn::{
    backend::Cube,
    prelude::{Device, Int},
    tensor::{DType, Distribution, Tensor},
};
use clap::Parser;
use megaburn::{
    autograd::backward_from,
    cuda::{self, CudaQueue},
    kernels::{
        AttentionKernel, AttentionOptions, CrossEntropyOptions, NormOptions, RopeConfig,
        SoftmaxMask, apply_rope, attention, bias_gelu_tanh, cross_entropy, layer_norm, rms_norm,
        rms_norm_add, scale_mask_softmax, swiglu,
    },
};

use crate::{
    Failure,
    report::{Args, Report, Table},
};

#[derive(Debug, Parser)]
struct FirstUseArgs {
    #[command(flatten)]
    report: Args,
    /// Measure in this process, and print a line `NAME`, tab, milliseconds for each operation.
    #[arg(long, hide = true)]
    child: bool,
}

/// Runs the measurement.
pub fn main(command: Vec<OsString>) -> ExitCode {
    let program = command[0].clone();
    let args = FirstUseArgs::parse_from(command);
    let outcome = if args.child {
        measure()
    } else {
        compare(&args, &program)
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn compare(args: &FirstUseArgs, program: &OsString) -> Result<(), Failure> {
    let about = "The host's time of each fused operation's first call in bf16 until the GPU has \
                computed it, small tensors: almost all of it is the compilation of its kernels. \
                Measured in a process with an empty disk cache, and in a second one that uses \
                the first one's cache.";
    let mut report = Report::new("first-use", about);
    let folder = tempfile::tempdir()?;
    let run = || -> Result<Vec<(String, f64)>, Failure> {
        let mut child = Command::new(env::current_exe()?);
        #[cfg(unix)]
        std::os::unix::process::CommandExt::arg0(&mut child, program);
        child
            .arg("--child")
            .env(cuda::kernel_cache::VARIABLE, folder.path());
        let output = child.output()?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned().into());
        }
        let text = String::from_utf8(output.stdout)?;
        let line = |line: &str| {
            let (name, time) = line.split_once('\t')?;
            Some((name.to_string(), time.parse().ok()?))
        };
        Ok(text.lines().filter_map(line).collect())
    };
    let first = run()?;
    let second = run()?;
    let again: BTreeMap<_, _> = second.iter().cloned().collect();
    let mut table = Table::new(
        "First calls",
        &["operation", "first process ms", "second process ms"],
    );
    let total = |times: &[(String, f64)]| times.iter().map(|(_, time)| time).sum();
    let all = ("all".to_string(), total(&first));
    for (name, time) in first.iter().chain([&all]) {
        let second = again.get(name).copied().unwrap_or_else(|| total(&second));
        table.row(vec![
            name.clone(),
            format!("{time:.0}"),
            format!("{second:.0}"),
        ]);
    }
    report.table(&table);
    report.finish(&args.report)
}

struct FirstUse {
    device: Device,
    queue: CudaQueue,
}

impl FirstUse {
    fn normal<const D: usize>(&self, shape: [usize; D]) -> Tensor<D> {
        let device = self.device.clone().autodiff();
        Tensor::random(
            shape,
            Distribution::Normal(0.0, 1.0),
            (&device, DType::BF16),
        )
        .require_grad()
    }

    /// Times `task` until the GPU has finished it, without the work that was enqueued before.
    fn timed<T>(&self, name: &str, task: impl FnOnce() -> T) -> Result<T, Failure> {
        self.queue.on_device_thread(|| Ok(()))?;
        let started = Instant::now();
        let result = task();
        self.queue.on_device_thread(|| Ok(()))?;
        println!("{name}\t{}", started.elapsed().as_secs_f64() * 1e3);
        Ok(result)
    }

    /// Times the operation and its backward pass.
    fn both<const D: usize>(
        &self,
        name: &str,
        step: impl FnOnce() -> Tensor<D>,
    ) -> Result<(), Failure> {
        let y = self.timed(&format!("{name} fwd"), step)?;
        let grad = Tensor::random(
            y.dims(),
            Distribution::Normal(0.0, 1.0),
            (&self.device, y.dtype()),
        );
        let root = backward_from(y, grad);
        self.timed(&format!("{name} bwd"), || drop(root.backward()))
    }
}

fn measure() -> Result<(), Failure> {
    cuda::start()?;
    let device = Device::cuda(0);
    let probe = Tensor::<1>::zeros([1], &device).try_into_primitive::<Cube>();
    let probe = probe.map_err(|_| "the tensor is not on a GPU")?;
    let queue = CudaQueue::of(&cuda::tensor::from_backend(probe)).ok_or(
        "the tensor is not on a \
        CUDA device",
    )?;
    let on = FirstUse { device, queue };
    // Compiles Burn's own kernels for random numbers and conversions, which the operations below
    // use too.
    drop(on.timed("the first kernel", || on.normal([8, 8]).cast(DType::F32))?);
    let x = on.normal([64, 1, 256]);
    let residual = on.normal([64, 1, 256]);
    let gamma = on.normal([256]);
    let beta = on.normal([256]);
    on.both("rms_norm", || rms_norm(x.clone(), gamma.clone(), 1e-5))?;
    on.both("rms_norm_add", || {
        rms_norm_add(
            x.clone(),
            residual.clone(),
            gamma.clone(),
            NormOptions::new(1e-5),
        )
        .0
    })?;
    on.both("layer_norm", || {
        layer_norm(x.clone(), gamma.clone(), Some(beta.clone()), 1e-5)
    })?;
    on.both("swiglu", || swiglu(x.clone()))?;
    on.both("bias_gelu", || bias_gelu_tanh(x.clone(), beta.clone()))?;
    let table = RopeConfig::new(64).init(0..64, &on.device.clone().autodiff())?;
    let heads = on.normal([64, 1, 4, 64]);
    on.both("rope", || apply_rope(heads.clone(), &table))?;
    let scores = on.normal([1, 4, 64, 64]);
    on.both("softmax", || {
        scale_mask_softmax(scores.clone(), SoftmaxMask::Causal, 0.1)
    })?;
    let labels = Tensor::<2, Int>::random(
        [64, 1],
        Distribution::Uniform(0.0, 255.0),
        &on.device.clone().autodiff(),
    );
    on.both("cross_entropy", || {
        cross_entropy(x.clone(), labels, CrossEntropyOptions::new(256), |sums| {
            sums
        })
    })?;
    let options = AttentionOptions {
        kernel: AttentionKernel::Cubecl,
        ..AttentionOptions::causal()
    };
    for d in [64, 128] {
        let [q, k, v] = [4, 2, 2].map(|heads| on.normal([256, 1, heads, d]));
        on.both(&format!("attention {d}"), || {
            attention(q, k, v, options.clone())
        })?;
    }
    Ok(())
}
