//! One pass of hybrid context parallelism while it is being filled.

use std::{cmp::Reverse, ops::Range};

/// The sequences that some ranks compute together in a pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContextShare {
    /// The ranks; their number is a power of two.
    pub ranks: Range<usize>,
    /// Indices of the sequences; empty for an idle rank.
    pub sequences: Vec<usize>,
}

/// A share whose ranks are not placed yet.
pub(super) struct Assignment {
    pub(super) num_ranks: usize,
    pub(super) sequences: Vec<usize>,
    /// Tokens on each of its ranks.
    pub(super) tokens: usize,
    pub(super) work: u64,
}

/// The assignments that are computed together in one pass.
pub(super) struct PackedBatch {
    num_ranks: usize,
    /// Most tokens of each rank.
    max_tokens: usize,
    pub(super) drafts: Vec<Assignment>,
    /// Number of ranks with work.
    pub(super) taken: usize,
    /// Work of the busiest ranks.
    longest: u64,
}

/// A possible place of a sequence in a pass.
pub(super) struct Place {
    /// The assignment to append to; `None` means idle ranks.
    assignment: Option<usize>,
    /// How much longer the pass takes, then how much work the chosen ranks have.
    pub(super) cost: (u64, u64),
}

impl PackedBatch {
    pub(super) fn new(num_ranks: usize, max_tokens: usize) -> Self {
        Self {
            num_ranks,
            max_tokens,
            drafts: Vec::new(),
            taken: 0,
            longest: 0,
        }
    }

    /// This empty pass with its first assignment.
    pub(super) fn with(self, assignment: Assignment) -> Self {
        Self {
            taken: assignment.num_ranks,
            longest: assignment.work,
            drafts: vec![assignment],
            ..self
        }
    }

    /// The place where a sequence increases the time of the pass least, if there is one: appended
    /// to an assignment of the same number of ranks or, with `alone`, on idle ranks.
    pub(super) fn place(&self, new: &Assignment, alone: bool) -> Option<Place> {
        let place = |assignment, work: u64| {
            let cost = (work.saturating_sub(self.longest), work);
            Place { assignment, cost }
        };
        let is_free = alone && self.taken + new.num_ranks <= self.num_ranks;
        let alone = is_free.then(|| place(None, new.work));
        let fits = |assignment: &&Assignment| {
            assignment.num_ranks == new.num_ranks
                && assignment.tokens + new.tokens <= self.max_tokens
        };
        let behind = self
            .drafts
            .iter()
            .enumerate()
            .filter(|(_, assignment)| fits(assignment));
        let behind = behind.map(|(at, assignment)| place(Some(at), assignment.work + new.work));
        alone
            .into_iter()
            .chain(behind)
            .min_by_key(|place| place.cost)
    }

    pub(super) fn put(
        &mut self,
        new: Assignment,
        Place {
            assignment,
            cost: (longer, _),
        }: Place,
    ) {
        self.longest += longer;
        let Some(assignment) = assignment.map(|at| &mut self.drafts[at]) else {
            self.taken += new.num_ranks;
            return self.drafts.push(new);
        };
        assignment.sequences.extend(new.sequences);
        assignment.tokens += new.tokens;
        assignment.work += new.work;
    }

    /// The shares of the pass, largest first so that each starts at a multiple of its size.
    pub(super) fn shares(self) -> Vec<ContextShare> {
        let Self {
            num_ranks: all,
            mut drafts,
            ..
        } = self;
        drafts.sort_by_key(|assignment| Reverse(assignment.num_ranks));
        let mut end = 0;
        let place = |Assignment {
                         num_ranks,
                         sequences,
                         ..
                     }: Assignment| {
            let ranks = end..end + num_ranks;
            end = ranks.end;
            ContextShare { ranks, sequences }
        };
        let mut shares: Vec<ContextShare> = drafts.into_iter().map(place).collect();
        let idle = |rank| ContextShare {
            ranks: rank..rank + 1,
            sequences: Vec::new(),
        };
        shares.extend((end..all).map(idle));
        shares
    }
}
