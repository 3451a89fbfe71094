//! A run of a task from its configuration to its last line, with ranks as threads or as processes.

use std::sync::Arc;

use burn::prelude::Device;
use megaburn_collective::{Group, Phase, ProcessGroups, RankEnv};
use megaburn_mesh::Layout;
use megaburn_report::console::human_number;

use super::{
    config::TaskConfig,
    error::TaskRunError,
    stage::PipelineSplit,
    train_task::TrainTask,
    trainer::{DataOf, ModelTrainer},
};
use crate::{
    config::IneffectiveKey,
    device::{Devices, choose_gemm},
    error::TrainError,
    fresh::starts_anew,
    in_place::{InPlace, check_other_sizes},
    monitor::Monitor,
    rank_run::RankRun,
    ranks::run_prepared,
    report::RunDescription,
    run_folder::{RunShare, check_before_start},
    signal::StopSignal,
    start::{self, agree_on, settle},
    stop::Stops,
    stored_checkpoints::check_url,
    train_loop::Ended,
};

/// Trains the model of a task according to `config`, resuming from the last checkpoint in `run.dir`
/// unless `fresh`. Ranks are threads or processes as in [`pretrain`](crate::pretrain), and `stop` is
/// checked as there.
///
/// # Errors
/// The root cause, if several ranks failed. [`TrainError::exit`] is the process's exit code.
pub fn train_task<T: TrainTask>(
    task: &T,
    config: TaskConfig<T::Config>,
    fresh: bool,
    stop: StopSignal,
) -> Result<Ended, TrainError> {
    let env = RankEnv::from_env()?;
    let group = config.run.group_options();
    let mut stops = Stops::new(&config.run, stop);
    let split = task.pipeline(&config.task, config.run.train.micro_batch);
    // Check what a process can check alone before the ranks connect.
    let placed = place(&config, env.as_ref(), fresh, (&task.name(), split.as_ref()));
    let (layout, devices, device) = match placed {
        Ok(found) => found,
        Err(error) => {
            return Err(match env {
                Some(env) => start::tell(env, group, error),
                None => error,
            });
        }
    };
    let in_place = InPlace::enroll(env.as_ref(), true, &mut stops);
    let mut kept: Option<Arc<DataOf<T>>> = None;
    in_place.run(env, &device, &stops, |env, is_restart| {
        // The number of ranks may have changed.
        let world = env.as_ref().filter(|_| is_restart);
        let layout = match world {
            Some(env) => {
                let name = task.name();
                let place = (name.as_str(), split.as_ref());
                config.layout(devices, Some(env.world_size), place)?
            }
            None => layout,
        };
        let fresh = match is_restart {
            true => starts_anew(config.run.run.dir.as_ref(), fresh)?,
            false => fresh,
        };
        let prepare = |_: &_| {
            let data = match &kept {
                Some(data) => data.clone(),
                None => {
                    let data = task.data(&config.task);
                    let data = data.map_err(|why| TaskRunError::cannot("open its data", why))?;
                    config.check_data(&data)?;
                    Arc::new(data)
                }
            };
            kept = Some(data.clone());
            Ok(data)
        };
        let job = TaskRun {
            task,
            config: &config,
            layout,
            devices,
            device: device.clone(),
            fresh,
            stops: &stops,
        };
        let train = |world: &Group, data: &Arc<DataOf<T>>| job.train(world, data);
        run_prepared(&layout, env, group, &device, prepare, train).map(|ended| ended[0])
    })
}

/// Determines the layout and the devices of this process.
fn place<C: serde::Serialize>(
    config: &TaskConfig<C>,
    env: Option<&RankEnv>,
    fresh: bool,
    task: (&str, Option<&PipelineSplit>),
) -> Result<(Layout, Devices, Device), TrainError> {
    let run = &config.run;
    check_url(run)?;
    let devices = run.run.device.find()?;
    if env.is_none_or(|env| env.rank == 0) {
        check_before_start(run, fresh)?;
    }
    let layout = config.layout(devices, env.map(|env| env.world_size), task)?;
    check_other_sizes(env, |ranks| config.layout(devices, Some(ranks), task))?;
    let device = devices.of_this_process(&layout, env)?;
    choose_gemm(&device, run.train.tf32, run.train.tune_products);
    Ok((layout, devices, device))
}

/// The arguments of every rank of a run.
struct TaskRun<'a, T: TrainTask> {
    task: &'a T,
    config: &'a TaskConfig<T::Config>,
    layout: Layout,
    devices: Devices,
    device: Device,
    fresh: bool,
    stops: &'a Stops,
}

impl<T: TrainTask> TaskRun<'_, T> {
    fn train(&self, world: &Group, data: &Arc<DataOf<T>>) -> Result<Ended, TrainError> {
        let starting = Some(world.phase(Phase::Start));
        let pulse = world.pulse();
        let config = self.config;
        let limit = config.run.train.step_timeout();
        let monitor = Monitor::start(world, limit, self.stops.requests())?;
        let (fresh, layout) = (self.fresh, self.layout);
        let on_gpus = self.devices != Devices::Cpu;
        let text = format!("{}{layout}{fresh}{data:?}{on_gpus}", config.to_toml());
        agree_on(world, &text)?;
        let groups = ProcessGroups::new(world, self.layout)?;
        let run = RunShare::take(world, &config.run)?;
        let device = self.device.clone().autodiff();
        let trainer = ModelTrainer::new(
            self.task,
            config.clone(),
            groups.clone(),
            device,
            data.clone(),
        );
        let trainer = settle(world, trainer)?;
        // All ranks: the parameters of a pipeline are on several.
        let num_params = trainer.num_params()?;
        RankRun {
            config: &config.run,
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
        .train(None, |trainer, _, _| Ok(self.describe(trainer, num_params)))
    }

    fn describe(&self, trainer: &ModelTrainer<T>, num_params: usize) -> RunDescription {
        let train = &self.config.run.train;
        let data = &trainer.data;
        let valid = data.valid.as_ref().map_or(String::new(), |valid| {
            format!(", {} for validation", valid.num_samples())
        });
        let unused = self.config.run.ineffective_keys().into_iter();
        let unused = unused.map(|IneffectiveKey { key, used }| {
            format!("{key} has no effect: it is used only {used}")
        });
        RunDescription {
            config: self.config.to_toml(),
            lines: vec![
                format!(
                    "model    {}, {} parameters in {}",
                    trainer.name,
                    human_number(num_params as f64),
                    train.dtype
                ),
                format!("data     {} samples{valid}", data.train.num_samples()),
                format!("steps    {} of {} samples", train.steps, train.global_batch),
            ],
            notes: unused.map(|key| format!("note     {key}")).collect(),
            command: std::env::args().next().unwrap_or_default(),
            unit: "items",
        }
    }
}
