//! Brings the files of a checkpoint to the hosts whose ranks need them.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::{OnceLock, atomic::AtomicBool},
};

use megaburn_collective::{Group, Phase, objects};

use crate::{
    agree::settle,
    atomic_dir::AtomicDir,
    checkpoint::{Checkpoint, HostFiles, manifest_text, read_manifest},
    error::CheckpointError,
    fault::{Fault, retried},
    fetched::remove_fetched,
    folder::set_aside_damaged,
    hosts::{
        map::Hosts,
        parts::PartTransfers,
        plan::{Plan, plan},
        transfer::{Transfer, Transfers},
    },
    needed::NeededChunks,
    paths::{TMP, is_there, sibling_path, sync_dir},
    place::Place,
    report::write_manifest,
};

impl Checkpoint {
    /// Brings to each host the chunks that its ranks will read of files that are not there, and the
    /// files that the host should keep. `needed` are the chunks that this rank will read. Chunks are
    /// in a sparse file next to the host's files, where a later start finds them; they are verified
    /// and asked for again if they are damaged. Files of older versions, which have no chunks, are
    /// copied whole. Nothing is done for a checkpoint in a shared folder.
    ///
    /// Returns the bytes that this rank received. Rank 0 logs how many came from which host.
    ///
    /// # Errors
    /// A file cannot be read, sent or written, or what was sent is damaged. What a host has received
    /// into an existing folder stays.
    /// # Collective
    /// All ranks of `world`. Bytes are sent between hosts in blocks of 4 MiB.
    pub fn fetch(
        &mut self,
        place: &Place,
        world: &Group,
        needed: &NeededChunks,
    ) -> Result<u64, CheckpointError> {
        let (Some(hosts), Some(found)) = (place.hosts(), &self.of_hosts) else {
            return Ok(0);
        };
        let phase = world.phase(Phase::Load);
        let me = world.rank();
        let on_host = |&file: &usize| {
            let name = &self.manifest.files[file].name;
            let on = found.hosts_of_file.get(name);
            on.is_some_and(|on| on.contains(&hosts.of(me)))
        };
        let mut needed = needed.clone();
        needed.of_file.retain(|file, _| !on_host(file));
        let needed = needed_of_host(hosts, &needed)?;
        let files: BTreeSet<usize> = if hosts.is_first(me) {
            needed.of_file.keys().copied().collect()
        } else {
            BTreeSet::new()
        };
        let all: Vec<BTreeSet<usize>> = objects::gather(world, &files)?;
        let plan = match me {
            0 => plan(hosts, &self.manifest, &found.hosts_of_file, &all),
            _ => Plan::default(),
        };
        let plan: Plan = objects::broadcast(world, &plan)?;
        let name = |file: usize| self.manifest.files[file].name.as_str();
        if plan.whole.is_empty() && plan.parts.is_empty() {
            // An earlier start may have fetched chunks of a file that is there now.
            let whole = (0..self.num_files()).filter(on_host).map(name);
            for name in whole.filter(|_| place.is_keeper(world)) {
                if let Err(error) = remove_fetched(&self.path, name) {
                    tracing::warn!("{error}; it is not needed");
                }
            }
            return Ok(0);
        }
        // The total is unknown until the receivers have verified which chunks are there already.
        let progress = phase.progress();
        let folder = Folder::prepare(place, hosts, world, &self.path, found)?;
        let whole = Transfers {
            hosts,
            all: &plan.whole,
            from: &self.path,
            to: &folder.path,
        };
        let mut received = settle(world, whole.run(progress, &AtomicBool::new(false)))?;
        let parts = PartTransfers {
            hosts,
            all: &plan.parts,
            checkpoint: self,
            to: &folder.path,
            needed: &needed,
        };
        for (from, bytes) in settle(world, parts.run(progress))? {
            *received.entry(from).or_default() += bytes;
        }
        let is_here = |transfer: &&Transfer| hosts.of(transfer.to) == hosts.of(me);
        let copied = plan.whole.iter().filter(is_here);
        let copied: BTreeSet<&str> = copied.map(|transfer| transfer.file.as_str()).collect();
        let completed = if place.is_keeper(world) {
            // Chunks of a file that is there now are not needed any more.
            let is_whole = |file: &usize| on_host(file) || copied.contains(name(*file));
            let whole = (0..self.num_files()).filter(is_whole);
            folder.complete(found, &self.path, whole.map(name))
        } else {
            Ok(())
        };
        settle(world, completed)?;
        log(hosts, world, &self.path, &received)?;
        let files = needed.of_file.into_keys();
        let fetched: BTreeSet<usize> = files.filter(|file| !copied.contains(name(*file))).collect();
        for &file in &fetched {
            self.files[file] = OnceLock::new();
        }
        self.fetched = fetched;
        Ok(received.into_values().sum())
    }
}

/// Joins the chunks that the ranks of this host need.
///
/// # Collective
/// All ranks of each host.
fn needed_of_host(hosts: &Hosts, mine: &NeededChunks) -> Result<NeededChunks, CheckpointError> {
    let all: Vec<NeededChunks> = objects::gather(&hosts.of_host, mine)?;
    let mut joined = NeededChunks::default();
    all.into_iter().for_each(|of_rank| joined.extend(of_rank));
    Ok(objects::broadcast(&hosts.of_host, &joined)?)
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

    /// Completes the folder on the first rank of its host. `whole` are the files that it has.
    fn complete<'a>(
        self,
        found: &HostFiles,
        target: &Path,
        whole: impl Iterator<Item = &'a str>,
    ) -> Result<(), CheckpointError> {
        for name in whole {
            remove_fetched(&self.path, name)?;
        }
        match self.new {
            Some(new) => write_manifest(&new.path, &found.manifest).and_then(|()| new.commit()),
            None => sync_dir(target),
        }
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

/// The most hosts that a line names.
const MOST_NAMED: usize = 8;

/// Logs on rank 0 how many bytes were received from which hosts. `received` are the bytes that this
/// rank received from each rank.
///
/// # Collective
/// All ranks of `world`; a few numbers.
fn log(
    hosts: &Hosts,
    world: &Group,
    path: &Path,
    received: &BTreeMap<usize, u64>,
) -> Result<(), CheckpointError> {
    let mut of_host: BTreeMap<usize, u64> = BTreeMap::new();
    for (from, bytes) in received {
        *of_host.entry(hosts.of(*from)).or_default() += bytes;
    }
    let all: Vec<BTreeMap<usize, u64>> = objects::gather(world, &of_host)?;
    let mut of_host: BTreeMap<usize, u64> = BTreeMap::new();
    for (host, bytes) in all.into_iter().flatten() {
        *of_host.entry(host).or_default() += bytes;
    }
    if of_host.is_empty() {
        return Ok(());
    }
    let megabytes = |bytes: u64| format!("{:.1} MB", bytes as f64 / 1e6);
    let part = |(host, bytes): (&usize, &u64)| {
        format!("{} from host {}", megabytes(*bytes), hosts.name(*host))
    };
    let mut parts: Vec<String> = of_host.iter().take(MOST_NAMED).map(part).collect();
    let others = of_host.values().skip(MOST_NAMED);
    if others.len() > 0 {
        let num_others = others.len();
        let bytes = megabytes(others.sum());
        parts.push(format!("{bytes} from {num_others} others"));
    }
    tracing::info!(
        "hosts fetched {} of checkpoint {}: {}",
        megabytes(of_host.values().sum()),
        path.display(),
        parts.join(", ")
    );
    Ok(())
}
