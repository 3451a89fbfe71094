use std::{cmp::Reverse, collections::BTreeMap, ops::Range};

use burn::Tensor;
use megaburn_collective::{Group, Lane, tensors};
use megaburn_mesh::ShardSpec;

use crate::{
    error::OptimError,
    sharding::{ParamKind, Sharding, joined},
};

/// Assigns each matrix to one of the ranks that shard it, its owner, and knows which range each
/// rank keeps.
pub(super) struct MatrixOwners<'a> {
    group: &'a Group,
    matrices: BTreeMap<String, Owned>,
}

struct Owned {
    owner: usize,
    /// The range that each rank keeps.
    kept: Vec<Range<usize>>,
}

impl<'a> MatrixOwners<'a> {
    /// Assigns the matrices of a kind by their sizes, so that all ranks have about the same work.
    pub(super) fn new<'m>(
        sharding: &'a Sharding,
        kind: ParamKind,
        matrices: impl Iterator<Item = (&'m str, &'m ShardSpec)>,
    ) -> Self {
        let group = sharding.replicas(kind).share();
        let owners = assign_to_owners(matrices, group.size());
        let mut all = BTreeMap::new();
        for bucket in sharding.buckets() {
            for slot in &bucket.slots {
                if let Some(&owner) = owners.get(slot.path.as_str()) {
                    let share = |rank| bucket.share(rank, group.size());
                    let kept = (0..group.size())
                        .map(|rank| slot.within(&share(rank)))
                        .collect();
                    all.insert(slot.path.clone(), Owned { owner, kept });
                }
            }
        }
        Self {
            group,
            matrices: all,
        }
    }

    /// Applies `f` to full matrices on their owners. `kept` has the part of each matrix that this
    /// rank keeps, and the result the same part of what `f` returned.
    ///
    /// # Collective
    /// All ranks of the group. Each sends its parts of others' matrices, and afterwards the results
    /// of its own matrices.
    pub(super) fn each_full_matrix(
        &self,
        mut kept: BTreeMap<String, Tensor<1>>,
        mut f: impl FnMut(&str, Tensor<1>) -> Result<Tensor<1>, OptimError>,
    ) -> Result<BTreeMap<String, Tensor<1>>, OptimError> {
        let Some(device) = kept.values().next().map(Tensor::device) else {
            return Ok(kept);
        };
        let rank = self.group.rank();
        let ranks = self.group.size();
        let there = self.counts(rank, true);
        let back = self.counts(rank, false);
        let none = || Tensor::<1>::empty([0], &device);
        // Send each owner this rank's parts of its matrices, in path order.
        let mut parts = Vec::new();
        for to in 0..ranks {
            for (path, owned) in self.of(to) {
                let part = kept
                    .remove(path)
                    .expect("every rank has a slice of every matrix");
                parts.extend((!owned.kept[rank].is_empty()).then_some(part));
            }
        }
        let sent = if parts.is_empty() {
            none()
        } else {
            joined(parts)
        };
        let came = tensors::all_to_all(sent, &there, &back, self.group, Lane::InOrder)?.wait();

        let mut at: Vec<usize> = starts(&back);
        let mut results: Vec<Vec<Tensor<1>>> = vec![Vec::new(); ranks];
        for (path, owned) in self.of(rank) {
            let mut slices = Vec::with_capacity(ranks);
            for (from, range) in owned.kept.iter().enumerate().filter(|(_, r)| !r.is_empty()) {
                slices.push(came.clone().narrow(0, at[from], range.len()));
                at[from] += range.len();
            }
            let result = f(path, joined(slices))?;
            for (to, range) in owned.kept.iter().enumerate().filter(|(_, r)| !r.is_empty()) {
                results[to].push(result.clone().narrow(0, range.start, range.len()));
            }
        }
        drop(came);
        let results: Vec<Tensor<1>> = results.into_iter().flatten().collect();
        let sent = if results.is_empty() {
            none()
        } else {
            joined(results)
        };
        let came = tensors::all_to_all(sent, &back, &there, self.group, Lane::InOrder)?.wait();

        let mut at = 0;
        let mut mine = BTreeMap::new();
        for from in 0..ranks {
            for (path, owned) in self.of(from) {
                let len = owned.kept[rank].len();
                let part = if len == 0 {
                    none()
                } else {
                    came.clone().narrow(0, at, len)
                };
                mine.insert(path.to_string(), part);
                at += len;
            }
        }
        Ok(mine)
    }

    /// The matrices that `rank` owns, in path order.
    fn of(&self, rank: usize) -> impl Iterator<Item = (&str, &Owned)> {
        let all = self
            .matrices
            .iter()
            .filter(move |(_, owned)| owned.owner == rank);
        all.map(|(path, owned)| (path.as_str(), owned))
    }

    /// Per other rank, the elements that `rank` sends to it before the work, or with `sends` unset
    /// receives from it.
    fn counts(&self, rank: usize, sends: bool) -> Vec<usize> {
        let between = |keeper: usize, owner: usize| -> usize {
            self.of(owner)
                .map(|(_, owned)| owned.kept[keeper].len())
                .sum()
        };
        let others = 0..self.group.size();
        others
            .map(|o| {
                if sends {
                    between(rank, o)
                } else {
                    between(o, rank)
                }
            })
            .collect()
    }
}

/// Assigns matrices to owners: the largest first, each to the rank with the least work.
fn assign_to_owners<'m>(
    matrices: impl Iterator<Item = (&'m str, &'m ShardSpec)>,
    ranks: usize,
) -> BTreeMap<&'m str, usize> {
    let works = matrices.map(|(path, shard)| (Reverse(work(&shard.global_shape)), path));
    let mut works: Vec<_> = works.collect();
    works.sort_unstable();
    let mut loads = vec![0; ranks];
    let mut owners = BTreeMap::new();
    for (Reverse(work), path) in works {
        let least = (0..ranks)
            .min_by_key(|&rank| loads[rank])
            .expect("there is at least one rank");
        loads[least] += work;
        owners.insert(path, least);
    }
    owners
}

/// Approximate number of operations of a matrix's products.
fn work(shape: &[usize]) -> u128 {
    let [rows, cols] = [shape[0] as u128, shape[1] as u128];
    rows * cols * rows.min(cols)
}

/// Start offsets of consecutive ranges of these lengths.
fn starts(lens: &[usize]) -> Vec<usize> {
    let ends = lens.iter().scan(0, |end, len| {
        *end += len;
        Some(*end)
    });
    ends.zip(lens).map(|(end, len)| end - len).collect()
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use megaburn_collective::{GroupOptions, ProcessGroups, run_threads};
    use rstest::rstest;

    use super::*;
    use crate::{
        sharding::{ShardingConfig, ShardingLevel},
        testing::{Net, plan_of, values},
    };

    #[rstest]
    #[case("dp2", None, 5)]
    #[case("dp3", Some(40), 7)]
    #[case("dp4", None, 40)]
    fn a_matrix_is_whole_where_it_is_worked_on(
        #[case] layout: &str,
        #[case] bucket: Option<usize>,
        #[case] rows: usize,
    ) {
        let layout: megaburn_mesh::Layout = layout.parse().unwrap();
        let ranks = layout.world_size();
        let calls = run_threads(ranks, GroupOptions::default(), |world| {
            let device = Device::default().autodiff();
            let net = Net::new(rows, 6, 0, 1, &device);
            let groups = ProcessGroups::new(&world, layout)?;
            let level = ShardingConfig::new(ShardingLevel::Optimizer).with_bucket(bucket);
            let sharding = level.init(&net, &groups)?;
            let number: Vec<f32> = (0..rows * 6).map(|i| i as f32).collect();
            let whole = Tensor::<1>::from_floats(number.as_slice(), &device.inner());
            let plan = plan_of(rows, 6, 0, 1);
            let spec = &plan.get("matrix").unwrap().shard;
            let owners =
                MatrixOwners::new(&sharding, ParamKind::Dense, [("matrix", spec)].into_iter());
            let kept = BTreeMap::from([("matrix".to_string(), sharding.cut("matrix", whole))]);
            let mut calls = 0;
            let found = owners.each_full_matrix(kept, |path, x| {
                calls += 1;
                assert_eq!((path, values(x.clone())), ("matrix", number.clone()));
                Ok(x * 2.0)
            })?;
            let range = sharding.kept("matrix", number.len());
            let expected: Vec<f32> = range.map(|i| 2.0 * i as f32).collect();
            assert_eq!(values(found["matrix"].clone()), expected);
            Ok::<_, OptimError>(calls)
        });
        assert_eq!(calls.into_iter().map(Result::unwrap).sum::<usize>(), 1);
    }

    #[test]
    fn work_is_dealt_out_evenly() {
        let lens = [8.0, 1.0, 5.0, 4.0, 3.0, 3.0];
        let shards: BTreeMap<String, ShardSpec> = lens
            .iter()
            .enumerate()
            .map(|(i, len)| {
                let shape = [1, *len as usize];
                (
                    i.to_string(),
                    ShardSpec::whole(&shape, megaburn_mesh::Axis::Tp, 0, 1),
                )
            })
            .collect();
        let owners = assign_to_owners(shards.iter().map(|(path, shard)| (path.as_str(), shard)), 3);
        let mut loads = [0.0; 3];
        owners
            .iter()
            .for_each(|(path, &owner)| loads[owner] += lens[path.parse::<usize>().unwrap()]);
        assert_eq!(loads, [8.0, 8.0, 8.0]);
    }
}
