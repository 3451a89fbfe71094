use crate::action::Action;

/// A pass and the time at which it was computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The pass.
    pub action: Action,
    /// Its start, in the unit of the costs.
    pub start: u64,
    /// Its end.
    pub end: u64,
}

/// When each rank computes each pass. Times are in the unit of the costs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Each rank's passes, in order.
    pub ranks: Vec<Vec<Span>>,
}

impl Timing {
    /// The time from the start of the step until the last rank is done.
    pub fn makespan(&self) -> u64 {
        self.ranks
            .iter()
            .flatten()
            .map(|span| span.end)
            .max()
            .unwrap_or(0)
    }

    /// How long a rank computes.
    pub fn busy(&self, rank: usize) -> u64 {
        self.ranks[rank]
            .iter()
            .map(|span| span.end - span.start)
            .sum()
    }

    /// How long a rank is idle, from the start of the step until the last rank is done.
    pub fn idle(&self, rank: usize) -> u64 {
        self.makespan() - self.busy(rank)
    }

    /// How long a rank is idle between its own first and last pass. Only this time is lost if the
    /// first ranks may begin the next step while the last ranks finish this one.
    pub fn idle_between(&self, rank: usize) -> u64 {
        let passes = &self.ranks[rank];
        match (passes.first(), passes.last()) {
            (Some(first), Some(last)) => last.end - first.start - self.busy(rank),
            _ => 0,
        }
    }

    /// The idle time of the busiest rank divided by its compute time: Megatron-LM's "bubble time
    /// fraction", `(p-1)/m` for 1F1B.
    pub fn bubble_ratio(&self) -> f64 {
        let busiest = (0..self.ranks.len()).max_by_key(|rank| self.busy(*rank));
        busiest.map_or(0.0, |rank| {
            self.idle(rank) as f64 / self.busy(rank).max(1) as f64
        })
    }

    /// The fraction of all ranks' time in which they are idle.
    pub fn bubble_fraction(&self) -> f64 {
        let num_ranks = self.ranks.len();
        let idle: u64 = (0..num_ranks).map(|rank| self.idle(rank)).sum();
        idle as f64 / (self.makespan() * num_ranks as u64).max(1) as f64
    }
}
