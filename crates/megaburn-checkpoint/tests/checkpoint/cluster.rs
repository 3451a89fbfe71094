//! Hosts that each have a folder of checkpoints of their own.

use std::{
    fs,
    path::{Path, PathBuf},
};

use megaburn_checkpoint::{
    Advance, CheckpointError, Hosts, Latest, NeededChunks, Place, find_latest, prepare,
};
use megaburn_collective::{Group, GroupOptions, ProcessGroups, RankFailure, run_threads};
use megaburn_mesh::Layout;
use tempfile::TempDir;

use crate::model::{Random, begin_rank, local_bytes, names, save_rank, tensors};

/// Ranks that are spread over hosts, each of which has a folder of its own.
pub(crate) struct Cluster {
    pub(crate) dir: TempDir,
    pub(crate) layout: Layout,
    /// The host of each rank.
    pub(crate) hosts: Vec<usize>,
    pub(crate) replicas: usize,
}

impl Cluster {
    pub(crate) fn new(layout: &str, hosts: &[usize], replicas: usize) -> Self {
        Self {
            dir: tempfile::tempdir().unwrap(),
            layout: layout.parse().unwrap(),
            hosts: hosts.to_vec(),
            replicas,
        }
    }

    pub(crate) fn folder(&self, host: usize) -> PathBuf {
        self.dir.path().join(format!("host-{host}"))
    }

    pub(crate) fn num_hosts(&self) -> usize {
        self.hosts.iter().max().unwrap() + 1
    }

    /// Runs `rank` on every rank, after the start of a run.
    pub(crate) fn run<T: Send>(
        &self,
        rank: impl Fn(&Place, &ProcessGroups) -> Result<T, CheckpointError> + Sync,
    ) -> Vec<Result<T, RankFailure<CheckpointError>>> {
        run_threads(self.hosts.len(), GroupOptions::default(), |world| {
            let place = self.place(&world)?;
            prepare(&place, &world)?;
            rank(&place, &ProcessGroups::new(&world, self.layout)?)
        })
    }

    fn place(&self, world: &Group) -> Result<Place, CheckpointError> {
        let host = self.hosts[world.rank()];
        let hosts = Hosts::find(world, &format!("host {host}"), self.replicas)?;
        Ok(Place::of_each_host(self.folder(host), hosts))
    }

    pub(crate) fn save(&self, keep: usize, steps: &[u64], is_async: bool) {
        let ranks = self.run(|place, groups| {
            for &step in steps {
                if is_async {
                    let mut save = begin_rank(place, keep, step, groups)?;
                    while save.advance(groups)? != Advance::Done {}
                } else {
                    save_rank(place, keep, step, groups)?;
                }
            }
            Ok(())
        });
        ranks.into_iter().for_each(|rank| rank.unwrap());
    }

    /// Loads the newest checkpoint on every rank, and checks the tensors that the rank needs.
    /// Returns its step, and the reasons why newer ones were refused.
    pub(crate) fn load(&self) -> (Option<u64>, Vec<String>) {
        let found = self.run(|place, groups| {
            let Latest {
                checkpoint,
                refused,
            } = find_latest(place, &groups.world)?;
            let refused: Vec<_> = refused.into_iter().map(|refused| refused.why).collect();
            let Some(mut checkpoint) = checkpoint else {
                return Ok((None, refused));
            };
            let tensors = tensors(groups.tp.rank(), groups.tp.size());
            let mut needed = NeededChunks::default();
            for tensor in &tensors {
                let all = 0..tensor.shard.local_shape().iter().product();
                checkpoint.add_needed(&mut needed, tensor.name, &tensor.shard, all);
            }
            checkpoint.fetch(place, &groups.world, &needed)?;
            let step = checkpoint.step();
            for tensor in &tensors {
                let read = checkpoint.read(tensor.name, &tensor.shard, tensor.dtype)?;
                assert_eq!(
                    read.as_bytes(),
                    local_bytes(tensor, step),
                    "{}",
                    tensor.name
                );
            }
            Ok((Some(step), refused))
        });
        let found: Vec<_> = found.into_iter().map(Result::unwrap).collect();
        assert!(found.iter().all(|other| *other == found[0]));
        found.into_iter().next().unwrap()
    }

    /// The ranks whose files a host has.
    pub(crate) fn ranks_on(&self, host: usize, step: u64) -> Vec<usize> {
        let path = self.folder(host).join(format!("step-{step:08}"));
        let rank = |name: String| {
            let digits = name.strip_prefix("rank-")?.strip_suffix(".safetensors")?;
            digits.parse().ok()
        };
        names(&path).into_iter().filter_map(rank).collect()
    }

    pub(crate) fn steps(&self) -> Vec<Vec<String>> {
        let hosts = 0..self.num_hosts();
        hosts.map(|host| names(&self.folder(host))).collect()
    }
}

/// Flips a bit of a file.
pub(crate) fn flip(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let at = Random::fresh().below(bytes.len() as u64) as usize;
    bytes[at] ^= 1;
    fs::write(path, bytes).unwrap();
}
