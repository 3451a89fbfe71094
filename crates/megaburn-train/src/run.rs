//! A pre-training run from its configuration to its last line, on threads or as one of several
//! processes.

use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    path::Path,
    sync::{Arc, Once},
    thread,
    time::Duration,
};

use burn::{prelude::Device, tensor::TensorData};
use megaburn_checkpoint::CheckpointError;
use megaburn_collective::{
    CollectiveError, ConnectOptions, Group, GroupOptions, ProcessGroups, RankEnv, RankFailure,
    connect, region::FAILED_REGION, run_threads,
};
use megaburn_mesh::Layout;
use xxhash_rust::xxh3::xxh3_64;

use crate::{
    Exit, TrainConfig, TrainError,
    data::RunData,
    lock::RunLock,
    report::Reporter,
    signal::StopSignal,
    trainer::{Trainer, agree_to_stop},
};

/// Trains a Llama as `config` says, resuming from the last checkpoint in `run.dir` unless `fresh`.
///
/// Under a launcher (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT` are set) this process is one
/// rank; otherwise every rank is a thread of it. Rank 0 prints and writes.
///
/// Each step `stop` is looked at: when it was requested, the run saves and ends.
///
/// # Errors
/// The root cause, where several ranks failed. [`TrainError::exit`] is the process's exit code.
pub fn pretrain(config: TrainConfig, fresh: bool, stop: StopSignal) -> Result<(), TrainError> {
    config.validate()?;
    quiet_failed_regions();
    let env = RankEnv::from_env()?;
    let layout = config.layout(env.as_ref().map(|env| env.world_size))?;
    refuse_axes_to_come(&layout)?;
    let group = GroupOptions { seed: config.run.seed, timeout: config.train.timeout() };
    let data = Arc::new(RunData::load(&config)?);
    let job = Job { config: Arc::new(config), layout, fresh, data, stop };
    match env {
        Some(env) => {
            let ranks = env.local_world_size;
            let patience = group.timeout.max(SLOWEST_START);
            let options =
                ConnectOptions::new(env).with_group(group).with_rendezvous_timeout(patience);
            let world = connect(&options)?;
            in_own_pool(ranks, || job.run_rank(&world))
        }
        None => {
            let ranks = layout.world_size();
            root_cause(run_threads(ranks, group, |world| {
                in_own_pool(ranks, || job.run_rank(&world))
            }))
        }
    }
}

/// Processes of one run may be started this far apart, however impatient their collectives are.
const SLOWEST_START: Duration = Duration::from_secs(60);

/// Autodiff walks deep graphs on the rank's own stack.
const STACK_BYTES: usize = 32 << 20;

/// Pipeline, context and expert parallelism are laid out but not built yet.
fn refuse_axes_to_come(layout: &Layout) -> Result<(), TrainError> {
    let degrees = [("pp", layout.pp), ("cp", layout.cp), ("ep", layout.ep), ("etp", layout.etp)];
    match degrees.into_iter().find(|(_, degree)| *degree > 1) {
        Some((axis, degree)) => Err(TrainError::AxisToCome { axis, degree }),
        None => Ok(()),
    }
}

/// Runs a rank on a rayon pool of its own, so that Burn's CPU backend works for it there: its equal
/// share of the cores of `ranks` ranks on this host (`RAYON_NUM_THREADS` overrides). In the global
/// pool the ranks of a process would queue behind each other.
fn in_own_pool<T: Send>(ranks: usize, rank: impl FnOnce() -> T + Send) -> T {
    let cores = thread::available_parallelism().map_or(1, |cores| cores.get());
    let threads = match std::env::var_os("RAYON_NUM_THREADS") {
        Some(_) => 0, // Rayon reads the variable itself.
        None => (cores / ranks.max(1)).max(1),
    };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).stack_size(STACK_BYTES);
    pool.build().expect("the system has room for a thread").install(rank)
}

/// A collective that fails in the middle of `backward` unwinds the rank. What it says is printed
/// once, as the run's error, not by every rank's panic.
fn quiet_failed_regions() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let default = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let message = info.payload_as_str().unwrap_or_default();
            if !message.starts_with(FAILED_REGION) {
                default(info);
            }
        }));
    });
}

/// What every rank of a run is given.
struct Job {
    config: Arc<TrainConfig>,
    layout: Layout,
    fresh: bool,
    data: Arc<RunData>,
    stop: StopSignal,
}

impl Job {
    /// Runs one rank; whatever ends it badly ends the others too.
    fn run_rank(&self, world: &Group) -> Result<(), TrainError> {
        let result = match catch_unwind(AssertUnwindSafe(|| self.train(world))) {
            Ok(result) => result,
            Err(panic) => match world.failure() {
                Some(failure) => Err(failure.into()),
                None => resume_unwind(panic),
            },
        };
        if let Err(error) = &result
            && world.failure().is_none()
        {
            world.abort(&error.to_string());
        }
        result
    }

    fn train(&self, world: &Group) -> Result<(), TrainError> {
        self.agree_on_config(world)?;
        let groups = ProcessGroups::new(world, self.layout)?;
        let dir = Path::new(&self.config.run.dir);
        let _lock = groups.is_main().then(|| RunLock::take(dir)).transpose()?;
        let device = Device::flex().autodiff();
        let mut trainer =
            Trainer::new(self.config.clone(), groups.clone(), device, self.data.clone())?;
        let resumed = match self.fresh {
            true => trainer.discard_checkpoints().map(|()| None)?,
            false => trainer.resume()?,
        };
        let mut report = groups
            .is_main()
            .then(|| Reporter::start(&self.config, &self.layout, &trainer, &self.data, resumed))
            .transpose()?;

        let train = &self.config.train;
        let mut evaluated = None;
        let mut saved = resumed.map(|resumed| resumed.progress.step);
        while !trainer.is_finished() {
            let metrics = match trainer.step() {
                Err(TrainError::NonFinite { step, loss, grad_norm, param }) => {
                    if let Some(report) = &mut report {
                        report.not_finite(step, loss, grad_norm)?;
                    }
                    return Err(TrainError::NonFinite { step, loss, grad_norm, param });
                }
                metrics => metrics?,
            };
            if let Some(report) = &mut report {
                report.step(&metrics)?;
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

    /// Ranks started with different configurations would compute different things without noticing.
    ///
    /// # Collective
    /// All ranks.
    fn agree_on_config(&self, world: &Group) -> Result<(), TrainError> {
        let text =
            format!("{}{}{}{}", self.config.to_toml(), self.layout, self.fresh, self.data.hash);
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

/// The error that the others followed from: a rank's own before one it heard of, and any before
/// those of a lost peer.
fn root_cause(ranks: Vec<Result<(), RankFailure<TrainError>>>) -> Result<(), TrainError> {
    let errors = ranks.into_iter().enumerate().filter_map(|(rank, result)| {
        result.err().map(|failure| match failure {
            RankFailure::Failed(error) => error,
            RankFailure::Panicked(message) => TrainError::RankPanicked { rank, message },
        })
    });
    let blame = |error: &TrainError| match error {
        error if error.collective().is_some_and(CollectiveError::is_echo) => 2,
        TrainError::Checkpoint(CheckpointError::Peer { .. }) => 1,
        error if error.exit() == Exit::PeerLost => 1,
        _ => 0,
    };
    errors.min_by_key(blame).map_or(Ok(()), Err)
}
