//! The command line of a program that trains a model of its own.

use std::{ffi::OsString, process::ExitCode};

use clap::{Args, FromArgMatches};
use megaburn_collective::RankEnv;
use megaburn_train::{
    Ended, Exit, StopReason, TaskConfig, TaskLayers, TrainError, TrainTask, report_start_failure,
    signal::StopSignal, train_task,
};

use super::{
    begin,
    device::{DeviceArg, launch_again},
    hint, print,
    train::{is_fresh, profile_setting},
};

/// Trains the model of `task`, as the flags of this process's command line say, and returns the exit
/// code. This is all that a program needs in its `main`:
///
/// ```no_run
/// # use burn::{module::Module, prelude::Device, tensor::Tensor};
/// # use megaburn::{prelude::*, task::*};
/// # #[derive(Module, Sharded, Debug)]
/// # struct Net { up: ParallelLinear }
/// # impl TrainModel for Net {
/// #     type Batch = Tensor<2>;
/// #     fn loss(&self, batch: Tensor<2>) -> LossSum {
/// #         LossSum::new(self.up.forward(batch).sum(), 1)
/// #     }
/// # }
/// # struct MyTask;
/// # impl TrainTask for MyTask {
/// #     type Config = ();
/// #     type Model = Net;
/// #     fn name(&self) -> String { "mine".into() }
/// #     fn model(&self, _: &(), place: &ModelPlace<'_>) -> Result<Net, TaskError> {
/// #         let up = ParallelLinearConfig::column(2, 4).with_name("up");
/// #         Ok(Net { up: up.init(place.tp(), place.device)? })
/// #     }
/// #     fn data(&self, _: &()) -> Result<TaskData<Tensor<2>>, TaskError> {
/// #         let ones = |samples: &MicroBatch, device: &Device| {
/// #             Tensor::ones([samples.len(), 2], device)
/// #         };
/// #         Ok(TaskData::new(BatchFn::new(8, ones)))
/// #     }
/// # }
/// use std::process::ExitCode;
///
/// fn main() -> ExitCode {
///     megaburn::cli::train(MyTask)
/// }
/// ```
///
/// Without a launcher, ranks on the CPU are threads of this process, and on GPUs processes of this
/// program. Under `megaburn launch` or another launcher, the process is one rank.
pub fn train<T: TrainTask>(task: T) -> ExitCode {
    let matches = train_command().try_get_matches_from(std::env::args_os());
    let args = matches.and_then(|matches| TaskArgs::from_arg_matches(&matches));
    let args = args.unwrap_or_else(|error| hint::with_setting(error).exit());
    begin(|| args.start(&task))
}

/// The definition of the command line of a program that calls [`train`].
pub fn train_command() -> clap::Command {
    TaskArgs::augment_args(clap::Command::new("train"))
        .about("Trains a model: on all GPUs, on threads of this process, or as one rank.")
        .after_help(Exit::help())
}

/// The flags of a run. Later sources override earlier ones: defaults, files, `--set`, then the
/// dedicated flags.
#[derive(Args, Debug)]
struct TaskArgs {
    /// A TOML file of settings. Repeatable; later files override earlier ones.
    #[arg(long, value_name = "FILE")]
    config: Vec<String>,
    /// A setting, like `parallel.tp=2`; the value is TOML or else a bare string. Repeatable.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Continue the run in this folder with its configuration.
    #[arg(long, value_name = "RUN", conflicts_with_all = ["config", "fresh"])]
    resume: Option<String>,
    /// Layout of the run over ranks, like `tp2-dp2`.
    #[arg(long, value_name = "LAYOUT")]
    layout: Option<String>,
    /// Number of ranks to start without a launcher (threads, or processes on GPUs). A layout without
    /// `dp` is filled up to it.
    #[arg(long, value_name = "N")]
    ranks: Option<usize>,
    /// Number of optimizer steps of the complete run, including those before a restart.
    #[arg(long, value_name = "N")]
    steps: Option<u64>,
    /// Record what each rank does in these steps, as a trace for Perfetto and as a table in the
    /// folder `profile` of the run.
    #[arg(long, value_name = "steps=FIRST-LAST")]
    profile: Option<String>,
    /// Start a new run. An existing run in the folder is renamed to `before-TIME`, and removed when
    /// the new run has a checkpoint.
    #[arg(long)]
    fresh: bool,
    /// The device that the ranks compute on. Default: GPUs if there are any and the program was built
    /// for them, otherwise the CPU.
    #[arg(long, value_enum)]
    device: Option<DeviceArg>,
    /// Print the configuration with all its keys, and do not train.
    #[arg(long)]
    print_config: bool,
}

impl TaskArgs {
    /// Loads the configuration that these flags specify.
    fn load<T: TrainTask>(&self, task: &T) -> Result<TaskConfig<T::Config>, TrainError> {
        let mut layers = TaskLayers::new();
        if let Some(run) = &self.resume {
            layers = layers.with_run(run)?;
        }
        for path in &self.config {
            layers = layers.with_file(path)?;
        }
        for text in &self.set {
            layers = layers.with_set(text)?;
        }
        if let Some(layout) = &self.layout {
            layers = layers.with_layout(layout)?;
        }
        let flags = [
            self.steps.map(|steps| format!("train.steps={steps}")),
            self.ranks.map(|ranks| format!("parallel.ranks={ranks}")),
            self.device
                .map(|device| format!("run.device={}", device.name())),
            self.profile.as_deref().map(profile_setting),
        ];
        for text in flags.into_iter().flatten() {
            layers = layers.with_set(&text)?;
        }
        layers.load(&task.name())
    }

    fn start<T: TrainTask>(&self, task: &T) -> Result<ExitCode, TrainError> {
        if self.print_config {
            print::result(self.load(task)?.to_toml().trim_end())?;
            return Ok(Exit::Done.into());
        }
        match self.prepare(task).map_err(report_start_failure)? {
            Start::Ranks(ranks) => {
                let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
                launch_again(ranks, arguments)
            }
            Start::Here(config) => {
                let stopped = config.run.train.stopped_exit_code;
                let stop = StopSignal::install()?;
                let fresh = is_fresh(&config.run.run.dir, self.fresh)?;
                Ok(match train_task(task, *config, fresh, stop)? {
                    Ended::Finished => Exit::Done.into(),
                    Ended::Stopped(StopReason::Metrics) => Exit::Failed.into(),
                    Ended::Stopped(_) => ExitCode::from(stopped),
                })
            }
        }
    }

    /// Determines the role of this process. If this fails on a rank, the other ranks are notified.
    fn prepare<T: TrainTask>(&self, task: &T) -> Result<Start<T::Config>, TrainError> {
        let config = self.load(task)?;
        let env = RankEnv::from_env()?;
        let world = env.as_ref().map(|env| env.world_size);
        if let (Some(ranks), Some(world_size)) = (self.ranks, world)
            && ranks != world_size
        {
            return Err(TrainError::RanksUnderLauncher { ranks, world_size });
        }
        let devices = config.run.run.device.find()?;
        let layout = config.layout_of(task, devices, world)?;
        if devices.need_processes(&layout, env.as_ref()) {
            return Ok(Start::Ranks(layout.world_size()));
        }
        Ok(Start::Here(Box::new(config)))
    }
}

/// The role of this process in a run.
enum Start<C> {
    /// It starts this number of ranks as processes.
    Ranks(usize),
    /// It trains itself.
    Here(Box<TaskConfig<C>>),
}
