//! A pre-training run from its configuration to its last line, with ranks as threads or as
//! processes.

use std::sync::Arc;

use burn::{prelude::Device, tensor::TensorData};
use megaburn_collective::{Group, Phase, ProcessGroups, Progress, RankEnv};
use megaburn_mesh::Layout;
use xxhash_rust::xxh3::xxh3_64;

use crate::{
    assets::assets_of,
    config::{InitFrom, TrainConfig},
    data::{DefaultText, RunData},
    device::{Devices, choose_gemm},
    error::TrainError,
    monitor::Monitor,
    ranks::run_prepared,
    report::Reporter,
    run_folder::{RunFolder, RunShare, check_before_start},
    saves::Saves,
    signal::StopSignal,
    start::{self, settle},
    state::StateFile,
    stop::Stops,
    stored_checkpoints::{StoredCheckpoints, check_url},
    train_loop::{Ended, TrainLoop},
    trainer::Trainer,
};

/// Trains a model according to `config`, resuming from the last checkpoint in `run.dir` unless
/// `fresh`.
///
/// Under a launcher (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT` are set) this process is
/// one rank. Otherwise every rank is a thread of this process, which is possible on the CPU only.
/// Rank 0 prints and writes.
///
/// `stop` is checked at each step and during evaluations: if a stop was requested, the run saves
/// and ends. It does so too at `train.exit_after_minutes` and `train.exit_at_step`.
///
/// `default_text` is the text to train on if `config` has no `data.path`.
///
/// # Errors
/// The root cause, if several ranks failed. [`TrainError::exit`] is the process's exit code.
pub fn pretrain(
    config: TrainConfig,
    fresh: bool,
    stop: StopSignal,
    default_text: DefaultText,
) -> Result<Ended, TrainError> {
    let env = RankEnv::from_env()?;
    let group = config.group_options();
    let stops = Stops::new(&config, stop);
    // Check what a process can check alone before the ranks connect.
    let (layout, devices, device) = match place(&config, env.as_ref(), fresh) {
        Ok(found) => found,
        Err(error) => {
            return Err(match env {
                Some(env) => start::tell(env, group, error),
                None => error,
            });
        }
    };
    let config = Arc::new(config);
    let prepare = |progress: &Progress| {
        let start = config.start(fresh)?;
        let data = RunData::load_with(&config, start.as_ref(), default_text, progress)?;
        let data = Arc::new(data);
        config.check_start(&layout, start.as_ref(), &data)?;
        Ok(Loaded { data, start })
    };
    let job = RankRun {
        config: config.clone(),
        layout,
        devices,
        device,
        fresh,
        stops,
    };
    let train = |world: &Group, loaded: &Loaded| job.train(world, loaded);
    run_prepared(&layout, env, group, &job.device, prepare, train).map(|ended| ended[0])
}

/// Determines the layout and the devices of this process, and checks its part of the configuration.
fn place(
    config: &TrainConfig,
    env: Option<&RankEnv>,
    fresh: bool,
) -> Result<(Layout, Devices, Device), TrainError> {
    config.validate()?;
    check_url(config)?;
    let devices = config.run.device.find()?;
    if env.is_none_or(|env| env.rank == 0) {
        check_before_start(config, fresh)?;
    }
    let layout = config.layout_on(devices, env.map(|env| env.world_size))?;
    let device = devices.of_this_process(&layout, env)?;
    choose_gemm(&device, config.train.tf32, config.train.tune_products);
    let attention = config.attention_on(devices)?;
    devices.find_libraries_of(attention)?;
    Ok((layout, devices, device))
}

/// What a process loads after it has connected to the others.
struct Loaded {
    data: Arc<RunData>,
    start: Option<InitFrom>,
}

/// The arguments of every rank of a run.
struct RankRun {
    config: Arc<TrainConfig>,
    layout: Layout,
    devices: Devices,
    device: Device,
    fresh: bool,
    stops: Stops,
}

impl RankRun {
    fn train(&self, world: &Group, loaded: &Loaded) -> Result<Ended, TrainError> {
        let starting = Some(world.phase(Phase::Start));
        let pulse = world.pulse();
        let limit = self.config.train.step_timeout();
        let _monitor = Monitor::start(world.rank(), pulse.clone(), limit)?;
        self.agree_on_config(world, loaded)?;
        let groups = ProcessGroups::new(world, self.layout)?;
        let run = RunShare::take(world, &self.config)?;
        let device = self.device.clone().autodiff();
        let agreed = match &loaded.start {
            Some(InitFrom::Init(source)) => {
                let agreed = settle(world, source.agreed(world).map_err(TrainError::from))?;
                agreed.map(|source| InitFrom::Init(Box::new(source)))
            }
            _ => None,
        };
        let start = agreed.as_ref().or(loaded.start.as_ref());
        let config = self.pinned(start);
        let data = loaded.data.clone();
        let trainer = Trainer::starting_from(start, config.clone(), groups.clone(), device, data);
        let mut trainer = settle(world, trainer)?;
        // Not earlier: a run whose model cannot be built must not set another run aside.
        let mut stored = StoredCheckpoints::open(world, &config, &run.id, self.fresh)?;
        let run = match stored.continued_run() {
            _ if self.fresh => run.begin_anew(world, &config)?,
            Some(id) => run.continue_run(world, &config, id)?,
            None => run,
        };
        stored.take_over(world, &run)?;
        trainer = trainer
            .in_run(run.clone())
            .compiling(self.devices != Devices::Cpu);
        let resumed = match self.fresh {
            true => None,
            false => trainer.resume_with(&stored)?,
        };
        let saved = resumed.as_ref().map(|resumed| resumed.progress.step);
        let is_own = resumed.as_ref().is_some_and(|it| it.other_run.is_none());
        self.stops.check_start(trainer.progress().step)?;
        let begin = |folder: Arc<RunFolder>| {
            if resumed.is_none() || stored.continued_run().is_some() {
                let tokenizer = loaded.data.tokenizer.as_ref();
                folder.write_assets(&assets_of(&config, start, tokenizer)?)?;
            }
            let step = trainer.progress().step;
            let steps = config.train.steps;
            let state = StateFile::begin(folder.clone(), step, steps);
            let devices = self.devices;
            let data = &loaded.data;
            let report = {
                let from = (start, resumed);
                Reporter::start(&config, folder, devices, &trainer, data, from)?
            };
            Ok((report, state))
        };
        let (report, state) = settle(world, run.folder.map(begin).transpose())?.unzip();
        if let Some(report) = &report {
            trainer.add_eval_losses(report.evals());
        }
        // Not earlier: the losses in the metrics say which checkpoints the store keeps.
        if is_own {
            stored.add_missing(&trainer, &groups)?;
        }
        // An earlier start may have ended before everything was removed.
        trainer.continue_discarding();
        // On GPUs the first step compiles kernels and times GEMMs, separately on each rank.
        let starting = starting.filter(|_| self.devices != Devices::Cpu);
        let config = &config;
        let groups = &groups;
        let stops = &self.stops;
        let has_trained = false;
        TrainLoop {
            config,
            groups,
            trainer,
            report,
            stops,
            state,
            saves: Saves::new(saved),
            stored,
            has_trained,
            pulse,
            starting,
        }
        .run()
    }

    /// The configuration with `model.init` pinned to the checkpoint that was chosen, because the
    /// run that it names may write new ones.
    fn pinned(&self, start: Option<&InitFrom>) -> Arc<TrainConfig> {
        let Some(init) = start.and_then(InitFrom::pinned) else {
            return self.config.clone();
        };
        let mut config = (*self.config).clone();
        config.model.init = Some(init);
        Arc::new(config)
    }

    /// Checks that all ranks have the same configuration, because otherwise they would silently
    /// compute different things.
    ///
    /// # Collective
    /// All ranks.
    fn agree_on_config(&self, world: &Group, loaded: &Loaded) -> Result<(), TrainError> {
        let Self {
            config,
            layout,
            fresh,
            ..
        } = self;
        let on_gpus = self.devices != Devices::Cpu;
        let text = format!(
            "{}{layout}{fresh}{}{}{on_gpus}",
            config.to_toml(),
            loaded.data.hash,
            loaded.data.eval_hash
        );
        let mine = TensorData::from([xxh3_64(text.as_bytes()) as i64]);
        if world.broadcast(mine.clone(), 0)? == mine {
            return Ok(());
        }
        Err(TrainError::OtherConfig { rank: world.rank() })
    }
}
