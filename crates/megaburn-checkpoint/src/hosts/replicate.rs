//! Which files of a new checkpoint are copied to which hosts.

use crate::{
    hosts::{map::Hosts, transfer::Transfer},
    manifest::FileInfo,
};

/// The transfers that copy the files of a new checkpoint to the hosts that keep copies.
pub(crate) fn replicate(hosts: &Hosts, files: &[FileInfo]) -> Vec<Transfer> {
    let mut transfers = Vec::new();
    for file in files {
        let Some(from) = file.writer() else { continue };
        let (number, _) = hosts.local(from);
        let to = hosts.replicas(hosts.of(from));
        transfers.extend(to.map(|host| Transfer::new(file, from, hosts.rank(host, number))));
    }
    transfers
}

#[cfg(test)]
mod tests {
    use megaburn_collective::{GroupOptions, run_threads};

    use super::*;
    use crate::{error::CheckpointError, manifest::rank_file};

    #[test]
    fn each_file_is_copied_to_the_hosts_after_that_of_its_writer() {
        let names = ["a", "a", "b", "a", "c"];
        for (wanted, copies) in [(0, 0), (1, 1), (2, 2), (7, 2)] {
            let found = run_threads(names.len(), GroupOptions::default(), |world| {
                let hosts = Hosts::find(&world, names[world.rank()], wanted)?;
                assert_eq!((hosts.num_hosts(), hosts.num_replicas()), (3, copies));
                assert_eq!(hosts.local(3), (2, 3));
                let file = |rank: usize| FileInfo {
                    name: rank_file(rank),
                    bytes: 1,
                    xxh3: String::new(),
                    pieces: Vec::new(),
                };
                let files: Vec<_> = (0..names.len()).map(file).collect();
                Ok::<_, CheckpointError>(replicate(&hosts, &files))
            });
            for transfers in found {
                let pairs = transfers.unwrap().into_iter();
                let pairs: Vec<_> = pairs.map(|it| (it.from, it.to)).collect();
                let all = [
                    [(0, 2), (0, 4)],
                    [(1, 2), (1, 4)],
                    [(2, 4), (2, 0)],
                    [(3, 2), (3, 4)],
                    [(4, 0), (4, 2)],
                ];
                let expected = all.iter().flat_map(|of| of.iter().take(copies).copied());
                assert_eq!(pairs, expected.collect::<Vec<_>>());
            }
        }
    }
}
