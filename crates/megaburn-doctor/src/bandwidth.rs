//! The bandwidth of the groups in which ranks communicate.

use std::time::Instant;

use burn::tensor::{DType, TensorData};
use megaburn_collective::{CollectiveError, Group, ReduceOp};

use crate::{facts::Bandwidth, gpu::GpuUnderTest};

/// A group that is measured.
pub(crate) struct Measured {
    /// What it is, in words.
    pub(crate) name: String,
    /// Its ranks in the world.
    pub(crate) members: Vec<usize>,
}

/// The groups of this rank: all ranks; the ranks of its host; and the ranks with its number on their
/// hosts. `None` for a group of one rank, and for one that was measured already. All ranks get the
/// same number of groups.
pub(crate) fn groups(hosts: &[String], rank: usize) -> [Option<Measured>; 3] {
    let all: Vec<usize> = (0..hosts.len()).collect();
    let on_host = |host: &str| -> Vec<usize> {
        let ranks = all.iter().copied();
        ranks.filter(|rank| hosts[*rank] == host).collect()
    };
    let mine = on_host(&hosts[rank]);
    let number = mine.iter().position(|member| *member == rank).unwrap_or(0);
    let mut names: Vec<&String> = hosts.iter().collect();
    names.sort();
    names.dedup();
    let across = names
        .iter()
        .filter_map(|host| on_host(host).get(number).copied());
    let mut across: Vec<usize> = across.collect();
    across.sort_unstable();
    let is_new = |members: &Vec<usize>| members.len() > 1 && *members != all;
    let [of_host, of_number] = [mine, across].map(|members| Some(members).filter(is_new));
    let named = |name: String, members| Measured { name, members };
    [
        (all.len() > 1).then(|| named("all ranks".into(), all.clone())),
        of_host.map(|members| named(format!("the ranks of host {}", hosts[rank]), members)),
        of_number.map(|members| named(format!("rank {number} of each host"), members)),
    ]
}

/// Measures an all-reduce over each of this rank's groups.
///
/// # Errors
/// See [`CollectiveError`].
/// # Collective
/// All ranks.
pub(crate) fn measure(
    world: &Group,
    hosts: &[String],
    gpu: Option<&dyn GpuUnderTest>,
    is_quick: bool,
) -> Result<Vec<Bandwidth>, CollectiveError> {
    let (bytes, rounds): (u64, usize) = match (gpu.is_some(), is_quick) {
        (true, false) => (256 << 20, 20),
        (true, true) => (64 << 20, 10),
        (false, false) => (16 << 20, 3),
        (false, true) => (4 << 20, 2),
    };
    let mut found = Vec::new();
    for (number, group) in groups(hosts, world.rank()).into_iter().enumerate() {
        // All ranks of the world measure groups of one kind at the same time.
        world.barrier()?;
        let Some(group) = group else { continue };
        let name = format!("doctor-{number}");
        let members = world.subgroup(&name, &group.members)?;
        let seconds = match gpu {
            Some(gpu) => gpu.all_reduce(&members, bytes, rounds)?,
            None => on_host(&members, bytes, rounds)?,
        };
        let size = group.members.len() as f64;
        found.push(Bandwidth {
            group: group.name,
            members: group.members,
            bytes,
            bytes_per_second: bytes as f64 / seconds * 2.0 * (size - 1.0) / size,
            is_nccl: gpu.is_some(),
        });
    }
    world.barrier()?;
    Ok(found)
}

/// The seconds of an all-reduce over the host's transport.
pub(crate) fn on_host(group: &Group, bytes: u64, rounds: usize) -> Result<f64, CollectiveError> {
    let elements = bytes as usize / 4;
    let data = TensorData::new(vec![1.0f32; elements], [elements]);
    debug_assert_eq!(data.dtype(), DType::F32);
    group.all_reduce(data.clone(), ReduceOp::Sum)?;
    let start = Instant::now();
    for _ in 0..rounds {
        group.all_reduce(data.clone(), ReduceOp::Sum)?;
    }
    Ok(start.elapsed().as_secs_f64() / rounds as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_those_of_all_ranks_of_hosts_and_across_hosts() {
        let hosts = ["a", "a", "b", "b"].map(String::from);
        let members = |rank| -> Vec<Vec<usize>> {
            let groups = groups(&hosts, rank).into_iter();
            groups.flatten().map(|group| group.members).collect()
        };
        assert_eq!(members(1), [vec![0, 1, 2, 3], vec![0, 1], vec![1, 3]]);
        assert_eq!(members(2), [vec![0, 1, 2, 3], vec![2, 3], vec![0, 2]]);
        let count = |hosts: &[String]| groups(hosts, 0).into_iter().flatten().count();
        assert_eq!((count(&hosts[..1]), count(&hosts[..2])), (0, 1));
        // One rank on each host: the group across hosts is that of all ranks.
        assert_eq!(count(&hosts[1..3]), 1);
    }
}
