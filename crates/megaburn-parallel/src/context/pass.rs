//! What ranks compute together of sequences of uneven lengths.

use std::cmp::Reverse;

use super::dynamic::{DynamicContext, Share};

/// A share that has no place among the ranks yet.
pub(super) struct Draft {
    pub(super) num_ranks: usize,
    pub(super) sequences: Vec<usize>,
    /// Of each of its ranks.
    pub(super) tokens: usize,
    pub(super) work: u64,
}

/// Drafts that are computed together.
#[derive(Default)]
pub(super) struct Pass {
    pub(super) drafts: Vec<Draft>,
    /// Ranks that have something.
    pub(super) taken: usize,
    /// The work of those with the most.
    longest: u64,
}

/// Where a sequence can go in a pass.
pub(super) struct Place {
    /// Behind the others of a draft; none: on ranks that have nothing.
    draft: Option<usize>,
    /// How much longer the pass takes, and then how much its ranks have to do.
    pub(super) cost: (u64, u64),
}

impl Pass {
    pub(super) fn of(draft: Draft) -> Self {
        Self {
            taken: draft.num_ranks,
            longest: draft.work,
            drafts: vec![draft],
        }
    }

    /// Where a sequence makes the pass the least longer, if there is room for it: behind others, or `alone` on ranks
    /// that have nothing.
    pub(super) fn place(
        &self,
        new: &Draft,
        alone: bool,
        context: &DynamicContext,
    ) -> Option<Place> {
        let place = |draft, work: u64| {
            let cost = (work.saturating_sub(self.longest), work);
            Place { draft, cost }
        };
        let is_free = alone && self.taken + new.num_ranks <= context.num_ranks;
        let alone = is_free.then(|| place(None, new.work));
        let fits = |draft: &&Draft| {
            draft.num_ranks == new.num_ranks && draft.tokens + new.tokens <= context.max_tokens
        };
        let behind = self
            .drafts
            .iter()
            .enumerate()
            .filter(|(_, draft)| fits(draft));
        let behind = behind.map(|(at, draft)| place(Some(at), draft.work + new.work));
        alone
            .into_iter()
            .chain(behind)
            .min_by_key(|place| place.cost)
    }

    pub(super) fn put(
        &mut self,
        new: Draft,
        Place {
            draft,
            cost: (longer, _),
        }: Place,
    ) {
        self.longest += longer;
        let Some(draft) = draft.map(|at| &mut self.drafts[at]) else {
            self.taken += new.num_ranks;
            return self.drafts.push(new);
        };
        draft.sequences.extend(new.sequences);
        draft.tokens += new.tokens;
        draft.work += new.work;
    }

    /// The largest first, so that each begins at a multiple of its size.
    pub(super) fn shares(self, num_ranks: usize) -> Vec<Share> {
        let mut drafts = self.drafts;
        drafts.sort_by_key(|draft| Reverse(draft.num_ranks));
        let mut end = 0;
        let place = |Draft {
                         num_ranks,
                         sequences,
                         ..
                     }: Draft| {
            let ranks = end..end + num_ranks;
            end = ranks.end;
            Share { ranks, sequences }
        };
        let mut shares: Vec<Share> = drafts.into_iter().map(place).collect();
        let idle = |rank| Share {
            ranks: rank..rank + 1,
            sequences: Vec::new(),
        };
        shares.extend((end..num_ranks).map(idle));
        shares
    }
}
