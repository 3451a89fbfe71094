//! The flags of a training run, behind `llama_pretrain` and `megaburn train` alike.

use std::process::ExitCode;

use clap::{Args, ValueEnum};
use megaburn_collective::RankEnv;
use megaburn_train::{ConfigLayers, Exit, TrainConfig, TrainError, pretrain, signal::StopSignal};

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
        if let Some(layout) = &self.layout {
            layers = layers.with_layout(layout)?;
        }
        if let Some(steps) = self.steps {
            layers = layers.with_steps(steps)?;
        }
        if let Some(ranks) = self.ranks {
            layers = layers.with_set(&format!("parallel.ranks={ranks}"))?;
        }
        let config = layers.load()?;
        if let Some(ranks) = self.ranks {
            config.layout(Some(ranks))?;
        }
        Ok(config)
    }

    /// Runs the training; errors are printed. Returns how the process should exit.
    pub fn run(&self) -> ExitCode {
        start_logging();
        if self.device == DeviceArg::Cuda {
            return fail(
                "--device cuda: this program was built without CUDA support",
                Exit::BadInput,
            );
        }
        match self.start() {
            Ok(()) => Exit::Done.into(),
            Err(error) => fail(&error.to_string(), error.exit()),
        }
    }
}

impl TrainArgs {
    fn start(&self) -> Result<(), TrainError> {
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

fn fail(error: &str, exit: Exit) -> ExitCode {
    eprintln!("error: {error}");
    exit.into()
}

/// Log lines go to stderr: warnings and errors, or what `RUST_LOG` asks for.
fn start_logging() {
    use tracing_subscriber::EnvFilter;
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    // Fails only when the application has a subscriber of its own, which then stands.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .without_time()
        .try_init();
}
