//! Idle time and peak memory of the schedules in closed form, from the papers. The tests compare
//! the simulator with them.

use crate::{
    config::ScheduleConfig,
    kind::ScheduleKind,
    order::interleaved::warm_up,
    simulate::Costs,
    stages::{Placement, Stages},
};

impl ScheduleConfig {
    /// How long each rank is idle from the start of a step until the last rank is done, if every
    /// rank has these costs and transfers take no time. With p ranks, v chunks, m micro-batches and
    /// passes that take f (forward), b (input) and w (weights):
    ///
    /// - gpipe, 1f1b: `(p-1)(f+b+w)` (arXiv 2104.04473, section 2.2).
    /// - interleaved: the same, over v times as many passes (section 2.2). With fewer than p
    ///   micro-batches each chunk after the first also waits for the rest of the round, as in gpipe
    ///   with several chunks: `(v-1)(p-m)(f+b+w)` more.
    /// - zb-h1: `(p-1)(f+b-w)` for m of p or more and w no longer than f or b (arXiv 2401.10241,
    ///   section 2); in general `(p-1)(f+b) - (min(m,p)-1) min(f,b,w)`, because longer weight
    ///   passes do not fit into the place of a forward.
    /// - zb-v: `(p-1)f` for m of 2p or more and passes that take equally long. This is the start of
    ///   the last rank and the end of the first; between its own first and last pass a rank is
    ///   never idle ([`Timing::idle_between`](crate::Timing::idle_between), the paper's zero). For
    ///   m up to p it is `(4(p-1) - 2(m-1))f`. Other costs leave bubbles, which a searched order
    ///   (section 3) reduces; measured at p 8, m 16: 14 with f, b, w of 1, 2, 1, where `(p-1)f` is
    ///   7, and 21 with 2, 3, 2, where it is 14.
    /// - forward-only: `(p-1)f`, and `(v-1)(p-r)f` more if r micro-batches are left for a last
    ///   group of less than p.
    ///
    /// `None` for a size without a formula, and for gpipe and forward-only in a vee.
    pub fn expected_idle(&self, costs: Costs) -> Option<u64> {
        let Stages {
            num_ranks,
            num_chunks,
            placement,
        } = self.stages();
        let [p, v, m] = [num_ranks, num_chunks, self.num_micro_batches].map(|size| size as u64);
        let Costs {
            forward: f,
            backward_input: b,
            backward_weight: w,
            ..
        } = costs;
        let is_loop = placement == Placement::Loop;
        match self.kind {
            ScheduleKind::GPipe | ScheduleKind::Interleaved if is_loop => {
                Some((p - 1 + (v - 1) * p.saturating_sub(m)) * costs.step())
            }
            ScheduleKind::OneForwardOneBackward => Some((p - 1) * costs.step()),
            ScheduleKind::ZbH1 => Some((p - 1) * (f + b) - (m.min(p) - 1) * f.min(b).min(w)),
            ScheduleKind::ZbV if f == b && b == w && m >= 2 * p => Some((p - 1) * f),
            ScheduleKind::ZbV if f == b && b == w && m <= p => {
                Some((4 * (p - 1) - 2 * (m - 1)) * f)
            }
            ScheduleKind::ForwardOnly if is_loop => {
                let missing = (p - m % p) % p;
                Some((p - 1 + (v - 1) * missing) * f)
            }
            _ => None,
        }
    }

    /// [`Proof::peak_activations`](crate::Proof::peak_activations) of a rank r, in micro-batches of
    /// one chunk:
    ///
    /// - gpipe: `m v`. 1f1b: `min(m, p-r)`. zb-h1: `min(m, p)`, on every rank as much as 1f1b on
    ///   its first.
    /// - interleaved with groups of n: `min(m v, 2(p-r-1) + (v-1)n + 1)`.
    /// - zb-v: `min(2m, 2p, m+1+r)`: 2p halves of a rank's layers, which equals 1f1b's p on the
    ///   first.
    /// - forward-only: 0.
    ///
    /// `None` if the group size is not legal.
    pub fn expected_peak(&self, rank: usize) -> Option<usize> {
        let stages @ Stages {
            num_ranks,
            num_chunks,
            ..
        } = self.stages();
        let m = self.num_micro_batches;
        Some(match self.kind {
            ScheduleKind::GPipe => m * num_chunks,
            ScheduleKind::OneForwardOneBackward => m.min(num_ranks - rank),
            ScheduleKind::Interleaved => {
                (m * num_chunks).min(warm_up(rank, stages, self.group_size().ok()?) + 1)
            }
            ScheduleKind::ZbH1 => m.min(num_ranks),
            ScheduleKind::ZbV => (2 * m).min(2 * num_ranks).min(m + 1 + rank),
            ScheduleKind::ForwardOnly => 0,
        })
    }
}

impl ScheduleKind {
    /// [`ScheduleConfig::expected_idle`] divided by the compute time of a rank, as text, for the
    /// usual case: m is p or more, and 2p or more for zb-v.
    pub fn bubble_formula(self) -> &'static str {
        match self {
            ScheduleKind::GPipe | ScheduleKind::Interleaved => "(p-1)/(m*v)",
            ScheduleKind::OneForwardOneBackward => "(p-1)/m",
            ScheduleKind::ZbH1 => "(p-1)(f+b-w)/(m(f+b+w))",
            ScheduleKind::ZbV => "(p-1)f/(2m(f+b+w)), and 0 between a rank's first and last pass",
            ScheduleKind::ForwardOnly => "(p-1)/(m*v)",
        }
    }

    /// [`ScheduleConfig::expected_peak`] of rank r, as text.
    pub fn peak_formula(self) -> &'static str {
        match self {
            ScheduleKind::GPipe => "m*v",
            ScheduleKind::OneForwardOneBackward => "min(m, p-r)",
            ScheduleKind::Interleaved => "min(m*v, 2(p-r-1) + (v-1)n + 1)",
            ScheduleKind::ZbH1 => "min(m, p)",
            ScheduleKind::ZbV => "min(2m, 2p, m+1+r)",
            ScheduleKind::ForwardOnly => "0",
        }
    }
}
