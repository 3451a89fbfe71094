//! The folder of a host's checkpoints, if they are not in the run's folder.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use megaburn_checkpoint::{Hosts, Place, check_folders, checkpoint_step};
use megaburn_collective::{Group, host_name};

use super::{
    RunFolderError,
    lock::{self, RunLock},
    names::{LOCK, names_in},
};
use crate::{config::TrainConfig, error::TrainError, start::settle};

/// Overrides the name of the host.
const HOST: &str = "MEGABURN_HOST";

/// In `train.local_checkpoint_dir`, stands for the name of the host.
const NAME: &str = "{host}";

/// The folder, as the first rank of its host holds it.
#[derive(Debug)]
pub(super) struct LocalFolder {
    path: PathBuf,
    lock: Mutex<RunLock>,
}

/// Where the checkpoints of the run are, if each host has a folder of its own. The first rank of
/// each host takes the folder.
///
/// # Errors
/// A folder cannot be created, or another run is using it.
/// # Collective
/// All ranks of `world`.
pub(super) fn take(
    world: &Group,
    config: &TrainConfig,
    run_id: &str,
) -> Result<Option<(Place, Option<LocalFolder>)>, TrainError> {
    let Some(dir) = &config.train.local_checkpoint_dir else {
        return Ok(None);
    };
    let name = env::var(HOST).unwrap_or_else(|_| host_name());
    let replicas = config.train.checkpoint_replicas;
    let hosts = Hosts::find(world, &name, replicas)?;
    if world.rank() == 0 && hosts.num_replicas() < replicas {
        tracing::warn!(
            "train.checkpoint_replicas is {replicas}, but the run has {} host(s): {} other host(s) \
            keep a copy of each checkpoint file",
            hosts.num_hosts(),
            hosts.num_replicas()
        );
    }
    let place = Place::of_each_host(dir.replace(NAME, &name), hosts);
    let is_keeper = place.is_keeper(world);
    let made = if is_keeper { make(place.dir()) } else { Ok(()) };
    settle(world, made.map_err(TrainError::from))?;
    // Before the lock, which a host with the same folder could not take.
    check_folders(&place, world)?;
    let folder = is_keeper.then(|| LocalFolder::take(place.dir(), run_id));
    let folder = settle(world, folder.transpose().map_err(TrainError::from))?;
    Ok(Some((place, folder)))
}

fn make(dir: &Path) -> Result<(), RunFolderError> {
    fs::create_dir_all(dir).map_err(|source| unusable(dir, source))
}

fn unusable(dir: &Path, source: io::Error) -> RunFolderError {
    RunFolderError::Unusable {
        path: dir.to_path_buf(),
        source,
    }
}

impl LocalFolder {
    fn take(dir: &Path, run_id: &str) -> Result<Self, RunFolderError> {
        let path = dir.join(LOCK);
        if path.exists() && !lock::is_lock(dir) {
            return Err(RunFolderError::Taken { path });
        }
        let mut lock = RunLock::take(dir, lock::LEASE)?;
        lock.sign(run_id).map_err(|source| unusable(dir, source))?;
        Ok(Self {
            path: dir.to_path_buf(),
            lock: Mutex::new(lock),
        })
    }

    /// Fails if another run holds the folder, or it was removed.
    pub(super) fn check(&self) -> Result<(), String> {
        let unreadable = |error: io::Error| format!("cannot read its lock: {error}");
        let lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        lock.is_in_place().map_err(unreadable)??;
        lock.is_signed_by_us().map_err(unreadable)?
    }

    /// Fails if the folder holds checkpoints, which a run that starts anew would mix with its own.
    pub(super) fn check_empty(&self) -> Result<(), RunFolderError> {
        let names = names_in(&self.path).map_err(|source| unusable(&self.path, source))?;
        if let Some(name) = names.iter().find(|name| checkpoint_step(name).is_some()) {
            return Err(RunFolderError::LocalCheckpoints {
                path: self.path.join(name),
            });
        }
        Ok(())
    }

    /// Holds the folder for another run from now on.
    pub(super) fn sign(&self, run_id: &str) -> Result<(), RunFolderError> {
        let mut lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        let signed = lock.sign(run_id);
        signed.map_err(|source| unusable(&self.path, source))
    }
}
