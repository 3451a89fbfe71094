//! Digests with which members compare the calls that they made on the GPU. NCCL itself checks
//! nothing, and ranks that disagree hang or compute garbage.

use std::collections::{HashSet, VecDeque};

use burn::tensor::DType;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::{
    busy::Busy,
    call::{Call, Collective},
};

/// The number of recent calls that are kept individually.
const KEPT: usize = 64;
/// The hash of all calls so far is kept once per this many calls.
const MARK: u64 = 64;
/// The number of hashes that are kept: a member may lag by this many.
const MARKS: usize = 256;

/// The calls of one group on this rank's GPU.
#[derive(Debug, Default)]
pub(crate) struct CallLog {
    made: u64,
    hash: u64,
    recent: VecDeque<Call>,
    marks: VecDeque<(u64, u64)>,
    kinds: HashSet<(Collective, DType, Vec<usize>)>,
}

/// A member's digest of its calls.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CallDigest {
    /// Whether the sender wants an answer because it is waiting.
    pub(crate) asks: bool,
    /// Set if the sender is in a long phase.
    pub(crate) busy: Option<Busy>,
    /// The number of calls that the sender made.
    pub(crate) made: u64,
    /// A number of calls and their hash.
    mark: Option<(u64, u64)>,
    /// The latest calls, oldest first.
    pub(crate) recent: Vec<Call>,
}

/// Where the calls of two members differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Disagreement {
    /// In these calls: this member's and the other's.
    At(Box<[Call; 2]>),
    /// Before this call number; the calls themselves are no longer kept.
    Before(u64),
}

impl CallLog {
    /// Adds a call; returns true if it is the first with its operation, type and shape.
    pub(crate) fn push(&mut self, call: &Call) -> bool {
        // Ignore shapes that may differ by rank: they do not indicate a disagreement.
        let shape = if call.any_shape() {
            Vec::new()
        } else {
            call.shape.clone()
        };
        let kind = (call.op, call.dtype, shape);
        self.hash = xxh3_64_with_seed(format!("{kind:?}").as_bytes(), self.hash);
        self.made += 1;
        if self.recent.len() == KEPT {
            self.recent.pop_front();
        }
        self.recent.push_back(call.clone());
        if self.made.is_multiple_of(MARK) {
            if self.marks.len() == MARKS {
                self.marks.pop_front();
            }
            self.marks.push_back((self.made, self.hash));
        }
        self.kinds.insert(kind)
    }

    /// The number of calls made.
    pub(crate) fn made(&self) -> u64 {
        self.made
    }

    /// The latest call.
    pub(crate) fn last(&self) -> Option<&Call> {
        self.recent.back()
    }

    pub(crate) fn bulletin(&self, asks: bool) -> CallDigest {
        let mark = self.marks.back().copied();
        let recent = self.recent.iter().cloned().collect();
        CallDigest {
            asks,
            busy: None,
            made: self.made,
            mark,
            recent,
        }
    }

    /// Returns where a member's calls differ from these, as far as both have made them. Names the
    /// first differing calls if both members still keep them.
    pub(crate) fn differs(&self, theirs: &CallDigest) -> Option<Disagreement> {
        let both = self.recent.iter().filter_map(|mine| {
            let theirs = theirs.recent.iter().find(|theirs| theirs.seq == mine.seq)?;
            (!mine.agrees(theirs)).then(|| Box::new([mine.clone(), theirs.clone()]))
        });
        if let Some(calls) = both.into_iter().next() {
            return Some(Disagreement::At(calls));
        }
        let (made, hash) = theirs.mark?;
        let mine = self.marks.iter().find(|(mine, _)| *mine == made)?.1;
        (mine != hash).then_some(Disagreement::Before(made))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::ReduceOp;

    fn call(op: Collective, seq: u64, shape: &[usize]) -> Call {
        Call {
            op,
            seq,
            dtype: DType::BF16,
            shape: shape.to_vec(),
        }
    }

    fn log(calls: impl IntoIterator<Item = Call>) -> CallLog {
        let mut log = CallLog::default();
        calls.into_iter().for_each(|call| _ = log.push(&call));
        log
    }

    fn sums(count: u64) -> Vec<Call> {
        (0..count)
            .map(|seq| call(Collective::AllReduce(ReduceOp::Sum), seq, &[4, 8]))
            .collect()
    }

    #[test]
    fn the_first_call_of_a_shape_is_told_from_later_ones() {
        let mut log = CallLog::default();
        let ops = [Collective::AllReduce(ReduceOp::Sum), Collective::AllGather];
        let first = ops.map(|op| log.push(&call(op, 0, &[2, 3])));
        let again = ops.map(|op| log.push(&call(op, 1, &[2, 3])));
        assert_eq!((first, again), ([true; 2], [false; 2]));
        assert!(log.push(&call(Collective::AllGather, 2, &[3, 2])));
        // Each member's part of an uneven all-to-all may have another shape in every call.
        assert!(log.push(&call(Collective::AllToAll, 3, &[5])));
        assert!(!log.push(&call(Collective::AllToAll, 4, &[6])));
    }

    #[test]
    fn members_that_agree_do_not_differ_wherever_they_are() {
        for (mine, theirs) in [
            (0, 0),
            (5, 5),
            (5, 3),
            (3, 5),
            (500, 500),
            (500, 437),
            (64, 300),
        ] {
            let mine = log(sums(mine));
            let theirs = log(sums(theirs));
            assert_eq!(mine.differs(&theirs.bulletin(true)), None);
        }
    }

    #[test]
    fn the_first_calls_that_differ_are_named() {
        let mut calls = sums(100);
        calls[70] = call(Collective::AllReduce(ReduceOp::Sum), 70, &[4, 9]);
        calls[80] = call(Collective::AllGather, 80, &[4, 8]);
        let found = log(sums(90)).differs(&log(calls.clone()).bulletin(false));
        let expected = [sums(100)[70].clone(), calls[70].clone()];
        assert_eq!(found, Some(Disagreement::At(Box::new(expected))));
    }

    #[test]
    fn a_difference_long_ago_is_found_by_its_hash() {
        let mut calls = sums(1000);
        calls[70] = call(Collective::AllReduce(ReduceOp::Sum), 70, &[8, 4]);
        let found = log(sums(980)).differs(&log(calls).bulletin(false));
        // The last mark that both have passed.
        assert_eq!(found, Some(Disagreement::Before(960)));
    }

    #[test]
    fn a_bulletin_survives_the_wire() {
        let bulletin = log(sums(70)).bulletin(true);
        let sent = serde_json::to_vec(&bulletin).unwrap();
        assert_eq!(
            serde_json::from_slice::<CallDigest>(&sent).unwrap(),
            bulletin
        );
    }
}
