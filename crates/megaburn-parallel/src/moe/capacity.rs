use std::cmp::Ordering;

use burn::{
    config::Config,
    tensor::{DType, Device, Tensor, TensorData},
};
use megaburn_collective::{CollectiveError, tensors};
use megaburn_mesh::Zigzag;

use super::{ExpertGroups, dispatch::DROPPED};
use crate::PackedDocuments;

/// How many tokens an expert takes; what is above goes on without it. Of `tokens` that go to `top_k` of
/// `num_experts` experts each, `ceil(factor * tokens * top_k / num_experts)`; padding is no token.
///
/// Source: Fedus et al. (2021), <https://arxiv.org/abs/2101.03961>, section 2.2; Megatron-LM
/// `megatron/core/transformer/moe/moe_utils.py`, `apply_router_token_dropping`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Capacity {
    /// Of what each would take if all took as many.
    pub factor: f64,
    /// Which tokens an expert takes.
    pub policy: DropPolicy,
    /// Among which tokens they are counted.
    pub scope: CapacityScope,
    /// Whether every expert is given as many rows as it can take, zeros where there are fewer: then none of its
    /// sizes depends on where tokens go.
    pub pad: bool,
}

/// Which tokens an expert takes that has too many.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum DropPolicy {
    /// Those that give it the most weight; of equal ones the first.
    Probs,
    /// The first.
    Position,
}

/// The tokens among which an expert's are counted.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum CapacityScope {
    /// Those of each sequence, whatever ranks have them: the same tokens are dropped under every layout.
    Sequence,
    /// Those that each rank has, as Megatron counts: nothing is sent for it.
    Rank,
}

/// The slots of some ranks, `[seq, batch, top_k]` each.
pub(super) struct SharedSlots<'a> {
    pub(super) seq: usize,
    pub(super) batch: usize,
    pub(super) top_k: usize,
    pub(super) num_experts: usize,
    pub(super) groups: &'a ExpertGroups,
    pub(super) documents: Option<&'a PackedDocuments>,
}

impl Capacity {
    /// Drops what is too much, from `experts` of this rank's slots with these weights; says how many.
    ///
    /// # Collective
    /// The ranks that share the micro-batch, where sequences are counted.
    pub(super) fn drop_from(
        &self,
        experts: &mut [i32],
        weights: &[f32],
        slots: &SharedSlots<'_>,
        device: &Device,
    ) -> Result<u64, CollectiveError> {
        let group = &slots.groups.tp_cp;
        let is_shared = self.scope == CapacityScope::Sequence && group.size() > 1;
        let all: Vec<(i32, f32)> = match is_shared {
            true => gathered(experts, weights, slots.groups, device)?,
            false => experts.iter().copied().zip(weights.iter().copied()).collect(),
        };
        let own = if is_shared { group.rank() } else { 0 };
        let places = slots.places(self.scope);
        // Candidates of each expert, in each sequence where those are counted.
        let queues = slots.num_experts * slots.queues(self.scope);
        let mut candidates: Vec<Vec<Candidate>> = (0..queues).map(|_| Vec::new()).collect();
        let sent = all.iter().enumerate().filter(|(_, (expert, _))| *expert != DROPPED);
        for (index, &(expert, weight)) in sent {
            let (rank, slot) = (index / experts.len(), index % experts.len());
            let token = slot / slots.top_k;
            let (queue, place) = match self.scope {
                CapacityScope::Sequence => {
                    (token % slots.batch, places[rank * slots.batch * slots.seq + token])
                }
                CapacityScope::Rank => (0, token),
            };
            let own = (rank == own).then_some(slot);
            let queue = &mut candidates[queue * slots.num_experts + expert as usize];
            queue.push(Candidate { weight, place, own });
        }
        let mut dropped = 0;
        for queues in candidates.chunks_mut(slots.num_experts) {
            let sent: usize = queues.iter().map(Vec::len).sum();
            let takes = self.takes(sent, slots.num_experts);
            for queue in queues {
                queue.sort_by(|a, b| a.compare(b, self.policy));
                for slot in queue.iter().skip(takes).filter_map(|candidate| candidate.own) {
                    experts[slot] = DROPPED;
                    dropped += 1;
                }
            }
        }
        Ok(dropped)
    }

    /// Of so many that are sent to all experts those that each takes.
    fn takes(&self, sent: usize, num_experts: usize) -> usize {
        (sent as f64 / num_experts as f64 * self.factor).ceil() as usize
    }

    /// Rows that each expert is given at most, from all ranks that send it some.
    pub(super) fn rows(&self, slots: &SharedSlots<'_>) -> usize {
        let SharedSlots { seq, batch, top_k, num_experts, .. } = *slots;
        let ExpertGroups { experts, tp_cp, .. } = slots.groups;
        match self.scope {
            CapacityScope::Rank => self.takes(seq * batch * top_k, num_experts) * experts.size(),
            CapacityScope::Sequence => {
                // Ranks that share sequences are neighbours.
                let mut of: Vec<usize> =
                    experts.members().iter().map(|rank| rank / tp_cp.size()).collect();
                of.dedup();
                self.takes(seq * tp_cp.size() * top_k, num_experts) * batch * of.len()
            }
        }
    }
}

/// A slot that an expert may take.
struct Candidate {
    weight: f32,
    place: usize,
    /// If it is of this rank.
    own: Option<usize>,
}

impl Candidate {
    fn compare(&self, other: &Self, policy: DropPolicy) -> Ordering {
        let by_weight = match policy {
            DropPolicy::Probs => other.weight.total_cmp(&self.weight),
            DropPolicy::Position => Ordering::Equal,
        };
        by_weight.then(self.place.cmp(&other.place))
    }
}

impl SharedSlots<'_> {
    /// Sequences that are counted by themselves.
    fn queues(&self, scope: CapacityScope) -> usize {
        match scope {
            CapacityScope::Sequence => self.batch,
            CapacityScope::Rank => 1,
        }
    }

    /// Where each token of each rank stands in its sequence, `[ranks, seq, batch]`.
    fn places(&self, scope: CapacityScope) -> Vec<usize> {
        let (tps, all) = (self.groups.tp.size(), self.groups.tp_cp.size());
        if scope == CapacityScope::Rank {
            return Vec::new();
        }
        let len = self.seq * all;
        let mut places = Vec::with_capacity(len * self.batch);
        for rank in 0..all {
            let zigzag = Zigzag::new(rank / tps, all / tps);
            let of_row = |row: usize| -> Vec<usize> {
                match self.documents {
                    None => zigzag.positions(len).collect(),
                    Some(documents) => documents.documents().tokens(row, zigzag).collect(),
                }
            };
            let rows: Vec<_> = (0..self.batch).map(of_row).collect();
            let start = rank % tps * self.seq;
            let of_rank =
                (start..start + self.seq).flat_map(|at| rows.iter().map(move |row| row[at]));
            places.extend(of_rank);
        }
        places
    }
}

/// The experts and weights of all ranks that share the micro-batch.
fn gathered(
    experts: &[i32],
    weights: &[f32],
    groups: &ExpertGroups,
    device: &Device,
) -> Result<Vec<(i32, f32)>, CollectiveError> {
    // A number of experts is a number in f32, too.
    let pairs = experts.iter().zip(weights);
    let pairs = pairs.flat_map(|(&expert, &weight)| [expert as f32, weight]);
    let pairs = TensorData::new(pairs.collect::<Vec<_>>(), [experts.len(), 2]);
    let pairs = Tensor::<2>::from_data(pairs, (device, DType::F32));
    let all = tensors::all_gather(pairs, &groups.tp_cp)?.into_data();
    let all: Vec<f32> = all.try_to_vec().expect("f32 went in");
    Ok(all.chunks_exact(2).map(|pair| (pair[0] as i32, pair[1])).collect())
}
