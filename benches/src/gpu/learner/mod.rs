//! The programs of Burn's examples `mnist` and `text-generation`, trained by Burn's `Learner`: on one
//! GPU, with Burn's own strategies for several, and with [`ParallelTraining`].
//!
//! `benches/learner.py` runs them all and prints the table.

mod mnist;
mod text;

use std::{
    ffi::OsString,
    fs,
    path::PathBuf,
    process::ExitCode,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use burn::{
    lr_scheduler::constant::ConstantLr,
    optim::AdamWConfig,
    prelude::Device,
    tensor::distributed::{DistributedConfig, ReduceOperation},
};
use burn_train::{
    ExecutionStrategy, InferenceStep, Learner, LearnerModel, MultiDeviceOptim, SupervisedTraining,
    TrainStep,
};
use clap::{Parser, ValueEnum};
use megaburn::{
    collective::ProcessGroups,
    cuda,
    learner::{ParallelTraining, RankOutput, run_ranks},
    parallel::Sharded,
};

use crate::Failure;

#[derive(Debug, Parser)]
struct LearnerArgs {
    /// The program.
    #[arg(long)]
    program: Program,
    /// A folder with the four files of MNIST, unpacked; or a text.
    #[arg(long, value_name = "PATH")]
    data: PathBuf,
    /// How several GPUs train.
    #[arg(long)]
    strategy: Strategy,
    /// Number of GPUs of Burn's strategies.
    #[arg(long, default_value_t = 2)]
    gpus: usize,
    /// The layout of `parallel`.
    #[arg(long, default_value = "dp2")]
    layout: String,
    /// Items of a batch on all GPUs together.
    #[arg(long, default_value_t = 128)]
    batch: usize,
    /// Number of passes over the data.
    #[arg(long, default_value_t = 3)]
    epochs: usize,
    /// Only the first items of the training data.
    #[arg(long, value_name = "NUM")]
    items: Option<usize>,
    /// The norms of `mnist`.
    #[arg(long, default_value = "batch")]
    norm: Norm,
    /// Flush the GPUs' queues all the time while a strategy of Burn trains: CubeCL 0.11.3 leaves a
    /// reduction in a queue until 32 tasks are in it.
    #[arg(long)]
    flush: bool,
    /// Where Burn writes its logs, from which losses are read.
    #[arg(long, value_name = "FOLDER")]
    dir: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Program {
    Mnist,
    Text,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Norm {
    /// As in Burn's example. The ranks of Burn's strategies share one object with the running
    /// statistics, which moves from GPU to GPU in each forward pass.
    Batch,
    /// Without running statistics.
    Group,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Strategy {
    /// Burn on one GPU.
    One,
    /// Burn's distributed data parallelism.
    Ddp,
    /// Burn's multi-device training, whose first GPU has the optimizer.
    Multi,
    /// `ParallelTraining`, under a launcher.
    Parallel,
}

impl LearnerArgs {
    /// Items of a batch on one GPU.
    fn batch_of_gpu(&self) -> usize {
        match self.strategy {
            Strategy::One => self.batch,
            _ => self.batch / self.gpus,
        }
    }
}

/// Trains as the arguments say, and prints the seconds of the training.
pub fn main(command: Vec<OsString>) -> ExitCode {
    let args = LearnerArgs::parse_from(command);
    if args.strategy == Strategy::Parallel {
        return run_ranks(|groups| {
            cuda::start()?;
            let local = groups.world.rank() % args.gpus;
            train(&args, &[Device::cuda(local).autodiff()], Some(groups))
        });
    }
    let gpus = match args.strategy {
        Strategy::One => 1,
        _ => args.gpus,
    };
    let devices: Vec<Device> = (0..gpus).map(|gpu| Device::cuda(gpu).autodiff()).collect();
    match train(&args, &devices, None) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn train(
    args: &LearnerArgs,
    devices: &[Device],
    groups: Option<&ProcessGroups>,
) -> Result<(), Failure> {
    devices[0].seed(1);
    match args.program {
        Program::Mnist => mnist::train(args, devices, groups),
        Program::Text => text::train(args, devices, groups),
    }
}

/// Launches the training of `model` with the strategy of the arguments.
fn launch<M>(
    args: &LearnerArgs,
    devices: &[Device],
    groups: Option<&ProcessGroups>,
    training: SupervisedTraining<M>,
    model: M,
    learning_rate: f64,
) -> Result<(), Failure>
where
    M: LearnerModel + Sharded,
    <M as TrainStep>::Output: RankOutput,
    <M as InferenceStep>::Output: RankOutput,
{
    let training = training.num_epochs(args.epochs);
    let optimizer = AdamWConfig::new().with_weight_decay(1e-2).init();
    let schedule = ConstantLr::new(learning_rate);
    let start = Instant::now();
    if let Some(groups) = groups {
        let result = ParallelTraining::new(groups).launch(training, model, optimizer, schedule)?;
        if let Some(error) = result.error {
            return Err(error.to_string().into());
        }
    } else {
        let training = match args.strategy {
            Strategy::Ddp => {
                let mean = DistributedConfig {
                    all_reduce_op: ReduceOperation::Mean,
                };
                let strategy = ExecutionStrategy::ddp(devices.to_vec(), mean);
                training.with_training_strategy(strategy.into())
            }
            Strategy::Multi => {
                let optimizer = MultiDeviceOptim::OptimMainDevice;
                let strategy = ExecutionStrategy::multi(devices.to_vec(), optimizer);
                training.with_training_strategy(strategy.into())
            }
            _ => training,
        };
        let learner = Learner::new(model, optimizer, schedule);
        while_flushed(if args.flush { devices } else { &[] }, || {
            training.launch(learner);
        });
    }
    if groups.is_none_or(ProcessGroups::is_main) {
        println!("seconds\t{:.2}", start.elapsed().as_secs_f64());
    }
    Ok(())
}

/// Runs `body` while threads flush the queues of devices.
fn while_flushed(devices: &[Device], body: impl FnOnce()) {
    struct Ends<'a>(&'a AtomicBool);
    impl Drop for Ends<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let has_ended = AtomicBool::new(false);
    thread::scope(|scope| {
        let _ends = Ends(&has_ended);
        for device in devices {
            let (device, has_ended) = (device.clone().inner(), &has_ended);
            scope.spawn(move || {
                while !has_ended.load(Ordering::Relaxed) && device.flush().is_ok() {
                    thread::sleep(Duration::from_millis(1));
                }
            });
        }
        body();
    });
}

/// Reads a file.
fn bytes(path: PathBuf) -> Result<Vec<u8>, Failure> {
    fs::read(&path).map_err(|error| format!("{}: {error}", path.display()).into())
}
