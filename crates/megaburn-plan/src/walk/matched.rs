//! Whether the calls of ranks that meet in a collective agree.

use std::collections::BTreeMap;

use megaburn_collective::{Call, Collective, TracedCall};

use crate::error::PlanError;

/// The calls of one rank in a step, by group and in order.
#[derive(Debug)]
pub(super) struct Calls {
    pub(super) rank: usize,
    groups: BTreeMap<String, Called>,
}

/// A group and what its member called.
#[derive(Debug, Default)]
struct Called {
    members: Vec<usize>,
    calls: Vec<TracedCall>,
}

impl Calls {
    /// The calls of `rank`, whose groups have these members.
    pub(super) fn new(
        rank: usize,
        members: BTreeMap<String, Vec<usize>>,
        calls: Vec<TracedCall>,
    ) -> Self {
        let of_group = |(name, members)| {
            let calls = Vec::new();
            (name, Called { members, calls })
        };
        let mut groups: BTreeMap<String, Called> = members.into_iter().map(of_group).collect();
        for call in calls {
            let group = groups.entry(call.group.clone()).or_default();
            group.calls.push(call);
        }
        Self { rank, groups }
    }

    pub(super) fn len(&self) -> usize {
        self.groups.values().map(|group| group.calls.len()).sum()
    }

    /// Compares the calls of two ranks in the groups of which both are members. Returns the number of
    /// calls that were compared.
    ///
    /// # Errors
    /// The first calls that differ.
    pub(super) fn compare(&self, other: &Self) -> Result<usize, PlanError> {
        let mut compared = 0;
        for (name, group) in &self.groups {
            // What follows the router depends on its choice.
            if !group.members.contains(&other.rank) || is_routed(name) {
                continue;
            }
            let others = other.groups.get(name);
            let others = others.map_or(&[][..], |group| &group.calls);
            compared += group.calls.len();
            for at in 0..group.calls.len().max(others.len()) {
                let pair = [group.calls.get(at), others.get(at)];
                let agree = match pair {
                    [Some(one), Some(another)] => agree(&one.call, &another.call),
                    _ => false,
                };
                if !agree {
                    return Err(PlanError::Walk {
                        group: name.clone(),
                        number: at + 1,
                        ranks: [self.rank, other.rank],
                        calls: Box::new(pair.map(text)),
                    });
                }
            }
        }
        Ok(compared)
    }
}

/// Whether two calls can meet. A receiver may expect any shape, which is empty then.
fn agree(one: &Call, other: &Call) -> bool {
    let is_open = one.shape.is_empty() || other.shape.is_empty();
    let is_sent = one.op == Collective::Send;
    one.agrees(other) && (!is_sent || is_open || one.shape == other.shape)
}

fn text(call: Option<&TracedCall>) -> String {
    match call {
        Some(traced) => traced.call.to_string(),
        None => "nothing".to_string(),
    }
}

/// Whether the sizes of a group's calls depend on the choice of a router.
fn is_routed(group: &str) -> bool {
    ["ep", "etp"].contains(&group)
}

#[cfg(test)]
mod tests {
    use std::{thread, time::Instant};

    use burn::tensor::DType;

    use super::*;

    /// A rank of two stages of four ranks, the halves of which are tensor-parallel.
    fn calls(rank: usize, of: &[(&str, usize)]) -> Calls {
        let pair = rank / 2 * 2;
        let groups = [
            ("world", (0..8).collect()),
            ("tp", vec![pair, pair + 1]),
            ("ep", vec![pair, pair + 1]),
            ("pp 0 to 1", vec![rank % 4, rank % 4 + 4]),
        ];
        let call = |(number, (group, len)): (usize, &(&str, usize))| TracedCall {
            group: group.to_string(),
            call: Call {
                op: Collective::AllGather,
                seq: number as u64,
                dtype: DType::F32,
                shape: vec![*len],
            },
            start: Instant::now(),
            end: None,
            is_on_gpu: false,
            thread: thread::current().id(),
        };
        let groups = groups.map(|(name, members)| (name.to_string(), members));
        let calls = of.iter().enumerate().map(call).collect();
        Calls::new(rank, groups.into(), calls)
    }

    #[test]
    fn calls_of_ranks_that_meet_are_compared() {
        let one = calls(0, &[("world", 1), ("tp", 4), ("tp", 8), ("pp 0 to 1", 3)]);
        assert_eq!(one.len(), 4);
        let neighbour = calls(1, &[("world", 1), ("tp", 4), ("tp", 8), ("pp 0 to 1", 7)]);
        assert_eq!(one.compare(&neighbour).unwrap(), 3);
        let next_stage = calls(4, &[("world", 1), ("tp", 5), ("tp", 9), ("pp 0 to 1", 3)]);
        assert_eq!(one.compare(&next_stage).unwrap(), 2);
        let far = calls(7, &[("world", 1), ("tp", 9)]);
        assert_eq!(one.compare(&far).unwrap(), 1);
    }

    #[test]
    fn what_is_sent_has_the_shape_that_is_received() {
        let call = |shape: &[usize]| Call {
            op: Collective::Send,
            seq: 0,
            dtype: DType::F32,
            shape: shape.to_vec(),
        };
        assert!(agree(&call(&[3, 2]), &call(&[3, 2])));
        assert!(agree(&call(&[3, 2]), &call(&[])));
        assert!(!agree(&call(&[3, 2]), &call(&[2, 3])));
    }

    #[test]
    fn a_call_that_differs_or_is_missing_is_named() {
        let one = calls(0, &[("tp", 4), ("tp", 8)]);
        let other = calls(1, &[("tp", 4), ("tp", 9)]);
        let error = one.compare(&other).unwrap_err().to_string();
        let named = "rank 0 and rank 1 do not agree in call 2 of the group `tp`: \
            all_gather #1 of F32 [8] and all_gather #1 of F32 [9]";
        assert!(error.starts_with(named), "{error}");
        let missing = calls(1, &[("tp", 4)]);
        for [one, other] in [[&one, &missing], [&missing, &one]] {
            let error = one.compare(other).unwrap_err().to_string();
            assert!(error.contains("nothing"), "{error}");
        }
        // What follows a router differs.
        let [one, other] = [0, 1].map(|rank| calls(rank, &[("ep", 4 + rank)]));
        assert_eq!(one.compare(&other).unwrap(), 0);
    }
}
