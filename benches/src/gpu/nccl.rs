//! Collectives through NCCL from 1 KiB to 1 GiB, compared with PyTorch's.
//!
//! ```sh
//! torchrun --nproc-per-node 8 benches/peer/nccl_bw.py > peer.txt
//! megaburn launch --nproc 8 -- bench-nccl --peer peer.txt
//! ```

use std::{ffi::OsString, path::PathBuf, process::ExitCode};

use burn::{
    prelude::Device,
    tensor::{DType, Tensor, TensorData},
};
use clap::Parser;
use megaburn::{
    collective::{
        CollectiveError, ConnectOptions, Group, Lane, RankEnv, ReduceOp, connect,
        tensors::{self, Work},
    },
    cuda::{self, CudaQueue, timing::elapsed},
    launch::tie_to_launcher,
};

use super::peer_times;
use crate::{
    Failure,
    collective::{Collective, label},
    report::{Args, Report, Table},
};

#[derive(Debug, Parser)]
struct NcclArgs {
    #[command(flatten)]
    report: Args,
    /// The output of `peer/nccl_bw.py` on the same GPUs.
    #[arg(long, value_name = "FILE")]
    peer: Option<PathBuf>,
}

/// Runs one rank of the measurement, as torchrun's environment variables say.
pub fn main(command: Vec<OsString>) -> ExitCode {
    match run(&NcclArgs::parse_from(command)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &NcclArgs) -> Result<(), Failure> {
    tie_to_launcher()?;
    let gpus = cuda::start()?;
    let env = RankEnv::from_env()?;
    let env = env.ok_or("start it with `megaburn launch --nproc N -- bench-nccl` or torchrun")?;
    let device = Device::cuda(
        env.gpu(gpus)
            .ok_or("more ranks than GPUs on this host (CUDA_VISIBLE_DEVICES)")?,
    );
    let world = connect(&ConnectOptions::new(env))?;
    let sizes: Vec<usize> = (10..=30).step_by(2).map(|power| 1 << power).collect();
    let mut times = Vec::new();
    for &size in &sizes {
        for op in Collective::ALL {
            times.push(measure(op, &world, &device, size, args.report.quick)?);
        }
    }
    if world.rank() != 0 {
        return Ok(());
    }
    report(args, world.size(), &sizes, &times)
}

/// Prints the report and saves it if asked to.
fn report(args: &NcclArgs, ranks: usize, sizes: &[usize], times: &[f64]) -> Result<(), Failure> {
    let about = format!(
        "Collectives of bf16 tensors over {ranks} GPUs through NCCL {}, one process per GPU, one \
        after the other on CubeCL's stream, from a host that enqueues without waiting in \
        between. As in nccl-tests, the size S is a rank's buffer before an all-reduce, \
        reduce-scatter or all-to-all and after an all-gather, and the bus bandwidth is S / t \
        times 2 (n - 1) / n for an all-reduce and (n - 1) / n for the others. A time is the \
        device's, the median of three means of 20 to 200 calls, the slowest rank's.",
        cuda::nccl::version()?
    );
    let peer = peer_times(args.peer.as_deref())?;
    let mut report = Report::new("nccl", about);
    let head = [
        "size",
        "collective",
        "us",
        "GB/s",
        "PyTorch us",
        "PyTorch GB/s",
        "ratio",
    ];
    let mut table = Table::new(format!("{ranks} GPUs"), &head);
    for (&size, times) in sizes.iter().zip(times.chunks(Collective::ALL.len())) {
        for (op, &seconds) in Collective::ALL.into_iter().zip(times) {
            let bandwidth = |seconds: f64| {
                let bytes = size as f64 * op.bus_factor(ranks);
                format!("{:.1}", bytes / seconds / 1e9)
            };
            let theirs = peer
                .get(&format!("{} {size}", op.name()))
                .map(|time| time / 1e3);
            let of_peer = |show: &dyn Fn(f64) -> String| theirs.map_or("-".into(), show);
            table.row(vec![
                label(size),
                op.name().into(),
                format!("{:.1}", seconds * 1e6),
                bandwidth(seconds),
                of_peer(&|theirs| format!("{:.1}", theirs * 1e6)),
                of_peer(&bandwidth),
                of_peer(&|theirs| format!("{:.3}", theirs / seconds)),
            ]);
        }
    }
    report.table(&table);
    report.finish(&args.report)
}

/// Seconds of one call on the slowest rank; a rank's time is the median of three means.
fn measure(
    op: Collective,
    world: &Group,
    device: &Device,
    size: usize,
    quick: bool,
) -> Result<f64, Failure> {
    let whole = size / DType::BF16.size();
    let share = whole / world.size();
    let elements = if op == Collective::AllGather {
        share
    } else {
        share * world.size()
    };
    let x = Tensor::<1>::ones([elements], (device, DType::BF16));
    let rows = vec![share; world.size()];
    let once = || call(op, world, x.clone(), &rows).map(drop);
    let queue = CudaQueue::for_device(device).ok_or("the device is not a CUDA device")?;
    let calls = if quick {
        10
    } else {
        ((1 << 30) / size).clamp(20, 200)
    };
    for _ in 0..5 {
        once()?;
    }
    let mut means = Vec::new();
    for _ in 0..3 {
        queue.on_device_thread(|| Ok(()))?;
        world.barrier()?;
        let mut made = Ok(());
        let all = elapsed(&queue, || made = (0..calls).try_for_each(|_| once()))?;
        made?;
        means.push(f64::from(all) / 1e3 / calls as f64);
    }
    means.sort_by(f64::total_cmp);
    let slowest = world.all_reduce(TensorData::from([means[1]]), ReduceOp::Max)?;
    Ok(slowest.iter::<f64>().next().expect("there is one number"))
}

fn call(
    op: Collective,
    world: &Group,
    x: Tensor<1>,
    rows: &[usize],
) -> Result<Tensor<1>, CollectiveError> {
    let lane = Lane::InOrder;
    let started = match op {
        Collective::AllReduce => tensors::all_reduce(x, ReduceOp::Sum, world, lane),
        Collective::AllGather => tensors::all_gather(x, world, lane),
        Collective::ReduceScatter => tensors::reduce_scatter(x, ReduceOp::Sum, world, lane),
        Collective::AllToAll => tensors::all_to_all(x, rows, rows, world, lane),
    };
    started.map(Work::wait)
}
