//! The folder of a checkpoint before it has its final name.

use std::{
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
};

use megaburn_collective::{Group, ProcessGroups, Progress, objects};

use crate::{
    agree::settle,
    atomic_dir::AtomicDir,
    error::CheckpointError,
    folder::checkpoint_path,
    hosts::{
        replicate::replicate,
        transfer::{Transfer, Transfers},
    },
    place::Place,
    remove::remove_checkpoint,
    report::{Report, merge, write_manifest},
    snapshot::Snapshot,
};

/// Returns an error if the folder of checkpoints must not be written to, for instance because
/// another run uses it. It is called before the first byte is written and before the commit, on
/// rank 0; with folders of the hosts, on the first rank of each.
pub type Guard<'a> = &'a dyn Fn() -> Result<(), String>;

/// The folder into which ranks write before it gets its final name: one, or one on each host.
#[derive(Debug)]
pub(crate) struct UnfinishedCheckpoint {
    place: Place,
    step: u64,
    /// The folder, as this rank sees it.
    path: PathBuf,
    /// Only on ranks that create the folder. They remove it if it is dropped before the commit.
    staging: Option<AtomicDir>,
}

/// The remaining work for a checkpoint whose files are written.
#[derive(Debug, Default)]
pub(crate) struct Sealed {
    /// The text of the manifest. Ranks that write it know it after the files were replicated.
    text: Option<String>,
    /// The copies of files that are to be made on other hosts.
    pub(crate) transfers: Vec<Transfer>,
}

impl Sealed {
    /// Makes the manifest of what the ranks wrote, on rank 0.
    pub(crate) fn new(
        place: &Place,
        snapshot: &Snapshot,
        layout: String,
        reports: Vec<Report>,
    ) -> Result<Self, CheckpointError> {
        let (manifest, text) = merge(snapshot, layout, reports)?;
        let transfers = place.hosts().map(|hosts| replicate(hosts, &manifest.files));
        Ok(Self {
            text: Some(text),
            transfers: transfers.unwrap_or_default(),
        })
    }

    /// Takes the text of the manifest, which only rank 0 has to give. No copies of files are
    /// planned, because the next start makes those that are missing.
    ///
    /// # Collective
    /// All ranks of `world`; the text is sent if the hosts have folders of their own.
    pub(crate) fn of_text(
        text: Option<String>,
        place: &Place,
        world: &Group,
    ) -> Result<Self, CheckpointError> {
        let text = match place.hosts() {
            Some(_) => objects::broadcast(world, &text)?,
            None => text,
        };
        let transfers = Vec::new();
        Ok(Self { text, transfers })
    }

    /// Tells all ranks the copies that rank 0 has planned.
    ///
    /// # Collective
    /// All ranks of `world`; nothing is sent if all hosts see one folder.
    pub(crate) fn agreed(
        mine: Option<Self>,
        place: &Place,
        world: &Group,
    ) -> Result<Self, CheckpointError> {
        let mine = mine.unwrap_or_default();
        if place.hosts().is_none() {
            return Ok(mine);
        }
        Ok(Self {
            transfers: objects::broadcast(world, &mine.transfers)?,
            ..mine
        })
    }
}

impl UnfinishedCheckpoint {
    /// Creates the folder.
    ///
    /// # Collective
    /// All ranks of `groups.world`.
    pub(crate) fn create(
        place: &Place,
        guard: Option<Guard<'_>>,
        groups: &ProcessGroups,
        step: u64,
    ) -> Result<Self, CheckpointError> {
        let world = &groups.world;
        let dir = place.dir();
        let target = checkpoint_path(dir, step);
        let create = || match guard {
            Some(_) => check(guard, dir).and_then(|()| AtomicDir::inside(&target)),
            None => AtomicDir::create(&target),
        };
        let staging = groups.is_main().then(create).transpose();
        let mut staging = settle(world, staging)?;
        // Only the name is sent, because ranks on other hosts may see the folder under another path.
        let name = staging
            .as_ref()
            .and_then(|staging| staging.path.file_name());
        let name: Option<String> =
            objects::broadcast(world, &name.map(|name| name.to_string_lossy().into_owned()))?;
        let path = dir.join(name.expect("rank 0 created the folder"));
        if place.hosts().is_some() {
            let is_first = place.is_keeper(world) && staging.is_none();
            let create = || check(guard, dir).and_then(|()| AtomicDir::named(&path, &target));
            let of_host = settle(world, is_first.then(create).transpose())?;
            staging = staging.or(of_host);
        }
        Ok(Self {
            place: place.clone(),
            step,
            path,
            staging,
        })
    }

    /// The folder, as this rank sees it.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Completes the checkpoint with its manifest and gives it its final name. `mine` is what this
    /// rank wrote, or its error.
    ///
    /// # Collective
    /// All ranks of `groups.world`.
    pub(crate) fn commit(
        self,
        guard: Option<Guard<'_>>,
        groups: &ProcessGroups,
        snapshot: &Snapshot,
        mine: Result<Report, CheckpointError>,
        progress: &Progress,
    ) -> Result<(), CheckpointError> {
        let world = &groups.world;
        let reports = objects::gather(world, &settle(world, mine)?)?;
        let layout = groups.layout().to_string();
        let sealed = groups
            .is_main()
            .then(|| Sealed::new(&self.place, snapshot, layout, reports))
            .transpose();
        let sealed = Sealed::agreed(settle(world, sealed)?, &self.place, world)?;
        let sealed = self.replicate(sealed, progress, &AtomicBool::new(false));
        let sealed = settle(world, sealed)?;
        let (place, step) = (self.place.clone(), self.step);
        let committed = self.complete(guard, &sealed);
        all_or_none(world, &place, step, committed)
    }

    /// Copies the files of this host's ranks to the hosts that keep copies, and receives theirs. The
    /// first ranks of the hosts also get the manifest and write it.
    ///
    /// # Collective
    /// All ranks, at nearly the same time, if each host has a folder of its own.
    pub(crate) fn replicate(
        &self,
        sealed: Sealed,
        progress: &Progress,
        is_cancelled: &AtomicBool,
    ) -> Result<Sealed, CheckpointError> {
        let Some(hosts) = self.place.hosts() else {
            return Ok(sealed);
        };
        let text = match &hosts.firsts {
            Some(firsts) => objects::broadcast(firsts, &sealed.text)?,
            None => None,
        };
        let transfers = Transfers {
            hosts,
            all: &sealed.transfers,
            from: &self.path,
            to: &self.path,
        };
        transfers.run(progress, is_cancelled)?;
        // Before the first host gives its folder the name, so that a start after a kill can give the
        // others theirs.
        if let (Some(staging), Some(text)) = (&self.staging, &text) {
            write_manifest(&staging.path, text)?;
        }
        Ok(Sealed { text, ..sealed })
    }

    /// Gives the folder its final name, on a rank that created it.
    pub(crate) fn complete(
        self,
        guard: Option<Guard<'_>>,
        sealed: &Sealed,
    ) -> Result<(), CheckpointError> {
        let (Some(staging), Some(text)) = (self.staging, &sealed.text) else {
            return Ok(());
        };
        if self.place.hosts().is_none() {
            write_manifest(&staging.path, text)?;
        }
        // Check a second time, because another run may have started during the write.
        check(guard, self.place.dir())?;
        staging.commit()
    }
}

/// Agrees on whether a checkpoint is complete. If it is complete on some hosts only, these remove
/// it.
///
/// # Collective
/// All ranks of `world`.
pub(crate) fn all_or_none(
    world: &Group,
    place: &Place,
    step: u64,
    mine: Result<(), CheckpointError>,
) -> Result<(), CheckpointError> {
    let has_name = matches!(&mine, Ok(()) | Err(CheckpointError::NotDurable { .. }));
    let is_mine = has_name && place.hosts().is_some() && place.is_keeper(world);
    settle(world, mine).inspect_err(|error| {
        if is_mine && !matches!(error, CheckpointError::Collective(_)) {
            let path = checkpoint_path(place.dir(), step);
            if let Err(error) = remove_checkpoint(&path) {
                tracing::warn!("{} is on some hosts only: {error}", path.display());
            }
        }
    })
}

fn check(guard: Option<Guard<'_>>, dir: &Path) -> Result<(), CheckpointError> {
    let guarded = guard.map_or(Ok(()), |guard| guard());
    guarded.map_err(|why| CheckpointError::Guarded {
        path: dir.to_path_buf(),
        why,
    })
}
