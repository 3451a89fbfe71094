//! What ranks compute together of sequences of uneven lengths.

use std::cmp::Reverse;

use super::hybrid::{ContextShare, HybridContextParallel};

/// A share that has no place among the ranks yet.
pub(super) struct Assignment {
    pub(super) num_ranks: usize,
    pub(super) sequences: Vec<usize>,
    /// Of each of its ranks.
    pub(super) tokens: usize,
    pub(super) work: u64,
}

/// Drafts that are computed together.
#[derive(Default)]
pub(super) struct PackedBatch {
    pub(super) drafts: Vec<Assignment>,
    /// Ranks that have something.
    pub(super) taken: usize,
    /// The work of those with the most.
    longest: u64,
}

/// Where a sequence can go in a pass.
pub(super) struct Place {
    /// Behind the others of a draft; none: on ranks that have nothing.
    assignment: Option<usize>,
    /// How much longer the pass takes, and then how much its ranks have to do.
    pub(super) cost: (u64, u64),
}

impl PackedBatch {
    pub(super) fn of(assignment: Assignment) -> Self {
        Self {
            taken: assignment.num_ranks,
            longest: assignment.work,
            drafts: vec![assignment],
        }
    }

    /// Where a sequence makes the pass the least longer, if there is room for it: behind others, or `alone` on ranks
    /// that have nothing.
    pub(super) fn place(
        &self,
        new: &Assignment,
        alone: bool,
        context: &HybridContextParallel,
    ) -> Option<Place> {
        let place = |assignment, work: u64| {
            let cost = (work.saturating_sub(self.longest), work);
            Place { assignment, cost }
        };
        let is_free = alone && self.taken + new.num_ranks <= context.num_ranks;
        let alone = is_free.then(|| place(None, new.work));
        let fits = |assignment: &&Assignment| {
            assignment.num_ranks == new.num_ranks
                && assignment.tokens + new.tokens <= context.max_tokens
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

    /// The largest first, so that each begins at a multiple of its size.
    pub(super) fn shares(self, num_ranks: usize) -> Vec<ContextShare> {
        let mut drafts = self.drafts;
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
        shares.extend((end..num_ranks).map(idle));
        shares
    }
}
