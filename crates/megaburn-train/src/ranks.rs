//! Runs one function on every rank: as threads of this process, or as one of several processes.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::Once,
};

use burn::prelude::Device;
use megaburn_checkpoint::CheckpointError;
use megaburn_collective::{
    CollectiveError, Group, GroupOptions, Phase, Progress, RankEnv, RankFailure, connect,
    region::FAILED_REGION, run_threads,
};
use megaburn_launch::in_own_pool;
use megaburn_mesh::Layout;

use crate::{
    error::TrainError,
    exit::Exit,
    failure::{diagnose, is_about_device},
    start,
};

/// Runs `rank` on every rank of `layout` and returns the results in rank order. The ranks are
/// threads of this process; under a launcher (`env`), this process is one rank and only its own
/// result is returned. Each rank computes on `device`, in its own rayon pool.
///
/// # Errors
/// The root cause, if several ranks failed. A rank that fails aborts the others.
pub fn run_ranks<T: Send>(
    layout: &Layout,
    env: Option<RankEnv>,
    group: GroupOptions,
    device: &Device,
    rank: impl Fn(&Group) -> Result<T, TrainError> + Sync,
) -> Result<Vec<T>, TrainError> {
    run_prepared(
        layout,
        env,
        group,
        device,
        |_| Ok(()),
        |world, ()| rank(world),
    )
}

/// As [`run_ranks`], after running `prepare` once in this process. Ranks that are processes connect
/// first: the others wait for a rank whose preparation takes long ([`Phase::Start`]) while it
/// reports progress, and a rank whose preparation fails ends all ranks with its error.
///
/// # Errors
/// As [`run_ranks`]; also the error of `prepare`.
pub(crate) fn run_prepared<P: Send + Sync, T: Send>(
    layout: &Layout,
    env: Option<RankEnv>,
    group: GroupOptions,
    device: &Device,
    prepare: impl FnOnce(&Progress) -> Result<P, TrainError>,
    rank: impl Fn(&Group, &P) -> Result<T, TrainError> + Sync,
) -> Result<Vec<T>, TrainError> {
    quiet_failed_regions();
    match env {
        Some(env) => {
            let ranks = env.local_world_size;
            let world = connect(&start::options(env, group))?;
            let run = |world: &Group| {
                let phase = world.phase(Phase::Start);
                let prepared = start::settle(world, prepare(phase.progress()))?;
                drop(phase);
                with_own_cores(ranks, || freeing(device, || rank(world, &prepared)))
            };
            guarded(&world, device, run).map(|result| vec![result])
        }
        None => {
            let ranks = layout.world_size();
            let prepared = prepare(&Progress::none())?;
            let run = |world: &Group| with_own_cores(ranks, || rank(world, &prepared));
            root_cause(run_threads(ranks, group, |world| {
                guarded(&world, device, run)
            }))
        }
    }
}

/// Runs one rank; if it fails or panics, the other ranks are aborted.
fn guarded<T>(
    world: &Group,
    device: &Device,
    rank: impl FnOnce(&Group) -> Result<T, TrainError>,
) -> Result<T, TrainError> {
    let result = match catch_unwind(AssertUnwindSafe(|| rank(world))) {
        Ok(Err(error)) if is_about_device(&error.to_string()) => Err(match peers_failure(world) {
            Some(failure) => failure.into(),
            None => diagnose(&error.to_string(), device).unwrap_or(error),
        }),
        Ok(result) => result,
        Err(panic) => match (peers_failure(world), panic_text(&*panic)) {
            (Some(failure), _) => Err(failure.into()),
            (None, Some(text)) if is_about_device(text) => {
                Err(diagnose(text, device).expect("the text describes a device error"))
            }
            (None, _) => match world.failure() {
                Some(failure) => Err(failure.into()),
                None => resume_unwind(panic),
            },
        },
    };
    if let Err(error) = &result
        && world.failure().is_none()
    {
        world.abort(&error.to_string());
    }
    result
}

/// The failure of the world's collectives, unless it began on this rank's GPU, in which case the
/// GPU's own error says more. If a peer failed, this rank's GPU only reports that its inputs are
/// missing.
fn peers_failure(world: &Group) -> Option<CollectiveError> {
    world
        .failure()
        .filter(|failure| !matches!(failure, CollectiveError::Device { .. }))
}

pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> Option<&str> {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied())
}

/// Runs a rank; if it fails or panics, gives the free memory of this thread's stream back to the
/// device, because a restart in place computes on another one.
fn freeing<T>(
    device: &Device,
    rank: impl FnOnce() -> Result<T, TrainError>,
) -> Result<T, TrainError> {
    let result = catch_unwind(AssertUnwindSafe(rank));
    if !matches!(result, Ok(Ok(_))) {
        device.memory_cleanup();
    }
    result.unwrap_or_else(|panic| resume_unwind(panic))
}

/// Runs a rank with its share of the host's cores.
fn with_own_cores<T: Send>(
    ranks: usize,
    rank: impl FnOnce() -> Result<T, TrainError> + Send,
) -> Result<T, TrainError> {
    in_own_pool(ranks, rank).unwrap_or_else(|error| {
        let why = error.to_string();
        Err(TrainError::NoThread { why })
    })
}

/// A collective that fails inside `backward` unwinds the rank, and so does reading a tensor that a
/// device never computed. Their messages are printed once, as the run's error, and not by the panic
/// of every rank.
fn quiet_failed_regions() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let default = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let message = info.payload_as_str().unwrap_or_default();
            if !message.starts_with(FAILED_REGION) && !is_about_device(message) {
                default(info);
            }
        }));
    });
}

/// Picks the error that caused the others: a rank's own error over one that it was notified of, and
/// any error over one about a lost peer.
fn root_cause<T>(ranks: Vec<Result<T, RankFailure<TrainError>>>) -> Result<Vec<T>, TrainError> {
    let mut values = Vec::new();
    let mut errors = Vec::new();
    for (rank, result) in ranks.into_iter().enumerate() {
        match result {
            Ok(value) => values.push(value),
            Err(RankFailure::Failed(error)) => errors.push(error),
            Err(RankFailure::Panicked(message)) => {
                errors.push(TrainError::RankPanicked { rank, message });
            }
            Err(RankFailure::NotStarted(why)) => errors.push(TrainError::NoThread { why }),
        }
    }
    let blame = |error: &TrainError| match error {
        error if error.collective().is_some_and(CollectiveError::is_echo) => 2,
        TrainError::Checkpoint(CheckpointError::Peer { .. }) => 1,
        TrainError::Save { source, .. } if matches!(**source, CheckpointError::Peer { .. }) => 1,
        error if error.exit() == Exit::PeerLost => 1,
        _ => 0,
    };
    errors.into_iter().min_by_key(blame).map_or(Ok(values), Err)
}
