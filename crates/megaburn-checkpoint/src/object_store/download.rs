//! Copies checkpoints from a store to this host.

use std::{
    fs::File,
    path::{Path, PathBuf},
};

use megaburn_collective::{Phase, ProcessGroups, Progress, objects};
use megaburn_store::Transfer;

use super::store::{CheckpointStore, first_fault};
use crate::{
    agree::settle,
    error::{CheckpointError, IoContext},
    examine::check_file,
    folder::{checkpoint_path, step_name},
    manifest::{FileInfo, MANIFEST},
    paths::sync_dir,
    place::Place,
    report::write_manifest,
    single::target,
    unfinished_checkpoint::{Sealed, UnfinishedCheckpoint, all_or_none},
};

impl CheckpointStore {
    /// Copies the checkpoint of a step to `step-XXXXXXXX` in a place, in place of one of the same
    /// step, and returns that path. The files are distributed over the ranks, and verified before
    /// the folder gets its final name. In folders of the hosts, each host gets those of its ranks.
    ///
    /// # Errors
    /// Any rank's failure, on every rank: the checkpoint in the store is missing, incomplete or
    /// damaged, or cannot be read, or the copy cannot be written. Nothing of the copy remains.
    /// # Collective
    /// All ranks of `groups.world`; a few messages, and the manifest. Each rank enters
    /// [`Phase::Load`] and reports its progress.
    pub fn download(
        &self,
        step: u64,
        place: impl Into<Place>,
        groups: &ProcessGroups,
    ) -> Result<PathBuf, CheckpointError> {
        let place = place.into();
        let world = &groups.world;
        let phase = world.phase(Phase::Load);
        let progress = phase.progress();
        let found = groups.is_main().then(|| self.whole(step)).transpose();
        let (files, text) = settle(world, found)?.unzip();
        let files: Vec<FileInfo> = objects::broadcast(world, &files.unwrap_or_default())?;
        let folder = UnfinishedCheckpoint::create(&place, None, groups, step)?;
        let sealed = Sealed::of_text(text, &place, world)?;
        let mine = files.iter().skip(world.rank()).step_by(world.size());
        settle(world, self.copy(step, mine, folder.path(), progress))?;
        let completed = folder.complete(None, &sealed);
        all_or_none(world, &place, step, completed)?;
        Ok(checkpoint_path(place.dir(), step))
    }

    /// Copies the checkpoint of a step to exactly `path`, from a single process, and verifies it.
    /// Existing contents of `path` are replaced only with `force`, and only if they are a checkpoint
    /// or an empty folder.
    ///
    /// # Errors
    /// As [`download`](Self::download); also `path` exists and is not to be replaced.
    pub fn fetch(
        &self,
        step: u64,
        path: &Path,
        force: bool,
        progress: &Progress,
    ) -> Result<(), CheckpointError> {
        let target = target(path, force);
        let staging = target.stage()?;
        let (files, text) = self.whole(step)?;
        self.copy(step, &files, &staging.path, progress)?;
        write_manifest(&staging.path, &text)?;
        target.commit(staging)
    }

    /// The files of a checkpoint, all of which have their full sizes, and the text of its manifest.
    fn whole(&self, step: u64) -> Result<(Vec<FileInfo>, String), CheckpointError> {
        let fail = |why: String| CheckpointError::NotStored {
            url: self.url_of(step),
            why,
        };
        let all = self.list()?;
        let stored = all.iter().find(|stored| stored.step == step);
        let stored = stored.ok_or_else(|| fail("there is no such checkpoint".into()))?;
        if !stored.is_complete() {
            return Err(fail(format!(
                "it has no {MANIFEST}, which is uploaded last"
            )));
        }
        let (manifest, text) = self.manifest_and_text(step)?;
        match first_fault(stored, &manifest) {
            None => Ok((manifest.files, text)),
            Some(why) => {
                let file = self.url_of(step).into();
                Err(CheckpointError::Damaged { file, why })
            }
        }
    }

    /// Copies, syncs and verifies some files of a checkpoint.
    fn copy<'a>(
        &self,
        step: u64,
        files: impl IntoIterator<Item = &'a FileInfo>,
        folder: &Path,
        progress: &Progress,
    ) -> Result<(), CheckpointError> {
        let transfer = Transfer {
            is_stopped: &|| false,
            on_bytes: &|num_bytes| progress.add(num_bytes),
        };
        for info in files {
            let path = folder.join(&info.name);
            let file = File::create_new(&path).during("write", &path)?;
            let object = format!("{}/{}", step_name(step), info.name);
            self.folder
                .download(&object, info.bytes, &file, &transfer)?;
            file.sync_all().during("write", &path)?;
            if !check_file(folder, info, &mut |num_bytes| progress.add(num_bytes))? {
                return Err(CheckpointError::Damaged {
                    file: format!("{}/{object}", self.url()).into(),
                    why: format!("a copy of it does not have the xxh3 {}", info.xxh3),
                });
            }
        }
        sync_dir(folder)
    }
}
