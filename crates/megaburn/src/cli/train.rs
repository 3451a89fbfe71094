//! The flags of a training run, behind `llama_pretrain` and `megaburn train` alike.

use std::process::ExitCode;

use clap::{Args, ValueEnum};
use megaburn_collective::RankEnv;
use megaburn_train::{ConfigLayers, TrainConfig, TrainError, pretrain, signal::StopSignal};

use super::{done, start_logging};

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
    /// Text to train on (.txt or .jsonl) instead of the sources of the Burn crates.
    #[arg(long, value_name = "FILE")]
    pub data: Option<String>,
    /// Start from this Hugging Face folder, checkpoint or run instead of fresh weights.
    #[arg(long, value_name = "PATH")]
    pub init: Option<String>,
    /// How the run is split over ranks, like `tp2-dp2-sp`.
    #[arg(long, value_name = "LAYOUT")]
    pub layout: Option<String>,
    /// Rank threads to start without a launcher; a layout without `dp` fills them.
    #[arg(long, value_name = "N")]
    pub ranks: Option<usize>,
    /// Optimizer steps of the whole run, those before a restart included.
    #[arg(long, value_name = "N")]
    pub steps: Option<u64>,
    /// Start anew, discarding the checkpoints in the run's folder.
    #[arg(long)]
    pub fresh: bool,
    /// What the ranks compute on.
    #[arg(long, value_enum, default_value_t = DeviceArg::Cpu)]
    pub device: DeviceArg,
}

/// What the ranks compute on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DeviceArg {
    /// Threads or processes of this machine's processor.
    Cpu,
    /// NVIDIA GPUs, one process each.
    Cuda,
}

impl DeviceArg {
    /// Refuses what this program was built without.
    pub(super) fn check(self) -> Result<(), TrainError> {
        match self {
            Self::Cpu => Ok(()),
            Self::Cuda => Err(TrainError::Invalid {
                key: "--device",
                value: "cuda".into(),
                rule: "cpu: this program was built without CUDA support".into(),
            }),
        }
    }
}

impl TrainArgs {
    /// The configuration that these flags make.
    ///
    /// # Errors
    /// The first key or value that is wrong, and where it came from.
    pub fn load(&self) -> Result<TrainConfig, TrainError> {
        let mut layers = ConfigLayers::new();
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
        let config = layers.with_fresh(self.fresh).load()?;
        if let Some(ranks) = self.ranks {
            config.layout(Some(ranks))?;
        }
        Ok(config)
    }

    /// Runs the training; errors are printed. Returns how the process should exit.
    pub fn run(&self) -> ExitCode {
        start_logging();
        done(self.start())
    }

    fn start(&self) -> Result<(), TrainError> {
        self.device.check()?;
        let config = self.load()?;
        if let (Some(ranks), Some(env)) = (self.ranks, RankEnv::from_env()?)
            && ranks != env.world_size
        {
            let world_size = env.world_size;
            return Err(TrainError::RanksUnderLauncher { ranks, world_size });
        }
        pretrain(config, self.fresh, StopSignal::install()?)
    }
}
