//! Checks that each host has a folder of its own.

use std::{
    fs::{self, File},
    path::Path,
};

use megaburn_collective::{Group, objects};

use crate::{
    agree::settle,
    error::{CheckpointError, IoContext},
    paths::sibling_path,
    place::Place,
};

/// The start of the name of a file by which a host recognizes its folder.
const PROBE: &str = ".host-probe";

/// Checks that all ranks of a host see its folder, and that no other host does, if each host has a
/// folder of its own. The folders must exist.
///
/// # Errors
/// Two hosts have the same folder, or a rank does not see the folder of its host.
/// # Collective
/// All ranks of `world`; a few bytes.
pub fn check_folders(place: &Place, world: &Group) -> Result<(), CheckpointError> {
    let Some(hosts) = place.hosts() else {
        return Ok(());
    };
    let dir = place.dir();
    let start = sibling_path(&dir.join(PROBE), "-");
    let start = start.file_name().map(|name| name.to_string_lossy());
    let start: String = objects::broadcast(world, &start.unwrap_or_default().into_owned())?;
    let name = |host: usize| format!("{start}-{host}");
    let mine = dir.join(name(hosts.of(world.rank())));
    let is_first = hosts.is_first(world.rank());
    let written = if is_first {
        File::create(&mine).map(drop).during("create", &mine)
    } else {
        Ok(())
    };
    let found = settle(world, written).and_then(|()| {
        let names = names(dir)?;
        let has = |host: &usize| names.contains(&name(*host));
        let own = hosts.of(world.rank());
        let other = (0..hosts.num_hosts()).find(|host| *host != own && has(host));
        let path = dir.to_path_buf();
        match other {
            _ if !has(&own) => Err(CheckpointError::NotOfHost {
                rank: world.rank(),
                host: hosts.name(own).to_string(),
                path,
            }),
            Some(other) => Err(CheckpointError::OfTwoHosts {
                host: hosts.name(own).to_string(),
                other: hosts.name(other).to_string(),
                path,
            }),
            None => Ok(()),
        }
    });
    let settled = settle(world, found);
    if is_first {
        // It is empty, and the next check ignores it.
        let _ = fs::remove_file(&mine);
        remove_left(dir);
    }
    settled
}

/// Removes the probes of killed starts. One that cannot be removed does no harm.
fn remove_left(dir: &Path) {
    for name in names(dir).unwrap_or_default() {
        let path = dir.join(&name);
        let is_empty =
            || fs::symlink_metadata(&path).is_ok_and(|found| found.is_file() && found.len() == 0);
        if name.starts_with(PROBE) && is_empty() {
            let _ = fs::remove_file(&path);
        }
    }
}

fn names(dir: &Path) -> Result<Vec<String>, CheckpointError> {
    let entries = fs::read_dir(dir).during("read the folder", dir)?;
    let name = |entry: std::io::Result<fs::DirEntry>| {
        let entry = entry.during("read the folder", dir)?;
        Ok(entry.file_name().to_string_lossy().into_owned())
    };
    entries.map(name).collect()
}
