//! A rank's part of a run, from a trainer that is built to the run's last line.

use std::{path::Path, sync::Arc};

use megaburn_collective::{PhaseGuard, ProcessGroups, Pulse, RankEnv};

use crate::{
    config::TrainConfig,
    data::RunData,
    device::Devices,
    error::TrainError,
    gpu_health::GpuHealthReports,
    hang::HangReports,
    profile::Profiler,
    report::{Reporter, RunDescription, RunStart},
    run_folder::{RunFolder, RunShare},
    run_trainer::RunTrainer,
    saves::Saves,
    start::settle,
    state::StateFile,
    stop::Stops,
    stored_checkpoints::StoredCheckpoints,
    stragglers::Stragglers,
    train_loop::{Ended, TrainLoop},
};

/// A rank whose trainer is built, and whose run folder is taken.
pub(crate) struct RankRun<'a, T> {
    pub(crate) config: &'a TrainConfig,
    pub(crate) devices: Devices,
    pub(crate) fresh: bool,
    pub(crate) stops: &'a Stops,
    pub(crate) groups: &'a ProcessGroups,
    pub(crate) run: RunShare,
    pub(crate) trainer: T,
    pub(crate) pulse: Pulse,
    pub(crate) starting: Option<PhaseGuard>,
    pub(crate) hangs: &'a HangReports,
}

impl<T: RunTrainer> RankRun<'_, T> {
    /// Resumes the run if it has a checkpoint, and trains to its end. `describe` is called on rank 0
    /// with the run's folder, and whether the folder was empty before this start; `data` is the data
    /// whose loss is also given in bits per byte.
    ///
    /// # Errors
    /// Any error that ends the run.
    /// # Collective
    /// All ranks.
    pub(crate) fn train(
        self,
        data: Option<&RunData>,
        describe: impl FnOnce(&T, &RunFolder, bool) -> Result<RunDescription, TrainError>,
    ) -> Result<Ended, TrainError> {
        let Self {
            config,
            devices,
            fresh,
            stops,
            groups,
            run,
            mut trainer,
            pulse,
            starting,
            hangs,
        } = self;
        let world = &groups.world;
        // Not earlier: a run whose model cannot be built must not set another run aside.
        let mut stored = StoredCheckpoints::open(world, config, &run.id, fresh)?;
        let run = match stored.continued_run() {
            _ if fresh => run.begin_anew(world, config)?,
            Some(id) => run.continue_run(world, config, id)?,
            None => run,
        };
        stored.take_over(world, &run)?;
        hangs.write_to(Path::new(&config.run.dir), &run.id)?;
        trainer
            .core_mut()
            .enter_run(run.clone(), devices != Devices::Cpu);
        let resumed = match fresh {
            true => None,
            false => trainer.resume_with(&stored)?,
        };
        let saved = resumed.as_ref().map(|resumed| resumed.progress.step);
        let is_own = resumed.as_ref().is_some_and(|it| it.other_run.is_none());
        stops.check_start(trainer.core().progress().step)?;
        let begin = |folder: Arc<RunFolder>| {
            let is_new = resumed.is_none() || stored.continued_run().is_some();
            let description = describe(&trainer, &folder, is_new)?;
            let core = trainer.core();
            let state = StateFile::begin(folder.clone(), core.progress().step, config.train.steps);
            let start = RunStart {
                config,
                folder,
                layout: core.layout(),
                device: core.device.clone(),
                devices,
                description,
                resumed,
            };
            Ok((Reporter::start(start, data)?, state))
        };
        let (report, state) = settle(world, run.folder.map(begin).transpose())?.unzip();
        if let Some(report) = &report {
            trainer.add_eval_losses(report.evals());
        }
        // Not earlier: the losses in the metrics say which checkpoints the store keeps.
        if is_own {
            stored.add_missing(trainer.core(), groups)?;
        }
        // An earlier start may have ended before everything was removed.
        trainer.core().continue_discarding();
        let spans = trainer.core().spans.clone();
        let env = RankEnv::from_env()?;
        let ranks_per_gpu = env.as_ref().map_or(1, |env| env.ranks_per_gpu);
        let local_rank = env.as_ref().map_or(0, |env| env.local_rank);
        let (gpu, index) = match devices {
            Devices::Cpu => (None, 0),
            Devices::Cuda { gpus } => {
                let index = env.as_ref().and_then(|env| env.gpu(gpus));
                (Some(local_rank / ranks_per_gpu), index.unwrap_or(0))
            }
        };
        let train = &config.train;
        let gpu_health = GpuHealthReports::new(train.gpu_health_interval, world.rank(), gpu, index);
        let compared = trainer.core().progress().step;
        TrainLoop {
            profiler: Profiler::new(config, spans)?,
            stragglers: Stragglers::new(train.straggler_interval, groups, gpu, ranks_per_gpu),
            gpu_health,
            config,
            groups,
            trainer,
            report,
            stops,
            state,
            saves: Saves::new(saved),
            stored,
            compared,
            has_trained: false,
            pulse,
            // On GPUs the first step compiles kernels and times GEMMs, separately on each rank.
            starting: starting.filter(|_| devices != Devices::Cpu),
        }
        .run()
    }
}
