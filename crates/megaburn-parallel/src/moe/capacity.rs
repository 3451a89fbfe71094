use burn::tensor::{DType, Device, Tensor, TensorData};
use megaburn_collective::{CollectiveError, Lane, tensors};
use megaburn_mesh::Zigzag;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ExpertGroups, dispatch::DROPPED};
use crate::context::PackedDocuments;

/// Expert capacity: how many tokens an expert takes. Tokens above it skip the expert. If each of
/// `tokens` tokens goes to `top_k` of `num_experts` experts, the capacity is
/// `ceil(factor * tokens * top_k / num_experts)`. Padding does not count as tokens.
///
/// Source: Fedus et al. (2021), <https://arxiv.org/abs/2101.03961>, section 2.2; Megatron-LM
/// `megatron/core/transformer/moe/moe_utils.py`, `apply_router_token_dropping`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Capacity {
    /// Factor on the tokens that each expert would take under a perfectly balanced load.
    pub factor: f64,
    /// Which tokens an expert takes.
    pub policy: DropPolicy,
    /// The tokens among which the capacity is computed.
    pub scope: CapacityScope,
    /// Whether every expert gets exactly as many rows as its capacity, padded with zeros. No size
    /// on the expert then depends on the routing.
    pub pad: bool,
}

/// Which tokens an expert with too many of them takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[derive(JsonSchema)]
pub enum DropPolicy {
    /// The tokens that give the expert the most weight; among nearly equal weights at the limit,
    /// the first.
    #[default]
    Probs,
    /// The first tokens.
    Position,
}

/// The tokens among which the capacity is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[derive(JsonSchema)]
pub enum CapacityScope {
    /// The tokens of each sequence, on whichever ranks: the same tokens are dropped under every
    /// layout.
    #[default]
    Sequence,
    /// The tokens of each rank, as in Megatron. Nothing is communicated.
    Rank,
}

/// What the slots of one or more ranks, `[seq, batch, top_k]` each, have in common.
pub(super) struct CapacityInputs<'a> {
    pub(super) seq: usize,
    pub(super) batch: usize,
    pub(super) top_k: usize,
    pub(super) num_experts: usize,
    pub(super) groups: &'a ExpertGroups,
    pub(super) documents: Option<&'a PackedDocuments>,
}

impl Capacity {
    /// Drops the assignments above capacity from `experts`, this rank's slots, with these weights.
    /// Returns how many were dropped.
    ///
    /// # Collective
    /// The ranks that share the micro-batch, if the capacity is per sequence.
    pub(super) fn drop_from(
        &self,
        experts: &mut [i32],
        weights: &[f32],
        slots: &CapacityInputs<'_>,
        device: &Device,
    ) -> Result<u64, CollectiveError> {
        let group = &slots.groups.tp_cp;
        let is_shared = self.scope == CapacityScope::Sequence && group.size() > 1;
        let all: Vec<(i32, f32)> = if is_shared {
            gathered(experts, weights, slots.groups, device)?
        } else {
            experts
                .iter()
                .copied()
                .zip(weights.iter().copied())
                .collect()
        };
        let own = if is_shared { group.rank() } else { 0 };
        let places = slots.places(self.scope);
        // Candidates of each expert, separately for each sequence if the capacity is per sequence.
        let queues = slots.num_experts * slots.queues(self.scope);
        let mut candidates: Vec<Vec<Candidate>> = (0..queues).map(|_| Vec::new()).collect();
        let sent = all
            .iter()
            .enumerate()
            .filter(|(_, (expert, _))| *expert != DROPPED);
        for (index, &(expert, weight)) in sent {
            let rank = index / experts.len();
            let slot = index % experts.len();
            let token = slot / slots.top_k;
            let (queue, place) = match self.scope {
                CapacityScope::Sequence => (
                    token % slots.batch,
                    places[rank * slots.batch * slots.seq + token],
                ),
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
                for slot in over_capacity(queue, takes, self.policy).filter_map(|left| left.own) {
                    experts[slot] = DROPPED;
                    dropped += 1;
                }
            }
        }
        Ok(dropped)
    }

    /// The capacity of each expert if `sent` assignments go to all experts together.
    fn takes(&self, sent: usize, num_experts: usize) -> usize {
        (sent as f64 / num_experts as f64 * self.factor).ceil() as usize
    }

    /// The most rows that an expert can get from all ranks that send to it.
    pub(super) fn rows(&self, slots: &CapacityInputs<'_>) -> usize {
        let CapacityInputs {
            seq,
            batch,
            top_k,
            num_experts,
            ..
        } = *slots;
        let ExpertGroups { experts, tp_cp, .. } = slots.groups;
        match self.scope {
            CapacityScope::Rank => self.takes(seq * batch * top_k, num_experts) * experts.size(),
            CapacityScope::Sequence => {
                // Ranks that share sequences are neighbours.
                let mut of: Vec<usize> = experts
                    .members()
                    .iter()
                    .map(|rank| rank / tp_cp.size())
                    .collect();
                of.dedup();
                self.takes(seq * tp_cp.size() * top_k, num_experts) * batch * of.len()
            }
        }
    }
}

/// An assignment that an expert may take.
struct Candidate {
    weight: f32,
    place: usize,
    /// Index of the slot, if it is on this rank.
    own: Option<usize>,
}

/// Weights that differ by at most this fraction are treated as equal at the limit of an expert.
///
/// Tokens with the same context, such as the first ones of documents with a common prefix, have the
/// same weight up to rounding. Rounding depends on the row's index in a GEMM, and thus on the
/// layout.
const NEARLY_EQUAL: f32 = 1.0 / 32768.0;

/// The candidates of `queue` that an expert of capacity `takes` drops.
///
/// By weight, the limit is the weight of the last candidate that fits. Candidates above it are
/// taken and candidates below it are dropped; of those [`NEARLY_EQUAL`] to it, the first ones are
/// taken.
fn over_capacity(
    queue: &mut [Candidate],
    takes: usize,
    policy: DropPolicy,
) -> impl Iterator<Item = &Candidate> {
    if policy == DropPolicy::Probs && (1..queue.len()).contains(&takes) {
        queue.sort_by(|a, b| b.weight.total_cmp(&a.weight));
        let limit = queue[takes - 1].weight;
        let near = NEARLY_EQUAL * limit.abs();
        let above = queue.partition_point(|candidate| candidate.weight > limit + near);
        let end = queue.partition_point(|candidate| candidate.weight >= limit - near);
        queue[above..end.max(above)].sort_by_key(|candidate| candidate.place);
    } else {
        queue.sort_by_key(|candidate| candidate.place);
    }
    queue.iter().skip(takes)
}

impl CapacityInputs<'_> {
    /// Number of sequences with a capacity of their own.
    fn queues(&self, scope: CapacityScope) -> usize {
        match scope {
            CapacityScope::Sequence => self.batch,
            CapacityScope::Rank => 1,
        }
    }

    /// The position of each rank's tokens in their sequences, `[ranks, seq, batch]`.
    fn places(&self, scope: CapacityScope) -> Vec<usize> {
        let tps = self.groups.tp.size();
        let all = self.groups.tp_cp.size();
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

/// Gathers the experts and weights of all ranks that share the micro-batch.
fn gathered(
    experts: &[i32],
    weights: &[f32],
    groups: &ExpertGroups,
    device: &Device,
) -> Result<Vec<(i32, f32)>, CollectiveError> {
    // Expert indices are exact in f32, so both go in one tensor.
    let pairs = experts.iter().zip(weights);
    let pairs = pairs.flat_map(|(&expert, &weight)| [expert as f32, weight]);
    let pairs = TensorData::new(pairs.collect::<Vec<_>>(), [experts.len(), 2]);
    let pairs = Tensor::<2>::from_data(pairs, (device, DType::F32));
    let all = tensors::all_gather(pairs, &groups.tp_cp, Lane::InOrder)?.wait();
    let all: Vec<f32> = all.into_data().try_to_vec().expect("the tensor is f32");
    Ok(all
        .chunks_exact(2)
        .map(|pair| (pair[0] as i32, pair[1]))
        .collect())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// The places of the dropped candidates.
    fn dropped(weights: &[f32], takes: usize, policy: DropPolicy) -> Vec<usize> {
        let candidates = weights.iter().enumerate();
        let mut queue: Vec<_> = candidates
            .map(|(place, &weight)| Candidate {
                weight,
                place,
                own: Some(place),
            })
            .collect();
        let mut found: Vec<_> = over_capacity(&mut queue, takes, policy)
            .map(|of| of.place)
            .collect();
        found.sort_unstable();
        found
    }

    #[rstest]
    #[case(&[0.5, 0.9, 0.1, 0.7], 2, DropPolicy::Probs, &[0, 2])]
    #[case(&[0.5, 0.9, 0.1, 0.7], 2, DropPolicy::Position, &[2, 3])]
    #[case(&[0.5, 0.9], 0, DropPolicy::Probs, &[0, 1])]
    #[case(&[0.5, 0.9], 2, DropPolicy::Probs, &[])]
    #[case(&[0.5, 0.9], 3, DropPolicy::Position, &[])]
    #[case(&[0.5; 4], 1, DropPolicy::Probs, &[1, 2, 3])]
    #[case(&[0.0; 3], 2, DropPolicy::Probs, &[2])]
    // Weights that are not nearly equal are ordered by weight.
    #[case(&[0.5, 0.5001, 0.4999], 1, DropPolicy::Probs, &[0, 2])]
    fn an_expert_drops_what_its_policy_says(
        #[case] weights: &[f32],
        #[case] takes: usize,
        #[case] policy: DropPolicy,
        #[case] expected: &[usize],
    ) {
        assert_eq!(dropped(weights, takes, policy), expected);
    }

    #[test]
    fn rounding_does_not_decide_which_of_equal_tokens_are_dropped() {
        let plain = [0.9, 0.25, 0.3, 0.25, 0.25, 0.1, 0.25];
        for takes in 1..plain.len() {
            let expected = dropped(&plain, takes, DropPolicy::Probs);
            for seed in 0u32..200 {
                let noisy = |(at, &weight): (usize, &f32)| {
                    let ulps = (seed.wrapping_mul(2_654_435_761).rotate_left(at as u32) % 9) as f32;
                    weight * (1.0 + (ulps - 4.0) * f32::EPSILON)
                };
                let noisy: Vec<f32> = plain.iter().enumerate().map(noisy).collect();
                assert_eq!(
                    dropped(&noisy, takes, DropPolicy::Probs),
                    expected,
                    "{noisy:?}"
                );
            }
        }
    }
}
