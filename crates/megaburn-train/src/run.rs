//! A pre-training run from its configuration to its last line, on threads or as one of several
//! processes.

use std::{path::Path, sync::Arc};

use burn::{prelude::Device, tensor::TensorData};
use megaburn_collective::{Group, Phase, ProcessGroups, RankEnv};
use megaburn_kernels::set_attention_kernel;
use megaburn_mesh::Layout;
use xxhash_rust::xxh3::xxh3_64;

use crate::{
    TrainConfig, TrainError, assets,
    config::Start,
    data::RunData,
    device::Devices,
    lock::RunLock,
    monitor::Monitor,
    ranks::run_prepared,
    report::Reporter,
    signal::StopSignal,
    start::{self, settle},
    trainer::{Trainer, agree_to_stop},
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
    let env = RankEnv::from_env()?;
    let group = config.group_options();
    // What can be checked without the others is checked before the ranks meet.
    let (layout, devices, device) = match place(&config, env.as_ref()) {
        Ok(found) => found,
        Err(error) => return Err(env.map_or_else(|| error, |env| start::tell(env, group, error))),
    };
    let config = Arc::new(config);
    let prepare = || {
        let data = Arc::new(RunData::load(&config)?);
        Ok(Loaded { data, start: config.start(fresh)? })
    };
    let job = Job { config: config.clone(), layout, devices, device, fresh, stop };
    let train = |world: &Group, loaded: &Loaded| job.train(world, loaded);
    run_prepared(&layout, env, group, &job.device, prepare, train).map(drop)
}

/// Where this process computes, after a look at its part of the configuration.
fn place(
    config: &TrainConfig,
    env: Option<&RankEnv>,
) -> Result<(Layout, Devices, Device), TrainError> {
    config.validate()?;
    let devices = config.run.device.find()?;
    let layout = config.layout_on(devices, env.map(|env| env.world_size))?;
    let device = devices.of_this_process(&layout, env)?;
    devices.choose_products(config.train.tf32, config.train.tune_products);
    let attention = config.attention_on(devices)?;
    devices.find_libraries_of(attention)?;
    set_attention_kernel(attention);
    Ok((layout, devices, device))
}

/// What a process loads once it has met the others.
struct Loaded {
    data: Arc<RunData>,
    start: Option<Start>,
}

/// What every rank of a run is given.
struct Job {
    config: Arc<TrainConfig>,
    layout: Layout,
    devices: Devices,
    device: Device,
    fresh: bool,
    stop: StopSignal,
}

impl Job {
    fn train(&self, world: &Group, loaded: &Loaded) -> Result<(), TrainError> {
        let mut starting = Some(world.phase(Phase::Start));
        let pulse = world.pulse();
        let limit = self.config.train.step_timeout();
        let _monitor = Monitor::start(world.rank(), pulse.clone(), limit)?;
        self.agree_on_config(world, loaded)?;
        let groups = ProcessGroups::new(world, self.layout)?;
        let dir = Path::new(&self.config.run.dir);
        let lock = groups.is_main().then(|| RunLock::take(dir)).transpose();
        let _lock = settle(world, lock)?;
        let device = self.device.clone().autodiff();
        let agreed = match &loaded.start {
            Some(Start::Init(source)) => {
                let agreed = settle(world, source.agreed(world).map_err(TrainError::from))?;
                agreed.map(|source| Start::Init(Box::new(source)))
            }
            _ => None,
        };
        let start = agreed.as_ref().or(loaded.start.as_ref());
        let config = self.pinned(start);
        let data = loaded.data.clone();
        let trainer = Trainer::starting_from(start, config.clone(), groups.clone(), device, data);
        let mut trainer = settle(world, trainer)?;
        let resumed = match self.fresh {
            true => trainer.discard_checkpoints().map(|()| None)?,
            false => trainer.resume()?,
        };
        if groups.is_main() && resumed.is_none() {
            assets::keep(&config, start, &loaded.data, dir)?;
        }
        let mut saved = resumed.as_ref().map(|resumed| resumed.progress.step);
        let mut report = groups
            .is_main()
            .then(|| Reporter::start(&config, self.devices, &trainer, &loaded.data, resumed))
            .transpose()?;

        if self.devices == Devices::Cpu {
            drop(starting.take());
        }
        let train = &self.config.train;
        let mut evaluated = None;
        while !trainer.is_finished() {
            let metrics = match trainer.step() {
                Err(TrainError::NonFinite { step, loss, grad_norm, culprit }) => {
                    if let Some(report) = &mut report {
                        report.not_finite(step, loss, grad_norm)?;
                    }
                    return Err(TrainError::NonFinite { step, loss, grad_norm, culprit });
                }
                metrics => metrics?,
            };
            // On GPUs the first step compiles kernels and times products, each rank its own.
            drop(starting.take());
            pulse.beat();
            if let Some(report) = &mut report {
                report.step(&metrics)?;
            }
            if due(metrics.step, train.check_replicas_interval) {
                trainer.check_replicas()?;
            }
            if due(metrics.step, train.eval_interval) {
                evaluated = Some(trainer.evaluate()?);
                report.iter_mut().zip(&evaluated).try_for_each(|(to, eval)| to.eval(eval))?;
            }
            let stop = agree_to_stop(&groups, self.stop.requested().is_some())?;
            if stop || due(metrics.step, train.checkpoint_interval) {
                trainer.save()?;
                saved = Some(metrics.step);
            }
            if stop {
                return report.map_or(Ok(()), |to| to.stopped(metrics.step, &self.stop));
            }
        }

        let step = trainer.progress().step;
        let eval = match evaluated.filter(|eval| eval.step == step) {
            Some(eval) => eval,
            None => {
                let eval = trainer.evaluate()?;
                report.iter_mut().try_for_each(|to| to.final_eval(&eval))?;
                eval
            }
        };
        if saved != Some(step) {
            trainer.save()?;
        }
        let sample = trainer.sample()?;
        report.map_or(Ok(()), |to| to.finish(&eval, sample.as_deref()))
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
    fn agree_on_config(&self, world: &Group, loaded: &Loaded) -> Result<(), TrainError> {
        let Self { config, layout, fresh, .. } = self;
        let on_gpus = self.devices != Devices::Cpu;
        let text = format!("{}{layout}{fresh}{}{on_gpus}", config.to_toml(), loaded.data.hash);
        let mine = TensorData::from([xxh3_64(text.as_bytes()) as i64]);
        if world.broadcast(mine.clone(), 0)? == mine {
            return Ok(());
        }
        Err(TrainError::OtherConfig { rank: world.rank() })
    }
}

fn due(step: u64, interval: u64) -> bool {
    interval > 0 && step.is_multiple_of(interval)
}
