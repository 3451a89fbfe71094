//! Small contributions of all members of a large group, which travel along a tree: up to its root,
//! where they come together, and down again. A member exchanges messages with three others at most,
//! and waits for a number of messages that grows with the logarithm of the group.

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
    /// Gives `mine` to every member and returns the contributions of all, in member order. They have
    /// the same length, except in a broadcast.
    ///
    /// The tree is the same for all calls of a group, whatever the root of a broadcast is: members
    /// that disagree about their call meet, and name each other, instead of waiting for each other.
    pub(crate) fn share(
        &self,
        link: &RankContext,
        call: &Call,
        deadline: Deadline,
        mine: Payload,
    ) -> Result<Vec<Payload>, CollectiveError> {
        let is_small = mine.as_slice().len() <= SMALL;
        let is_broadcast = matches!(call.op, Collective::Broadcast { .. });
        if !(is_small || is_broadcast) || !self.is_along_tree() || link.transport.is_rehearsal() {
            return self.exchange(link, call, deadline, |_| mine.clone());
        }
        let place = Place::new(self);
        let parts = self.pass_up(link, call, deadline, &place, mine)?;
        let parts = match place.parent {
            Some(parent) => {
                self.send_to(link, call, parent, pack(&parts), deadline)?;
                let all = self.receive_from(link, call, parent, deadline)?;
                self.unpack(call, &all.payload)?
            }
            None => parts,
        };
        self.pass_down(link, call, deadline, &place, &pack(&parts))?;
        self.in_order(call, parts)
    }

    /// Gathers every member's bytes, in member order, at member 0; the others get an empty list.
    /// Every member waits until all have given theirs.
    pub(crate) fn gather_along_tree(&self, mine: Vec<u8>) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let call = self.next_call(Collective::AllToAll, DType::U8, &[0]);
        self.run(&call, |link, deadline| {
            let place = Place::new(self);
            let mine = Payload::new(Bytes::from_bytes_vec(mine));
            let parts = self.pass_up(link, &call, deadline, &place, mine)?;
            let Some(parent) = place.parent else {
                let parts = self.in_order(&call, parts)?;
                self.pass_down(link, &call, deadline, &place, &Payload::empty())?;
                return Ok(parts
                    .into_iter()
                    .map(|part| part.as_slice().to_vec())
                    .collect());
            };
            self.send_to(link, &call, parent, pack(&parts), deadline)?;
            self.receive_from(link, &call, parent, deadline)?;
            self.pass_down(link, &call, deadline, &place, &Payload::empty())?;
            Ok(Vec::new())
        })
    }

    /// This member's contribution and those of all members below it.
    fn pass_up(
        &self,
        link: &RankContext,
        call: &Call,
        deadline: Deadline,
        place: &Place,
        mine: Payload,
    ) -> Result<Parts, CollectiveError> {
        let mut parts = vec![(self.rank(), mine)];
        for &child in &place.children {
            let below = self.receive_from(link, call, child, deadline)?;
            parts.extend(self.unpack(call, &below.payload)?);
        }
        Ok(parts)
    }

    fn pass_down(
        &self,
        link: &RankContext,
        call: &Call,
        deadline: Deadline,
        place: &Place,
        all: &Payload,
    ) -> Result<(), CollectiveError> {
        place
            .children
            .iter()
            .try_for_each(|&child| self.send_to(link, call, child, all.clone(), deadline))
    }

    fn unpack(&self, call: &Call, bundle: &Payload) -> Result<Parts, CollectiveError> {
        unpack(bundle.as_slice())
            .ok_or_else(|| self.bad_argument(call, "a member passed on bytes that are no bundle"))
    }

    /// The contributions in member order.
    fn in_order(&self, call: &Call, mut parts: Parts) -> Result<Vec<Payload>, CollectiveError> {
        parts.sort_by_key(|(member, _)| *member);
        if !parts.iter().map(|(member, _)| *member).eq(0..self.size()) {
            let why = "the contribution of a member is missing or came twice";
            return Err(self.bad_argument(call, why));
        }
        Ok(parts.into_iter().map(|(_, part)| part).collect())
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

fn pack(parts: &Parts) -> Payload {
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
        let bundle = pack(&vec![(3, part(&[1, 2])), (0, part(&[]))]);
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
                assert!(world.is_along_tree() && !direct.is_along_tree());
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
