//! Completes a checkpoint whose ranks were killed while its folders got their names.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use megaburn_collective::{Group, objects};

use crate::{
    agree::settle,
    checkpoint::{manifest_hash, read_manifest},
    error::{CheckpointError, IoContext},
    folder::{checkpoint_path, checkpoint_step, committed, entries, is_left},
    paths::{TMP, is_there, leftover_of},
    place::Place,
};

/// A step, and the hash of the manifest of a checkpoint of it.
type Variant = (u64, String);

/// A folder of a save that was not finished.
type Unfinished = (Variant, PathBuf);

/// Gives a checkpoint its name on hosts where it has a temporary one, if it has its name on another
/// host. All files were written and copied then, and each host has the manifest.
///
/// # Errors
/// A folder cannot be read, or a checkpoint cannot be renamed.
/// # Collective
/// All ranks of `world`; steps and hashes. Nothing is done in a shared folder.
pub(crate) fn promote(place: &Place, world: &Group) -> Result<(), CheckpointError> {
    if place.hosts().is_none() {
        return Ok(());
    }
    let mine = if place.is_keeper(world) {
        look(place.dir())
    } else {
        Ok((BTreeSet::new(), Vec::new()))
    };
    let (named, unfinished) = settle(world, mine)?;
    let all: Vec<BTreeSet<Variant>> = objects::gather(world, &named)?;
    let all: BTreeSet<Variant> = all.into_iter().flatten().collect();
    let all: BTreeSet<Variant> = objects::broadcast(world, &all)?;
    let rename = |(variant, path): Unfinished| {
        let target = checkpoint_path(place.dir(), variant.0);
        if !all.contains(&variant) || is_there(&target) {
            return Ok(());
        }
        tracing::info!("{} is complete and gets its name", target.display());
        fs::rename(&path, &target).during("rename", &path)
    };
    settle(world, unfinished.into_iter().try_for_each(rename))
}

/// The checkpoints that have their name, and folders of saves that have a manifest.
fn look(dir: &Path) -> Result<(BTreeSet<Variant>, Vec<Unfinished>), CheckpointError> {
    let hash = |path: &Path| read_manifest(path).and_then(|_| manifest_hash(path)).ok();
    let named = committed(dir)?.into_iter();
    let named = named.filter_map(|(step, path)| Some((step, hash(&path)?)));
    let unfinished = entries(dir)?.into_iter().filter_map(|(name, path)| {
        let (of, _) = leftover_of(&name).filter(|(_, suffix)| *suffix == TMP)?;
        let step = checkpoint_step(of).filter(|_| is_left(&path))?;
        Some(((step, hash(&path)?), path))
    });
    Ok((named.collect(), unfinished.collect()))
}
