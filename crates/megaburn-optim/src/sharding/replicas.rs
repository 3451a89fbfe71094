use std::ops::Range;

use megaburn_collective::{CollectiveError, Group, ProcessGroups};
use megaburn_mesh::Axis;

use super::Bucket;

/// The ranks that hold copies of parameters of one kind. Groups of `share` shard them.
#[derive(Debug)]
pub(crate) struct Replicas {
    share: Group,
    copies: Group,
    norm: Group,
}

impl Replicas {
    /// A single rank.
    pub(super) fn none() -> Self {
        let alone = || Group::single(0);
        Self {
            share: alone(),
            copies: alone(),
            norm: alone(),
        }
    }

    /// The groups of dense parameters, which `ranks` ranks shard.
    pub(super) fn dense(groups: &ProcessGroups, ranks: usize) -> Result<Self, CollectiveError> {
        let ProcessGroups {
            world,
            dp_cp,
            model,
            ..
        } = groups;
        let names = ["share", "copies"];
        let (share, copies) = share_and_copies(world, dp_cp, ranks, names, &[])?;
        let norm = match ranks {
            1 => model.clone(),
            _ => {
                let members = around(groups, &share, &[Axis::Tp, Axis::Pp]);
                world.subgroup_among("norm", &members, &[world])?
            }
        };
        Ok(Self {
            share,
            copies,
            norm,
        })
    }

    /// The groups of experts' parameters. The members of `norm` together hold the experts of a
    /// single pipeline stage, because other stages may have none.
    pub(super) fn experts(
        groups: &ProcessGroups,
        ranks: usize,
        dense: &Self,
    ) -> Result<Self, CollectiveError> {
        let ProcessGroups {
            world,
            edp,
            experts,
            ..
        } = groups;
        let names = ["expert-share", "expert-copies"];
        let known = [&dense.share, &dense.copies];
        let (share, copies) = share_and_copies(world, edp, ranks, names, &known)?;
        let members = around(groups, &share, &[Axis::Etp, Axis::Ep]);
        let norm = world.subgroup_among("expert-norm", &members, &[experts, &dense.norm, world])?;
        Ok(Self {
            share,
            copies,
            norm,
        })
    }

    /// The ranks that shard the parameters; each member has a different shard.
    pub(crate) fn share(&self) -> &Group {
        &self.share
    }

    /// The ranks that have the same shard.
    pub(crate) fn copies(&self) -> &Group {
        &self.copies
    }

    /// The ranks that together hold each element once, not counting copies on tensor-parallel
    /// ranks.
    pub(crate) fn norm(&self) -> &Group {
        &self.norm
    }

    /// The number of ranks that shard the parameters.
    pub(crate) fn num_shares(&self) -> usize {
        self.share.size()
    }

    /// Whether no other rank holds the same parameters.
    pub(crate) fn is_alone(&self) -> bool {
        self.share.size() == 1 && self.copies.size() == 1
    }

    /// The range of a bucket that this rank keeps.
    pub(crate) fn shard_of(&self, bucket: &Bucket) -> Range<usize> {
        bucket.share(self.share.rank(), self.share.size())
    }
}

/// Splits `all` into groups of `ranks` neighbours. Returns this rank's group, and the group of
/// ranks with the same position in theirs.
fn share_and_copies(
    world: &Group,
    all: &Group,
    ranks: usize,
    [share, copies]: [&str; 2],
    known: &[&Group],
) -> Result<(Group, Group), CollectiveError> {
    let alone = || world.subgroup("alone", &[world.rank()]);
    // Each group costs a communicator on the GPU, so existing groups are reused.
    if ranks == 1 {
        return Ok((alone()?, all.clone()));
    }
    let members = all.members();
    if members.len() == ranks {
        return Ok((all.clone(), alone()?));
    }
    let first = all.rank() / ranks * ranks;
    let same = members.iter().skip(all.rank() % ranks).step_by(ranks);
    let same: Vec<usize> = same.copied().collect();
    let share = world.subgroup_among(share, &members[first..first + ranks], known)?;
    Ok((share, world.subgroup_among(copies, &same, known)?))
}

/// The ranks along `axes` at the coordinates of each member of `share`, sorted.
fn around(groups: &ProcessGroups, share: &Group, axes: &[Axis]) -> Vec<usize> {
    let members = share.members().iter();
    let mut all: Vec<usize> = members
        .flat_map(|&rank| groups.mesh.group_of(axes, rank))
        .collect();
    all.sort_unstable();
    all
}
