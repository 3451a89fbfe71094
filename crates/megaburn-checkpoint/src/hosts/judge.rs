//! Decides together whether the hosts have a checkpoint between them.

use std::collections::{BTreeMap, BTreeSet};

use megaburn_collective::{Group, objects};
use serde::{Deserialize, Serialize};

use crate::{
    agree::settle,
    error::CheckpointError,
    hosts::{examine::HostCopy, map::Hosts},
};

/// A checkpoint of which each file is on some host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CompleteCopies {
    /// The hash of its manifest.
    pub(crate) manifest: String,
    /// The hosts that have the manifest.
    pub(crate) hosts: BTreeSet<usize>,
    /// The hosts that have each file, intact.
    pub(crate) hosts_of_file: BTreeMap<String, BTreeSet<usize>>,
    /// The errors of files that are damaged or cannot be read on some host.
    pub(crate) faults: Vec<String>,
}

/// The decision of all ranks about a checkpoint.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Verdict {
    Take(CompleteCopies),
    Refuse(String),
    /// A file has no readable copy on any host; the text says why.
    Stop(String),
}

/// The copies, or why the checkpoint is refused; an outer error ends the search.
pub(crate) type JudgedCopies = Result<Result<CompleteCopies, String>, CheckpointError>;

/// Agrees on a checkpoint of which each rank has examined some files of its host.
///
/// # Collective
/// All ranks of `world`, which get the same result.
pub(crate) fn judge_copies(
    world: &Group,
    hosts: &Hosts,
    mine: Result<HostCopy, CheckpointError>,
) -> JudgedCopies {
    let all = objects::gather(world, &settle(world, mine)?)?;
    match objects::broadcast(world, &judge(hosts, &all))? {
        Verdict::Take(copies) => Ok(Ok(copies)),
        Verdict::Refuse(why) => Ok(Err(why)),
        Verdict::Stop(message) => Err(CheckpointError::NoReadableCopy { message }),
    }
}

fn judge(hosts: &Hosts, of_rank: &[HostCopy]) -> Verdict {
    let all = |of: fn(&HostCopy) -> &Vec<String>| -> Vec<String> {
        of_rank.iter().flat_map(of).cloned().collect()
    };
    let damage = all(|copy| &copy.damage);
    let unreadable = all(|copy| &copy.unreadable);
    // If a run came back to a step, some hosts may have the checkpoint from before, and some the
    // one from after.
    let mut variants: BTreeMap<&str, BTreeSet<usize>> = BTreeMap::new();
    for (rank, copy) in of_rank.iter().enumerate() {
        if let Some(manifest) = &copy.manifest {
            variants.entry(manifest).or_default().insert(hosts.of(rank));
        }
    }
    let mut variants: Vec<_> = variants.into_iter().collect();
    variants.sort_by_key(|(_, on)| (std::cmp::Reverse(on.len()), on.first().copied()));
    let mut missing = None;
    for (manifest, on) in variants {
        let copies = || {
            let ranks = of_rank.iter().enumerate();
            ranks.filter(|(_, copy)| copy.manifest.as_deref() == Some(manifest))
        };
        let mut hosts_of_file: BTreeMap<String, BTreeSet<usize>> = copies()
            .flat_map(|(_, copy)| copy.files.iter().cloned())
            .map(|file| (file, BTreeSet::new()))
            .collect();
        for (rank, copy) in copies() {
            for file in &copy.whole {
                hosts_of_file
                    .entry(file.clone())
                    .or_default()
                    .insert(hosts.of(rank));
            }
        }
        match hosts_of_file.iter().find(|(_, hosts)| hosts.is_empty()) {
            None => {
                return Verdict::Take(CompleteCopies {
                    manifest: manifest.to_string(),
                    hosts: on,
                    hosts_of_file,
                    faults: [unreadable, damage].concat(),
                });
            }
            Some((file, _)) => missing = missing.or_else(|| Some(file.clone())),
        }
    }
    let num_hosts = hosts.num_hosts();
    let why = match missing {
        Some(file) => format!("none of the {num_hosts} hosts has an intact `{file}`"),
        None => format!("none of the {num_hosts} hosts has its manifest"),
    };
    if let Some(unreadable) = unreadable.first() {
        return Verdict::Stop(format!("{why}: {unreadable}"));
    }
    Verdict::Refuse(match damage.first() {
        Some(damage) => format!("{why}: {damage}"),
        None => why,
    })
}
