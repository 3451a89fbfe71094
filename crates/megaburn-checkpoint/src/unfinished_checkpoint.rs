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
    manifest::Manifest,
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

/// The manifest of a checkpoint whose files are written.
#[derive(Debug, Default)]
pub(crate) struct Sealed {
    /// Its text, on ranks that write it.
    text: Option<String>,
    /// The copies of files that are to be made on other hosts.
    pub(crate) transfers: Vec<Transfer>,
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
        let text = groups
            .is_main()
            .then(|| merge(snapshot, layout, reports))
            .transpose();
        let sealed = self.sealed(world, settle(world, text)?)?;
        let copied = self.replicate(&sealed, progress, &AtomicBool::new(false));
        settle(world, copied)?;
        let (place, step) = (self.place.clone(), self.step);
        let committed = self.complete(guard, &sealed);
        all_or_none(world, &place, step, committed)
    }

    /// Tells the ranks that need it the text of the manifest, which rank 0 knows.
    ///
    /// # Collective
    /// All ranks of `world`; the text is sent if the hosts have folders of their own.
    pub(crate) fn sealed(
        &self,
        world: &Group,
        text: Option<String>,
    ) -> Result<Sealed, CheckpointError> {
        let Some(hosts) = self.place.hosts() else {
            let transfers = Vec::new();
            return Ok(Sealed { text, transfers });
        };
        let text: Option<String> = objects::broadcast(world, &text)?;
        let manifest = text.as_deref().map(serde_json::from_str::<Manifest>);
        let manifest = manifest.and_then(Result::ok).expect("rank 0 wrote it");
        let transfers = replicate(hosts, &manifest.files);
        Ok(Sealed { text, transfers })
    }

    /// Copies the files of this host's ranks to the hosts that keep copies, and receives theirs.
    ///
    /// # Collective
    /// All ranks that send or receive, at nearly the same time.
    pub(crate) fn replicate(
        &self,
        sealed: &Sealed,
        progress: &Progress,
        is_cancelled: &AtomicBool,
    ) -> Result<(), CheckpointError> {
        let Some(hosts) = self.place.hosts() else {
            return Ok(());
        };
        let transfers = Transfers {
            hosts,
            all: &sealed.transfers,
            from: &self.path,
            to: &self.path,
        };
        transfers.run(progress, is_cancelled)
    }

    /// Writes the manifest and gives the folder its final name, on a rank that created it.
    pub(crate) fn complete(
        self,
        guard: Option<Guard<'_>>,
        sealed: &Sealed,
    ) -> Result<(), CheckpointError> {
        let (Some(staging), Some(text)) = (self.staging, &sealed.text) else {
            return Ok(());
        };
        write_manifest(&staging.path, text)?;
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
    let is_mine = mine.is_ok() && place.hosts().is_some() && place.is_keeper(world);
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
