//! A pre-training run from its configuration to its last line, with ranks as threads or as
//! processes.

use std::sync::Arc;

use burn::prelude::Device;
use megaburn_collective::{Group, Phase, ProcessGroups, Progress, RankEnv};
use megaburn_mesh::Layout;

use crate::{
    assets::assets_of,
    config::{InitFrom, TrainConfig},
    data::{DefaultText, RunData},
    device::{Devices, choose_gemm},
    error::TrainError,
    fresh::starts_anew,
    in_place::{InPlace, check_other_sizes},
    monitor::Monitor,
    rank_run::RankRun,
    ranks::run_prepared,
    report::describe_decoder,
    run_folder::{RunShare, check_before_start},
    signal::StopSignal,
    start::{self, agree_on, settle},
    stop::Stops,
    stored_checkpoints::check_url,
    train_loop::Ended,
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
/// Under `megaburn launch --restart-in-place`, a process whose rank only lost a peer does not return: it
/// waits for the launcher, meets the other ranks again, and resumes.
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
    let mut stops = Stops::new(&config, stop);
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
    // After the restart of a fresh run, its model comes from its own checkpoint.
    let is_possible = !fresh || config.model.init.is_none();
    let in_place = InPlace::enroll(env.as_ref(), is_possible, &mut stops);
    let mut kept: Option<Arc<RunData>> = None;
    in_place.run(env, &device, &stops, |env, is_restart| {
        // The number of ranks may have changed.
        let world = env.as_ref().filter(|_| is_restart);
        let layout = match world {
            Some(env) => config.layout_on(devices, Some(env.world_size))?,
            None => layout,
        };
        let fresh = match is_restart {
            true => starts_anew(config.run.dir.as_ref(), fresh)?,
            false => fresh,
        };
        let prepare = |progress: &Progress| {
            let start = config.start(fresh)?;
            let data = match &kept {
                Some(data) => data.clone(),
                None => {
                    let start = start.as_ref();
                    RunData::load_with(&config, start, default_text, progress)?.into()
                }
            };
            config.check_start(&layout, start.as_ref(), &data)?;
            kept = Some(data.clone());
            Ok(Loaded { data, start })
        };
        let job = DecoderRun {
            config: config.clone(),
            layout,
            devices,
            device: device.clone(),
            fresh,
            stops: &stops,
        };
        let train = |world: &Group, loaded: &Loaded| job.train(world, loaded);
        run_prepared(&layout, env, group, &device, prepare, train).map(|ended| ended[0])
    })
}

/// As [`find_place`], and sets how this process multiplies matrices.
fn place(
    config: &TrainConfig,
    env: Option<&RankEnv>,
    fresh: bool,
) -> Result<(Layout, Devices, Device), TrainError> {
    let (layout, devices, device) = find_place(config, env, fresh)?;
    choose_gemm(&device, config.train.tf32, config.train.tune_products);
    Ok((layout, devices, device))
}

/// Determines the layout and the devices of this process, and checks its part of the configuration.
///
/// # Errors
/// The configuration, the layout, the run's folder or the devices cannot be used.
pub(crate) fn find_place(
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
    check_other_sizes(env, |ranks| config.layout_on(devices, Some(ranks)))?;
    let device = devices.of_this_process(&layout, env)?;
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
struct DecoderRun<'a> {
    config: Arc<TrainConfig>,
    layout: Layout,
    devices: Devices,
    device: Device,
    fresh: bool,
    stops: &'a Stops,
}

impl DecoderRun<'_> {
    fn train(&self, world: &Group, loaded: &Loaded) -> Result<Ended, TrainError> {
        let starting = Some(world.phase(Phase::Start));
        let pulse = world.pulse();
        let limit = self.config.train.step_timeout();
        let monitor = Monitor::start(world, limit, self.stops.requests())?;
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
        let trainer = settle(world, trainer)?;
        RankRun {
            config: &config,
            devices: self.devices,
            fresh: self.fresh,
            stops: self.stops,
            groups: &groups,
            run,
            trainer,
            pulse,
            starting,
            hangs: &monitor.hangs,
        }
        .train(Some(&*loaded.data), |trainer, folder, is_new| {
            if is_new {
                let tokenizer = loaded.data.tokenizer.as_ref();
                folder.write_assets(&assets_of(&config, start, tokenizer)?)?;
            }
            let data = &loaded.data;
            describe_decoder(&config, folder.path(), self.devices, trainer, data, start)
        })
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

    /// Checks that all ranks have the same configuration and data.
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
        agree_on(world, &text)
    }
}
