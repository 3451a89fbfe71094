//! A run's folder: which files in it are the run's, which run it belongs to, and whether it still
//! does. Every file that a run writes is written through this module, or after [`RunFolder::check`]
//! allowed it.
//!
//! ```text
//! RUN/
//!   run.json              the marker: says that this folder is a run's, and which run's
//!   .lock                 held by the running process; names its run and its start
//!   config.toml           the resolved configuration
//!                         (config.resolved.toml if config.toml is the user's)
//!   metrics.jsonl         one line per start, step and evaluation
//!   hangs.jsonl           what each rank did when ranks hung or disagreed
//!   state.json            whether the run is running, stopped, finished or failed
//!   loss.svg              the plot of the loss
//!   metrics.csv, evaluations.csv, tensorboard/, wandb/
//!                         the same for other programs, with `[log]`
//!   profile/              profiles, with `[profile]`
//!   hf/                   the small files of the model: tokenizer, generation_config.json
//!   checkpoints/step-…    checkpoints
//!   before-…/             runs that --fresh set aside; removed once there is a checkpoint
//! ```

mod aside;
mod assets;
mod config_file;
mod discard;
mod error;
mod idle;
mod inspect;
mod local;
mod lock;
mod logs;
mod marker;
pub(crate) mod names;
mod owned;
mod shared;

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use megaburn_checkpoint::{Place, write_atomic};
use megaburn_collective::{Group, objects};
use megaburn_models::assets::Assets;

use crate::{config::TrainConfig, error::TrainError, start::settle};
pub(crate) use config_file::{config_of, write as write_config};
pub use error::RunFolderError;
pub use idle::{IdleRun, RunInfo, RunPaths};
use inspect::{FolderContent, Trace, inspect, is_part_of};
use local::LocalFolder;
use lock::RunLock;
pub(crate) use marker::Marker;
use names::{CHECKPOINTS, names_in};

/// The folder of a running run, as rank 0 holds it.
#[derive(Debug)]
pub(crate) struct RunFolder {
    path: PathBuf,
    held: Mutex<OwnedRun>,
}

#[derive(Debug)]
struct OwnedRun {
    lock: RunLock,
    marker: Marker,
}

/// What each rank knows about the folders of the run.
#[derive(Clone, Debug)]
pub(crate) struct RunShare {
    /// The run's id: 128 random bits in hexadecimal.
    pub(crate) id: String,
    /// The folder; only on rank 0.
    pub(crate) folder: Option<Arc<RunFolder>>,
    /// Where the checkpoints are.
    pub(crate) place: Place,
    /// The folder of this host's checkpoints, if each host has its own; only on the host's first
    /// rank.
    local: Option<Arc<LocalFolder>>,
}

/// Checks that the run of this configuration may start in its folder, and that the port for
/// Prometheus is free. Nothing is written.
///
/// # Errors
/// The port is in use. The folder holds other files; with `fresh`, `model.init` is a part of the
/// existing run, or files of the user are at paths where the new run would write.
pub(crate) fn check_before_start(config: &TrainConfig, fresh: bool) -> Result<(), TrainError> {
    config.log.check_port()?;
    let dir = Path::new(&config.run.dir);
    let found = inspect(dir, config.run.allow_other_files)?;
    if fresh && matches!(found, FolderContent::Run(_)) {
        assets::check(dir)?;
    }
    if let Some(init) = config.model.init.as_ref().filter(|_| fresh)
        && is_part_of(dir, Path::new(init))
    {
        let init = init.clone();
        let path = dir.to_path_buf();
        return Err(RunFolderError::FreshInit { init, path }.into());
    }
    Ok(())
}

impl RunShare {
    /// Takes the folder on rank 0, and checks that all ranks see it.
    ///
    /// # Errors
    /// The folder cannot be used by a run; another run holds it; a rank does not see it.
    /// # Collective
    /// All ranks of `world`.
    pub(crate) fn take(world: &Group, config: &TrainConfig) -> Result<Self, TrainError> {
        let dir = Path::new(&config.run.dir);
        let take = || RunFolder::take(dir, config.run.allow_other_files).map(Arc::new);
        let folder = settle(world, (world.rank() == 0).then(take).transpose())?;
        let id = id_of(world, folder.as_deref())?;
        let (place, local) = match local::take(world, config, &id)? {
            Some((place, local)) => (place, local.map(Arc::new)),
            // Other ranks use the folder for checkpoints only.
            None => {
                shared::agree(world, dir, &id, shared::PATIENCE)?;
                (Place::shared(dir.join(CHECKPOINTS)), None)
            }
        };
        Ok(Self {
            id,
            folder,
            place,
            local,
        })
    }

    /// Sets the existing run aside, and starts another one in the same folder.
    ///
    /// # Errors
    /// Something cannot be moved; the next start undoes the rest.
    /// # Collective
    /// All ranks of `world`.
    pub(crate) fn begin_anew(
        self,
        world: &Group,
        config: &TrainConfig,
    ) -> Result<Self, TrainError> {
        // Check what each host has before anything is moved.
        let local = self.local.as_deref();
        let checked = local.map_or(Ok(()), LocalFolder::check_empty);
        settle(world, checked.map_err(TrainError::from))?;
        settle(
            world,
            self.folder
                .as_ref()
                .map_or(Ok(()), |folder| folder.begin_anew()),
        )?;
        self.renamed(world, config)
    }

    /// Takes over the run `run_id`, which this folder holds nothing of: its checkpoints are
    /// elsewhere.
    ///
    /// # Errors
    /// The folder cannot be written.
    /// # Collective
    /// All ranks of `world`.
    pub(crate) fn continue_run(
        self,
        world: &Group,
        config: &TrainConfig,
        run_id: &str,
    ) -> Result<Self, TrainError> {
        let folder = self.folder.as_ref();
        let taken = folder.map_or(Ok(()), |folder| folder.continue_run(run_id));
        settle(world, taken)?;
        self.renamed(world, config)
    }

    /// The same folders, after rank 0 has changed the run that they belong to.
    fn renamed(self, world: &Group, config: &TrainConfig) -> Result<Self, TrainError> {
        let id = id_of(world, self.folder.as_deref())?;
        let local = self.local.as_deref();
        let signed = local.map_or(Ok(()), |local| local.sign(&id));
        settle(world, signed.map_err(TrainError::from))?;
        if self.place.hosts().is_none() {
            shared::agree(world, Path::new(&config.run.dir), &id, shared::PATIENCE)?;
        }
        Ok(Self { id, ..self })
    }

    /// Checks that the folders which this rank has taken still belong to the run; the error is the
    /// reason why one does not.
    pub(crate) fn check(&self) -> Result<(), String> {
        let folder = self.folder.as_deref();
        folder.map_or(Ok(()), RunFolder::check_all)?;
        let local = self.local.as_deref();
        local.map_or(Ok(()), LocalFolder::check)
    }
}

/// The id of the run whose folder rank 0 has taken.
///
/// # Collective
/// All ranks of `world`.
fn id_of(world: &Group, folder: Option<&RunFolder>) -> Result<String, TrainError> {
    let id: Option<String> = objects::broadcast(world, &folder.map(RunFolder::id))?;
    Ok(id.expect("rank 0 has locked the folder"))
}

impl RunFolder {
    fn take(dir: &Path, allow_other_files: bool) -> Result<Self, TrainError> {
        inspect(dir, allow_other_files)?;
        let fail = |source| RunFolderError::Unusable {
            path: dir.to_path_buf(),
            source,
        };
        fs::create_dir_all(dir).map_err(fail)?;
        let mut lock = RunLock::take(dir, lock::LEASE)?;
        // Inspect again now that the lock is held: another start may have been faster.
        let marker = match inspect(dir, allow_other_files)? {
            FolderContent::Run(marker) => marker,
            found => {
                let marker = Marker::new().map_err(fail)?;
                if found == FolderContent::Unmarked(Trace::Metrics) {
                    assets::adopt(dir, &marker.run_id).map_err(fail)?;
                }
                marker.write(dir).map_err(fail)?;
                marker
            }
        };
        make_folder(&dir.join(CHECKPOINTS)).map_err(fail)?;
        assets::restore(dir).map_err(fail)?;
        aside::settle(dir, &marker)?;
        remove_leftovers(dir).map_err(fail)?;
        lock.sign(&marker.run_id).map_err(fail)?;
        Ok(Self {
            path: dir.to_path_buf(),
            held: Mutex::new(OwnedRun { lock, marker }),
        })
    }

    fn begin_anew(&self) -> Result<(), TrainError> {
        let OwnedRun { lock, marker } = &mut *self.held();
        let dir = &self.path;
        let fail = |source| RunFolderError::Unusable {
            path: dir.clone(),
            source,
        };
        // Check before anything is moved.
        assets::check(dir)?;
        let aside = aside::set_aside(dir, marker)?;
        let set_aside = marker.set_aside.iter().cloned().chain(aside).collect();
        let new = Marker::new().map_err(fail)?.with_set_aside(set_aside);
        new.write(dir).map_err(fail)?;
        aside::settle(dir, &new)?;
        *marker = new;
        Ok(lock.sign(&marker.run_id).map_err(fail)?)
    }

    fn continue_run(&self, run_id: &str) -> Result<(), TrainError> {
        let OwnedRun { lock, marker } = &mut *self.held();
        let fail = |source| RunFolderError::Unusable {
            path: self.path.clone(),
            source,
        };
        let continued = marker.clone().with_run_id(run_id);
        continued.write(&self.path).map_err(fail)?;
        *marker = continued;
        Ok(lock.sign(&marker.run_id).map_err(fail)?)
    }

    fn held(&self) -> MutexGuard<'_, OwnedRun> {
        // The guarded state is consistent at any time, so a panic elsewhere does not matter.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Path of the folder.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The run's id: 128 random bits in hexadecimal.
    pub(crate) fn id(&self) -> String {
        self.held().marker.run_id.clone()
    }

    /// The folders inside it that hold runs which `--fresh` set aside and that are not removed yet.
    pub(crate) fn set_aside(&self) -> Vec<PathBuf> {
        let names = self.set_aside_names().into_iter();
        names.map(|name| self.path.join(name)).collect()
    }

    fn set_aside_names(&self) -> Vec<String> {
        self.held().marker.set_aside.clone()
    }

    /// Checks that the folder at the path still belongs to this run. Costs one `stat`, because it
    /// is called for each line of metrics.
    ///
    /// # Errors
    /// [`RunFolderError::Lost`] if the folder was removed or replaced. A folder that cannot be
    /// examined now counts as the run's, because a network file system may be unavailable for a
    /// while.
    pub(crate) fn check(&self) -> Result<(), RunFolderError> {
        let lost = |why| RunFolderError::Lost {
            path: self.path.clone(),
            why,
        };
        self.held()
            .lock
            .is_in_place()
            .unwrap_or(Ok(()))
            .map_err(lost)
    }

    /// As [`check`](Self::check), and also checks the marker and the text of the lock. Called
    /// before a checkpoint is written and before it is committed.
    fn check_all(&self) -> Result<(), String> {
        let unreadable = |error: io::Error| format!("cannot read its lock: {error}");
        let OwnedRun { lock, marker: own } = &*self.held();
        lock.is_in_place().map_err(unreadable)??;
        lock.is_signed_by_us().map_err(unreadable)??;
        match Marker::read(&self.path) {
            Ok(Some(marker)) if marker.run_id == own.run_id => Ok(()),
            Ok(Some(marker)) => Err(format!("run {} was started there", marker.run_id)),
            Ok(None) => Err("its marker was removed".to_string()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Writes one of the run's small files atomically.
    ///
    /// # Errors
    /// The folder no longer belongs to the run; the file cannot be written.
    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> Result<(), TrainError> {
        self.check()?;
        let path = self.path.join(name);
        write_atomic(&path, bytes).map_err(|source| TrainError::Write { path, source })
    }

    /// Writes the resolved configuration and returns the name of its file.
    ///
    /// # Errors
    /// The file cannot be written, or the folder no longer belongs to the run.
    pub(crate) fn write_config(&self, text: &str) -> Result<String, TrainError> {
        self.check()?;
        let fail = |source| TrainError::Write {
            path: self.path.join(names::CONFIG),
            source,
        };
        config_file::write(&self.path, text).map_err(fail)
    }

    /// Writes the small files of the run's model.
    ///
    /// # Errors
    /// `hf/` was not written by a run; a file cannot be written.
    pub(crate) fn write_assets(&self, assets: &Assets) -> Result<(), TrainError> {
        assets::write(&self.path, assets, &self.id())
    }
}

/// Creates the folder of checkpoints if it does not exist. It is never recreated while the run is
/// going.
fn make_folder(dir: &Path) -> io::Result<()> {
    match fs::create_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && dir.is_dir() => Ok(()),
        result => result,
    }
}

/// Removes small files that were partially written when a process was killed.
fn remove_leftovers(dir: &Path) -> io::Result<()> {
    for name in names_in(dir)? {
        let path = dir.join(&name);
        if owned::half_written(&name).is_some() && path.is_file() {
            fs::remove_file(path)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
