//! The flags of a training run, behind `llama_pretrain` and `megaburn train` alike.

use std::process::ExitCode;

use clap::Args;
use megaburn_collective::RankEnv;
use megaburn_train::{
    ConfigLayers, Ended, Exit, StopReason, TrainConfig, TrainError, pretrain, report_start_failure,
    signal::StopSignal,
};

use super::{
    begin,
    device::{DeviceArg, launch_again},
};

/// How a run is configured on the command line: defaults, then files, then `--set`, then the flags
/// with a name of their own.
#[derive(Args, Clone, Debug)]
pub struct TrainArgs {
    /// A TOML file of settings; may be given several times, later ones override earlier ones.
    #[arg(long, value_name = "FILE")]
    pub config: Vec<String>,
    /// One setting, like `parallel.tp=2`; the value is TOML, else a bare string. Repeatable.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Go on with the run in this folder as it was configured. `--set`, `--steps` and the flags below
    /// change that; those that can change numbers are listed.
    #[arg(long, value_name = "RUN", conflicts_with_all = ["config", "init", "fresh"])]
    pub resume: Option<String>,
    /// Text to train on (plain, or JSON in a .jsonl, .ndjson or .json file) instead of the sources of
    /// the Burn crates.
    #[arg(long, value_name = "FILE")]
    pub data: Option<String>,
    /// Start from this Hugging Face folder, checkpoint or run instead of fresh weights; learning rate,
    /// warm-up and sequence length are then those of fine-tuning, unless they are set.
    #[arg(long, value_name = "PATH")]
    pub init: Option<String>,
    /// How the run is split over ranks, like `tp2-dp2-sp`.
    #[arg(long, value_name = "LAYOUT")]
    pub layout: Option<String>,
    /// Ranks to start without a launcher (threads; on GPUs, processes); a layout without `dp` fills
    /// them.
    #[arg(long, value_name = "N")]
    pub ranks: Option<usize>,
    /// Optimizer steps of the whole run, those before a restart included.
    #[arg(long, value_name = "N")]
    pub steps: Option<u64>,
    /// Start anew. The run that is in the folder is set aside as `before-TIME`, and removed when the new one
    /// has a checkpoint.
    #[arg(long)]
    pub fresh: bool,
    /// What the ranks compute on. Default: `run.device`, which is GPUs where there are any and the
    /// program was built for them, else the CPU.
    #[arg(long, value_enum)]
    pub device: Option<DeviceArg>,
}

impl TrainArgs {
    /// The configuration that these flags make.
    ///
    /// # Errors
    /// The first key or value that is wrong, and where it came from.
    pub fn load(&self) -> Result<TrainConfig, TrainError> {
        let mut layers = ConfigLayers::new();
        if let Some(run) = &self.resume {
            layers = layers.with_run(run)?;
        }
        for path in &self.config {
            layers = layers.with_file(path)?;
        }
        for text in &self.set {
            layers = layers.with_set(text)?;
        }
        if let Some(data) = &self.data {
            layers = layers.with_data(data)?;
        }
        if let Some(init) = &self.init {
            layers = layers.with_init(init)?;
        }
        if let Some(layout) = &self.layout {
            layers = layers.with_layout(layout)?;
        }
        if let Some(steps) = self.steps {
            layers = layers.with_steps(steps)?;
        }
        if let Some(ranks) = self.ranks {
            layers = layers.with_set(&format!("parallel.ranks={ranks}"))?;
        }
        if let Some(device) = self.device {
            layers = layers.with_set(&format!("run.device={}", device.name()))?;
        }
        let config = layers.with_fresh(self.fresh).load()?;
        if let Some(ranks) = self.ranks {
            config.layout(Some(ranks))?;
        }
        Ok(config)
    }

    /// Runs the training; errors are printed. Returns how the process should exit.
    ///
    /// Where the ranks compute on GPUs and no launcher started them, this starts the program once
    /// more for each of them, with the same arguments, and watches over them.
    pub fn run(&self) -> ExitCode {
        begin(|| self.start())
    }

    fn start(&self) -> Result<ExitCode, TrainError> {
        match self.prepare().map_err(report_start_failure)? {
            Start::Ranks(ranks) => launch_again(ranks, std::env::args_os().skip(1)),
            Start::Here(config) => {
                let stopped = config.train.stopped_exit_code;
                Ok(
                    match pretrain(*config, self.fresh, StopSignal::install()?)? {
                        Ended::Finished => Exit::Done.into(),
                        Ended::Stopped(StopReason::Metrics) => Exit::Failed.into(),
                        Ended::Stopped(_) => ExitCode::from(stopped),
                    },
                )
            }
        }
    }

    /// What this process has to do. Where it is a rank of several and this fails, the others hear of it.
    fn prepare(&self) -> Result<Start, TrainError> {
        let config = self.load()?;
        let env = RankEnv::from_env()?;
        let world = env.as_ref().map(|env| env.world_size);
        if let (Some(ranks), Some(world_size)) = (self.ranks, world)
            && ranks != world_size
        {
            return Err(TrainError::RanksUnderLauncher { ranks, world_size });
        }
        let devices = config.run.device.find()?;
        let layout = config.layout_on(devices, world)?;
        if devices.need_processes(&layout, env.as_ref()) {
            return Ok(Start::Ranks(layout.world_size()));
        }
        Ok(Start::Here(Box::new(config)))
    }
}

/// How a training run begins in this process.
enum Start {
    /// It starts so many ranks as processes.
    Ranks(usize),
    /// It trains.
    Here(Box<TrainConfig>),
}
