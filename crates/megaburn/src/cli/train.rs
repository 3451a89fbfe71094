//! The flags of a training run, shared by `llama_pretrain` and `megaburn train`.

use std::process::ExitCode;

use clap::Args;
use megaburn_collective::RankEnv;
use megaburn_train::{
    ConfigLayers, Ended, Exit, StopReason, TrainConfig, TrainError, dry_run, pretrain,
    report_start_failure, signal::StopSignal, starts_anew,
};

use super::{
    begin,
    burn_sources::burn_sources,
    device::{DeviceArg, launch_again},
    print,
};

/// The configuration of a run on the command line. Later sources override earlier ones: defaults,
/// files, `--set`, then the dedicated flags.
#[derive(Args, Clone, Debug, Default)]
pub struct TrainArgs {
    /// A TOML file of settings. Repeatable; later files override earlier ones.
    #[arg(long, value_name = "FILE")]
    pub config: Vec<String>,
    /// A setting, like `parallel.tp=2`; the value is TOML or else a bare string. Repeatable.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Continue the run in this folder with its configuration. `--set`, `--steps` and the flags
    /// below change it; changes that can affect results are listed.
    #[arg(long, value_name = "RUN", conflicts_with_all = ["config", "init", "fresh"])]
    pub resume: Option<String>,
    /// Text to train on (plain, or JSON in a .jsonl, .ndjson or .json file) instead of the sources
    /// of the Burn crates.
    #[arg(long, value_name = "FILE")]
    pub data: Option<String>,
    /// Start from this folder of Hugging Face or torchtitan, checkpoint or run instead of random
    /// weights. Learning rate, warm-up and sequence length then default to values for fine-tuning.
    #[arg(long, value_name = "PATH")]
    pub init: Option<String>,
    /// Layout of the run over ranks, like `tp2-dp2-sp`.
    #[arg(long, value_name = "LAYOUT")]
    pub layout: Option<String>,
    /// Number of ranks to start without a launcher (threads, or processes on GPUs). A layout
    /// without `dp` is filled up to it.
    #[arg(long, value_name = "N")]
    pub ranks: Option<usize>,
    /// Number of optimizer steps of the complete run, including those before a restart.
    #[arg(long, value_name = "N")]
    pub steps: Option<u64>,
    /// Record what each rank does in these steps, as a trace for Perfetto and as a table in the
    /// folder `profile` of the run.
    #[arg(long, value_name = "steps=FIRST-LAST")]
    pub profile: Option<String>,
    /// Start a new run. An existing run in the folder is renamed to `before-TIME`, and removed when
    /// the new run has a checkpoint.
    #[arg(long)]
    pub fresh: bool,
    /// The device that the ranks compute on. Default: `run.device`, which defaults to GPUs if there
    /// are any and the program was built for them, otherwise to the CPU.
    #[arg(long, value_enum)]
    pub device: Option<DeviceArg>,
    /// Only check what a start would check, without a model in memory: the configuration, the layout,
    /// the devices, the data, the run's folder and its newest checkpoint. Exits with 0, or with the
    /// error of the run.
    #[arg(long)]
    pub dry_run: bool,
}

impl TrainArgs {
    /// Loads the configuration that these flags specify.
    ///
    /// # Errors
    /// The first wrong key or value, and its origin.
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
        if let Some(profile) = &self.profile {
            layers = layers.with_set(&profile_setting(profile))?;
        }
        let mut config = layers.clone().with_fresh(self.fresh).load()?;
        if self.fresh && !starts_anew(config.run.dir.as_ref(), true)? {
            config = layers.with_fresh(false).load()?;
        }
        if let Some(ranks) = self.ranks {
            config.layout(Some(ranks))?;
        }
        Ok(config)
    }

    /// Runs the training; prints errors. Returns the exit code.
    ///
    /// If the ranks compute on GPUs and no launcher started them, this starts one process of this
    /// program per rank, with the same arguments, and supervises them.
    pub fn run(&self) -> ExitCode {
        begin(|| self.start())
    }

    fn start(&self) -> Result<ExitCode, TrainError> {
        if self.dry_run {
            return self.check();
        }
        match self.prepare().map_err(report_start_failure)? {
            Start::Ranks(ranks) => launch_again(ranks, std::env::args_os().skip(1)),
            Start::Here(config) => {
                let stopped = config.train.stopped_exit_code;
                let stop = StopSignal::install()?;
                let fresh = is_fresh(&config.run.dir, self.fresh)?;
                Ok(match pretrain(*config, fresh, stop, burn_sources)? {
                    Ended::Finished => Exit::Done.into(),
                    Ended::Stopped(StopReason::Metrics) => Exit::Failed.into(),
                    Ended::Stopped(_) => ExitCode::from(stopped),
                })
            }
        }
    }

    /// Checks what a start would check. Of several ranks under a launcher, rank 0 prints.
    fn check(&self) -> Result<ExitCode, TrainError> {
        let config = self.load()?;
        let lines = dry_run(&config, self.fresh, burn_sources)?;
        if RankEnv::from_env()?.is_none_or(|env| env.rank == 0) {
            lines.into_iter().try_for_each(print::result)?;
            print::result("dry run  nothing was trained or written; the run can start")?;
        }
        Ok(Exit::Done.into())
    }

    /// Determines the role of this process. If this fails on a rank, the other ranks are notified.
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

/// Whether the run in the folder `dir` starts anew. Says so if `--fresh` was done before a restart.
pub(super) fn is_fresh(dir: &str, fresh: bool) -> Result<bool, TrainError> {
    let is_fresh = starts_anew(dir.as_ref(), fresh)?;
    if fresh && !is_fresh && RankEnv::from_env()?.is_none_or(|env| env.rank == 0) {
        print::note("run    --fresh was done before the restart; this run continues");
    }
    Ok(is_fresh)
}

/// The setting that `--profile` stands for.
pub(super) fn profile_setting(text: &str) -> String {
    let steps = text.strip_prefix("steps=").unwrap_or(text);
    format!("profile.steps={steps:?}")
}

/// The role of this process in a training run.
enum Start {
    /// It starts this number of ranks as processes.
    Ranks(usize),
    /// It trains itself.
    Here(Box<TrainConfig>),
}
