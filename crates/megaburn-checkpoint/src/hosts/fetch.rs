//! Brings the files of a checkpoint to the hosts whose ranks need them.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
};

use megaburn_collective::{Group, Phase, objects};

use crate::{
    agree::settle,
    atomic_dir::AtomicDir,
    checkpoint::{Checkpoint, HostFiles, manifest_text, read_manifest},
    error::CheckpointError,
    fault::{Fault, retried},
    folder::set_aside_damaged,
    hosts::{
        map::Hosts,
        transfer::{Transfer, Transfers},
    },
    manifest::FileInfo,
    paths::{TMP, is_there, sibling_path, sync_dir},
    place::Place,
    report::write_manifest,
};

impl Checkpoint {
    /// Brings the files that the ranks of a host need, and the copies that the host should keep, to
    /// each host that lacks them. `needed` are the numbers of the files that this rank will read.
    /// Nothing is done for a checkpoint in a shared folder.
    ///
    /// # Errors
    /// A file cannot be read, sent or written. Files that a host has received into an existing folder
    /// stay.
    /// # Collective
    /// All ranks of `world`. Files are sent between hosts in blocks of 4 MiB.
    pub fn fetch(
        &self,
        place: &Place,
        world: &Group,
        needed: &BTreeSet<usize>,
    ) -> Result<(), CheckpointError> {
        let (Some(hosts), Some(found)) = (place.hosts(), &self.of_hosts) else {
            return Ok(());
        };
        let phase = world.phase(Phase::Load);
        let all: Vec<BTreeSet<usize>> = objects::gather(world, needed)?;
        let transfers = match world.rank() {
            0 => plan(hosts, &self.manifest.files, &found.hosts_of_file, &all),
            _ => Vec::new(),
        };
        let transfers: Vec<Transfer> = objects::broadcast(world, &transfers)?;
        if transfers.is_empty() {
            return Ok(());
        }
        let me = world.rank();
        if me == 0 {
            log(hosts, &self.path, &transfers);
        }
        let of_me = transfers.iter().filter(|transfer| transfer.to == me);
        phase
            .progress()
            .expect(of_me.map(|transfer| transfer.bytes).sum());
        let folder = Folder::prepare(place, hosts, world, &self.path, found)?;
        let fetched = Transfers {
            hosts,
            all: &transfers,
            from: &self.path,
            to: &folder.path,
        }
        .run(phase.progress(), &AtomicBool::new(false));
        settle(world, fetched)?;
        let is_keeper = place.is_keeper(world);
        let done = match folder.new {
            Some(new) => write_manifest(&new.path, &found.manifest).and_then(|()| new.commit()),
            None if is_keeper => sync_dir(&self.path),
            None => Ok(()),
        };
        settle(world, done)
    }
}

/// The folder into which the ranks of a host write the files that they receive.
struct Folder {
    path: PathBuf,
    /// A folder for a host that has none, on its first rank.
    new: Option<AtomicDir>,
}

impl Folder {
    fn prepare(
        place: &Place,
        hosts: &Hosts,
        world: &Group,
        target: &Path,
        found: &HostFiles,
    ) -> Result<Self, CheckpointError> {
        let temporary = sibling_path(target, TMP);
        let name = temporary.file_name().map(|name| name.to_string_lossy());
        let name: String = objects::broadcast(world, &name.unwrap_or_default().into_owned())?;
        let temporary = place.dir().join(name);
        let prepare = || -> Result<(bool, Option<AtomicDir>), CheckpointError> {
            if retried(|| is_same(target, &found.manifest))? {
                return Ok((true, None));
            }
            if is_there(target) {
                let aside = set_aside_damaged(target)?;
                tracing::warn!(
                    "{} was set aside as {}: its manifest is damaged or differs from that of other \
                    hosts",
                    target.display(),
                    aside.display()
                );
            } else {
                tracing::warn!(
                    "host {} has no folder {}: its files are copied from other hosts",
                    hosts.name(hosts.of(world.rank())),
                    target.display()
                );
            }
            Ok((false, Some(AtomicDir::named(&temporary, target)?)))
        };
        let prepared = if place.is_keeper(world) {
            prepare()
        } else {
            Ok((false, None))
        };
        let (has_it, new) = settle(world, prepared)?;
        let all: Vec<bool> = objects::gather(world, &has_it)?;
        let all: Vec<bool> = objects::broadcast(world, &all)?;
        let first = hosts.rank(hosts.of(world.rank()), 0);
        let path = if all[first] {
            target.to_path_buf()
        } else {
            temporary
        };
        Ok(Self { path, new })
    }
}

/// Whether a folder has this manifest, intact.
///
/// # Errors
/// The system fails to read it.
fn is_same(folder: &Path, manifest: &str) -> Result<bool, CheckpointError> {
    let text = read_manifest(folder).and_then(|_| manifest_text(folder));
    match text {
        Ok(text) => Ok(text == manifest),
        Err(error) => match Fault::of(&error) {
            Fault::Damaged | Fault::Missing | Fault::OtherVersion => Ok(false),
            Fault::Unreadable => Err(error),
        },
    }
}

/// The transfers that give each host what its ranks need and the copies that it should keep.
/// `needed` are the files that each rank will read.
fn plan(
    hosts: &Hosts,
    files: &[FileInfo],
    hosts_of_file: &BTreeMap<String, BTreeSet<usize>>,
    needed: &[BTreeSet<usize>],
) -> Vec<Transfer> {
    let mut wanted: BTreeSet<(usize, usize)> = BTreeSet::new();
    for (rank, needed) in needed.iter().enumerate() {
        wanted.extend(needed.iter().map(|&file| (file, hosts.of(rank))));
    }
    for (number, file) in files.iter().enumerate() {
        if let Some(writer) = file.writer() {
            // The checkpoint may be of more ranks than there are now.
            let host = hosts.of(writer % needed.len());
            let keeps = [host].into_iter().chain(hosts.replicas(host));
            wanted.extend(keeps.map(|host| (number, host)));
        }
    }
    let transfer = |(number, to): (usize, usize)| {
        let file = &files[number];
        let on: Vec<usize> = hosts_of_file.get(&file.name)?.iter().copied().collect();
        if on.contains(&to) || on.is_empty() {
            return None;
        }
        // Different files come from different hosts, and from different ranks of them.
        let from = hosts.rank(on[number % on.len()], number);
        Some(Transfer::new(file, from, hosts.rank(to, number)))
    };
    wanted.into_iter().filter_map(transfer).collect()
}

fn log(hosts: &Hosts, path: &Path, transfers: &[Transfer]) {
    let mut of_host: BTreeMap<usize, (usize, u64)> = BTreeMap::new();
    for transfer in transfers {
        let (count, bytes) = of_host.entry(hosts.of(transfer.to)).or_default();
        *count += 1;
        *bytes += transfer.bytes;
    }
    for (host, (count, bytes)) in of_host {
        tracing::info!(
            "host {} copies {count} files ({:.1} MB) of checkpoint {} from other hosts",
            hosts.name(host),
            bytes as f64 / 1e6,
            path.display()
        );
    }
}
