//! A pre-training run from its configuration to its last line, on threads or as one of several
//! processes.

use std::sync::Arc;

use burn::{prelude::Device, tensor::TensorData};
use megaburn_collective::{Group, GroupOptions, ProcessGroups, RankEnv};
use megaburn_kernels::set_attention_kernel;
use megaburn_mesh::Layout;
use xxhash_rust::xxh3::xxh3_64;

use crate::{
    TrainConfig, TrainError,
    config::Start,
    data::RunData,
    device::Devices,
    ranks::run_ranks,
    report::Reporter,
    run_folder::{RunShare, check_before_start, keep_assets},
    signal::StopSignal,
    train_loop::TrainLoop,
    trainer::Trainer,
};

/// Trains a model as `config` says, resuming from the last checkpoint in `run.dir` unless `fresh`.
///
/// Under a launcher (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT` are set) this process is one
/// rank; otherwise every rank is a thread of it, which only ranks on the CPU can be. Rank 0 prints
/// and writes.
///
/// Each step `stop` is looked at: when it was requested, the run saves and ends.
///
/// # Errors
/// The root cause, where several ranks failed. [`TrainError::exit`] is the process's exit code.
pub fn pretrain(config: TrainConfig, fresh: bool, stop: StopSignal) -> Result<(), TrainError> {
    config.validate()?;
    let devices = config.run.device.find()?;
    let env = RankEnv::from_env()?;
    if env.as_ref().is_none_or(|env| env.rank == 0) {
        check_before_start(&config, fresh)?;
    }
    let layout = config.layout_on(devices, env.as_ref().map(|env| env.world_size))?;
    let device = devices.of_this_process(&layout, env.as_ref())?;
    devices.choose_products(config.train.tf32, config.train.tune_products);
    let attention = config.attention_on(devices)?;
    devices.find_libraries_of(attention)?;
    set_attention_kernel(attention);
    let group = GroupOptions { seed: config.run.seed, timeout: config.train.timeout() };
    let data = Arc::new(RunData::load(&config)?);
    let start = config.start(fresh)?;
    config.check_start(&layout, start.as_ref(), &data)?;
    let job = Job { config: Arc::new(config), start, layout, devices, device, fresh, data, stop };
    run_ranks(&job.layout, env, group, &job.device, |world| job.train(world)).map(drop)
}

/// What every rank of a run is given.
struct Job {
    config: Arc<TrainConfig>,
    start: Option<Start>,
    layout: Layout,
    devices: Devices,
    device: Device,
    fresh: bool,
    data: Arc<RunData>,
    stop: StopSignal,
}

impl Job {
    fn train(&self, world: &Group) -> Result<(), TrainError> {
        self.agree_on_config(world)?;
        let groups = ProcessGroups::new(world, self.layout)?;
        let run = RunShare::take(world, &self.config)?;
        let device = self.device.clone().autodiff();
        let agreed = match &self.start {
            Some(Start::Init(source)) => source.agreed(world)?.map(|s| Start::Init(Box::new(s))),
            _ => None,
        };
        let start = agreed.as_ref().or(self.start.as_ref());
        let config = self.pinned(start);
        let data = self.data.clone();
        let mut trainer =
            Trainer::starting_from(start, config.clone(), groups.clone(), device, data)?;
        // Only now: a run whose model cannot be made does not set another one aside.
        let run = if self.fresh { run.begin_anew(world, &config)? } else { run };
        trainer = trainer.in_run(run.clone());
        let resumed = if self.fresh { None } else { trainer.resume()? };
        let saved = resumed.as_ref().map(|resumed| resumed.progress.step);
        let mut report = None;
        if let Some(folder) = run.folder {
            if resumed.is_none() {
                keep_assets(&config, start, &self.data, &folder)?;
            }
            let (devices, data) = (self.devices, &self.data);
            report = Some(Reporter::start(&config, folder, devices, &trainer, data, resumed)?);
        }
        self.stop.begin_training();
        let (config, groups, stop) = (&config, &groups, &self.stop);
        TrainLoop { config, groups, trainer, report, stop, saved }.run()
    }

    /// The configuration with `model.init` as what was chosen of it: another run goes on meanwhile.
    fn pinned(&self, start: Option<&Start>) -> Arc<TrainConfig> {
        let Some(init) = start.and_then(Start::pinned) else { return self.config.clone() };
        let mut config = (*self.config).clone();
        config.model.init = Some(init);
        Arc::new(config)
    }

    /// Ranks started with different configurations would compute different things without noticing.
    ///
    /// # Collective
    /// All ranks.
    fn agree_on_config(&self, world: &Group) -> Result<(), TrainError> {
        let Self { config, layout, fresh, data, .. } = self;
        let on_gpus = self.devices != Devices::Cpu;
        let text = format!("{}{layout}{fresh}{}{on_gpus}", config.to_toml(), data.hash);
        let mine = TensorData::from([xxh3_64(text.as_bytes()) as i64]);
        if world.broadcast(mine.clone(), 0)? == mine {
            return Ok(());
        }
        Err(TrainError::OtherConfig { rank: world.rank() })
    }
}
