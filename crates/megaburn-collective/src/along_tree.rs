//! Calls of a large group that travel along a tree: what the members contribute goes up to its root,
//! and the result goes down again. A member exchanges messages with three others at most, and waits
//! for a number of messages that grows with the logarithm of the group.

use burn::tensor::{Bytes, DType};

use crate::{
    call::{Call, Collective},
    deadline::Deadline,
    error::CollectiveError,
    group::Group,
    message::Payload,
    rank_context::RankContext,
    tree,
};

/// Contributions of up to this many bytes travel along a tree in a large group.
const SMALL: usize = 16 << 10;
/// What precedes a part in a bundle: the member's number and the length, in 8 bytes each.
const HEAD: usize = 16;

/// The contributions of some members, by member.
type Parts = Vec<(usize, Payload)>;

impl Group {
    /// Whether contributions of `bytes` each travel along a tree.
    pub(crate) fn is_along_tree(&self, bytes: usize) -> bool {
        self.is_large() && bytes <= SMALL && !self.is_rehearsal()
    }

    /// Passes the contribution of each member that has one up to the root, and passes what `at_root`
    /// makes of them, in member order, down to every member.
    ///
    /// The tree is the same for all calls of a group, whatever the root of a broadcast is: members
    /// that disagree about their call meet, and name each other, instead of waiting for each other.
    pub(crate) fn along_tree(
        &self,
        link: &RankContext,
        call: &Call,
        deadline: Deadline,
        mine: Option<Payload>,
        at_root: impl FnOnce(Vec<Payload>) -> Result<Payload, CollectiveError>,
    ) -> Result<Payload, CollectiveError> {
        let Place { parent, children } = Place::new(self);
        let is_partial = mine.is_none() || matches!(call.op, Collective::Broadcast { .. });
        let mut parts: Parts = mine.map(|mine| (self.rank(), mine)).into_iter().collect();
        for &child in &children {
            let below = self.receive_from(link, call, child, deadline)?;
            let below = unpack(below.payload.as_slice());
            let bad = || self.bad_argument(call, "a member passed on bytes that are no bundle");
            parts.extend(below.ok_or_else(bad)?);
        }
        let result = match parent {
            Some(parent) => {
                self.send_to(link, call, parent, pack(&parts), deadline)?;
                self.receive_from(link, call, parent, deadline)?.payload
            }
            None => {
                parts.sort_by_key(|(member, _)| *member);
                let members = parts.iter().map(|(member, _)| *member);
                if !(is_partial || members.eq(0..self.size())) {
                    let why = "the contribution of a member is missing or came twice";
                    return Err(self.bad_argument(call, why));
                }
                at_root(parts.into_iter().map(|(_, part)| part).collect())?
            }
        };
        for &child in &children {
            self.send_to(link, call, child, result.clone(), deadline)?;
        }
        Ok(result)
    }

    /// Returns when every member has made `call`.
    pub(crate) fn meet(
        &self,
        link: &RankContext,
        call: &Call,
        deadline: Deadline,
    ) -> Result<(), CollectiveError> {
        if self.is_along_tree(0) {
            let nothing = |_| Ok(Payload::empty());
            let met = self.along_tree(link, call, deadline, None, nothing);
            return met.map(drop);
        }
        self.exchange(link, call, deadline, |_| Payload::empty())
            .map(drop)
    }

    /// Returns what member `root` gives. The others give nothing.
    pub(crate) fn given_by_root(
        &self,
        link: &RankContext,
        call: &Call,
        deadline: Deadline,
        mine: Payload,
        root: usize,
    ) -> Result<Payload, CollectiveError> {
        if self.is_along_tree(0) {
            let mine = (self.rank() == root).then_some(mine);
            return self.along_tree(link, call, deadline, mine, |parts| {
                let missing = || self.bad_argument(call, "the root gave nothing");
                parts.into_iter().next().ok_or_else(missing)
            });
        }
        let all = self.exchange(link, call, deadline, |_| mine.clone())?;
        Ok(all.into_iter().nth(root).expect("the root is a member"))
    }

    /// Gathers every member's bytes, in member order, at member 0; the others get an empty list.
    /// Every member waits until all have given theirs.
    pub(crate) fn gather_along_tree(&self, mine: Vec<u8>) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let call = self.next_call(Collective::AllToAll, DType::U8, &[0]);
        self.run(&call, |link, deadline| {
            let mut all = Vec::new();
            let mine = Payload::new(Bytes::from_bytes_vec(mine));
            self.along_tree(link, &call, deadline, Some(mine), |parts| {
                all = parts.iter().map(|part| part.as_slice().to_vec()).collect();
                Ok(Payload::empty())
            })?;
            Ok(all)
        })
    }
}

/// The members next to this one in the tree of their group.
struct Place {
    parent: Option<usize>,
    children: Vec<usize>,
}

impl Place {
    fn new(group: &Group) -> Self {
        Self {
            parent: tree::parent(group.rank()),
            children: tree::children(group.rank(), group.size()).collect(),
        }
    }
}

fn pack(parts: &[(usize, Payload)]) -> Payload {
    let len = parts.iter().map(|(_, part)| HEAD + part.as_slice().len());
    let mut bytes = Vec::with_capacity(len.sum());
    for (member, part) in parts {
        let part = part.as_slice();
        bytes.extend_from_slice(&(*member as u64).to_le_bytes());
        bytes.extend_from_slice(&(part.len() as u64).to_le_bytes());
        bytes.extend_from_slice(part);
    }
    Payload::new(Bytes::from_bytes_vec(bytes))
}

/// The parts of a bundle, each in memory of its own, which is aligned for any element type.
fn unpack(mut bundle: &[u8]) -> Option<Parts> {
    let mut parts = Vec::new();
    while !bundle.is_empty() {
        let (head, rest) = bundle.split_at_checked(HEAD)?;
        let number = |at: usize| {
            let bytes = head[at..at + 8].try_into().ok()?;
            usize::try_from(u64::from_le_bytes(bytes)).ok()
        };
        let (member, len) = (number(0)?, number(8)?);
        let (part, rest) = rest.split_at_checked(len)?;
        let part = Payload::new(Bytes::from_bytes_vec(part.to_vec()));
        parts.push((member, part));
        bundle = rest;
    }
    Some(parts)
}

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;

    use super::*;
    use crate::{call::ReduceOp, launch::run_threads, objects, options::GroupOptions};

    #[test]
    fn a_bundle_that_is_cut_anywhere_else_than_between_parts_is_refused() {
        let part = |bytes: &[u8]| Payload::new(Bytes::from_bytes_vec(bytes.to_vec()));
        let bundle = pack(&[(3, part(&[1, 2])), (0, part(&[]))]);
        let bytes = bundle.as_slice();
        let all = unpack(bytes).unwrap();
        assert_eq!((all[0].0, all[0].1.as_slice()), (3, &[1, 2][..]));
        assert_eq!((all[1].0, all[1].1.as_slice()), (0, &[][..]));
        for cut in 1..bytes.len() {
            let whole = cut == HEAD + 2;
            assert_eq!(unpack(&bytes[..cut]).is_some(), whole, "cut at {cut}");
        }
        let mut boasting = bytes.to_vec();
        boasting[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(unpack(&boasting).is_none());
    }

    /// The world of 5 ranks and more passes messages along a tree, its subgroup of all does not.
    #[test]
    fn results_along_a_tree_are_those_of_direct_exchanges() {
        for size in [5, 6, 12] {
            let ranks = run_threads(size, GroupOptions::default(), |world| {
                let all: Vec<_> = (0..size).collect();
                let direct = world.subgroup("direct", &all)?;
                assert!(world.is_along_tree(8) && !direct.is_along_tree(8));
                let mine = || {
                    let value = 0.1 + world.rank() as f32 * 1.7;
                    TensorData::from([value, -value, value * value])
                };
                for op in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Mean] {
                    let both = [&world, &direct].map(|group| group.all_reduce(mine(), op));
                    assert_eq!(both[0], both[1]);
                }
                let both = [&world, &direct].map(|group| group.all_gather(mine()));
                assert_eq!(both[0], both[1]);
                for root in [0, 1, size - 1] {
                    let both = [&world, &direct].map(|group| group.broadcast(mine(), root));
                    assert_eq!(both[0], both[1]);
                }
                let text = "ä".repeat(world.rank());
                let both = [&world, &direct].map(|group| objects::gather(group, &text));
                assert_eq!(both[0], both[1]);
                world.barrier()
            });
            ranks.into_iter().for_each(|rank| rank.unwrap());
        }
    }

    #[test]
    fn a_member_that_makes_another_call_is_named() {
        let ranks = run_threads(9, GroupOptions::default(), |world| match world.rank() {
            5 => world.all_gather(TensorData::from([1f32])).map(drop),
            _ => world.barrier(),
        });
        for rank in ranks {
            let text = rank.unwrap_err().to_string();
            assert!(text.contains("rank 5 called all_gather"), "{text}");
        }
    }
}
