//! Which files of a checkpoint are sent to which hosts at a start, whole or in part.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::{
    hosts::{map::Hosts, parts::PartTransfer, transfer::Transfer},
    manifest::Manifest,
};

/// The transfers of a start.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Plan {
    /// Files that are copied whole.
    pub(crate) whole: Vec<Transfer>,
    /// Files of which chunks are sent.
    pub(crate) parts: Vec<PartTransfer>,
}

/// The transfers that give each host the chunks that its ranks need and the files that it should
/// keep. `needed` are the files of which the host of each first rank needs chunks.
pub(crate) fn plan(
    hosts: &Hosts,
    manifest: &Manifest,
    hosts_of_file: &BTreeMap<String, BTreeSet<usize>>,
    needed: &[BTreeSet<usize>],
) -> Plan {
    // The files of which each host needs chunks or all.
    let mut parts: BTreeSet<(usize, usize)> = BTreeSet::new();
    for (rank, needed) in needed.iter().enumerate() {
        parts.extend(needed.iter().map(|&file| (file, hosts.of(rank))));
    }
    let mut whole: BTreeSet<(usize, usize)> = BTreeSet::new();
    for (number, file) in manifest.files.iter().enumerate() {
        if let Some(writer) = file.writer() {
            // The checkpoint may be of more ranks than there are now.
            let host = hosts.of(writer % needed.len());
            let keeps = [host].into_iter().chain(hosts.replicas(host));
            whole.extend(keeps.map(|host| (number, host)));
        }
    }
    if manifest.chunk_bytes.is_none() {
        whole.append(&mut parts);
    }
    // Different files come from different hosts, and from different ranks of them.
    let ends = |(number, to): (usize, usize)| {
        let on = hosts_of_file.get(&manifest.files[number].name)?;
        let on: Vec<usize> = on.iter().copied().collect();
        let is_needed = !on.contains(&to) && !on.is_empty();
        is_needed.then(|| {
            (
                hosts.rank(on[number % on.len()], number),
                hosts.rank(to, number),
            )
        })
    };
    let parts = parts.difference(&whole).filter_map(|&(file, host)| {
        let (from, to) = ends((file, host))?;
        Some(PartTransfer { file, from, to })
    });
    let parts = parts.collect();
    let whole = whole.into_iter().filter_map(|(file, host)| {
        let (from, to) = ends((file, host))?;
        Some(Transfer::new(&manifest.files[file], from, to))
    });
    let whole = whole.collect();
    Plan { whole, parts }
}

#[cfg(test)]
mod tests {
    use megaburn_collective::{GroupOptions, run_threads};
    use serde_json::Value;

    use super::*;
    use crate::{
        error::CheckpointError,
        manifest::{FORMAT, FileInfo, rank_file},
    };

    fn manifest(num_files: usize, chunk_bytes: Option<u64>) -> Manifest {
        let file = |rank: usize| FileInfo {
            name: rank_file(rank),
            bytes: 1,
            xxh3: String::new(),
            pieces: Vec::new(),
        };
        Manifest {
            format: FORMAT,
            run_id: None,
            step: 1,
            layout: "dp3".into(),
            model: Value::Null,
            trainer: Value::Null,
            tensors: BTreeMap::new(),
            files: (0..num_files).map(file).collect(),
            chunk_bytes,
        }
    }

    #[test]
    fn kept_files_are_sent_whole_and_others_in_part() {
        let names = ["a", "b", "b", "c"];
        let found = run_threads(names.len(), GroupOptions::default(), |world| {
            let hosts = Hosts::find(&world, names[world.rank()], 1)?;
            // Host a has lost the file of rank 0, of which host b has the copy.
            let on = [vec![1], vec![1, 2], vec![1, 2], vec![0, 2]]
                .into_iter()
                .enumerate();
            let on = on.map(|(rank, on)| (rank_file(rank), on.into_iter().collect()));
            let on: BTreeMap<String, BTreeSet<usize>> = on.collect();
            // Each host reads all files but its own.
            let needed = [[0, 1, 2].into(), [3].into(), BTreeSet::new(), [0, 1].into()];
            let plan = |chunk_bytes| plan(&hosts, &manifest(4, chunk_bytes), &on, &needed);
            Ok::<_, CheckpointError>((plan(Some(64)), plan(None)))
        });
        let part = |(file, from, to)| PartTransfer { file, from, to };
        let ends = |whole: &[Transfer]| -> Vec<(String, usize, usize)> {
            let ends = |transfer: &Transfer| (transfer.file.clone(), transfer.from, transfer.to);
            whole.iter().map(ends).collect()
        };
        let kept = (rank_file(0), 1, 0);
        for found in found {
            let (chunks, none) = found.unwrap();
            assert_eq!(ends(&chunks.whole), std::slice::from_ref(&kept));
            let parts = [(0, 1, 3), (1, 3, 0), (2, 1, 0), (3, 3, 2)];
            assert_eq!(chunks.parts, parts.map(part));
            // Without chunks, all are sent whole.
            let mut all = vec![kept.clone()];
            all.extend(parts.map(|(file, from, to)| (rank_file(file), from, to)));
            assert_eq!((ends(&none.whole), none.parts), (all, vec![]));
        }
    }
}
