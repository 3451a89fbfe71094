//! The bytes that a rank sends, computed from shapes.
//!
//! Bytes are those of a ring, as NCCL sends large tensors: of a tensor of `S` bytes over `n` ranks,
//! a rank sends `(n - 1) / n S` in an all-gather (`S` after it), a reduce-scatter or an all-to-all
//! (`S` before it), and `2 (n - 1) / n S` in an all-reduce.
//!
//! For a micro-batch with `s` tokens on the rank, `h` features of the residual stream, `k` of keys
//! and `e` bytes per element:
//!
//! | axis | what | forward | backward |
//! |---|---|---|---|
//! | tp, with sp | attention and MLP, each: gathers of `e h s` and reduce-scatters of it | 1 and 1 | 2 and 1 |
//! | tp, with sp | embedding; output matrix | scatter; gather | gather; gather and scatter |
//! | tp | attention and MLP, each: all-reduces of `e h s` | 1 | 1 |
//! | tp | embedding; output matrix | 1; 0 | 0; 1 |
//! | tp | the loss: a gather of four f32 values per token from each rank | 1 | |
//! | cp, `p2p` | `2 k s` elements | `e (n - 1)` | `e (n - 1) + 4 n` |
//! | cp, `all_gather` | `2 k s` elements | `e (n - 1)` | `(e + 4) (n - 1)` |
//! | cp, `a2a` | the queries, keys, values and outputs of the rank's tokens, `(n - 1) / n` of them | `e` | `e` |
//! | ep | the rows that go to other ranks, `e h` each | there and back | there and back |
//! | pp | `e h` for each token of the residual stream, for each stage after (before) | 1 | 1 |
//!
//! In a step, a rank with `P` parameters sends over dp (and cp), with gradients of `g` bytes: `g P`
//! and `e P`, each times `(n - 1) / n`, with `zero` 1; for each micro-batch `g P`, and once `e P`,
//! with 2; for each micro-batch `g P + 2 e P` with 3, where embedding and output matrix are
//! gathered once; twice `g P` with 0. The router's counts, norms of gradients and gradients of
//! norms, which are small, are not counted.

use std::ops::AddAssign;

use megaburn_mesh::Layout;
use megaburn_models::decoder::Experts;
use megaburn_parallel::{ContextComm, Dispatcher};
use serde::Serialize;

use crate::{calibration::COLLECTIVE, rank::Rank};

/// Bytes that a rank sends in a step, by the axis of the mesh over which it sends them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Traffic {
    /// Tensor parallelism.
    pub tp_bytes: f64,
    /// Context parallelism.
    pub cp_bytes: f64,
    /// Expert parallelism, including that inside experts.
    pub ep_bytes: f64,
    /// Gradients and parameters, over the ranks that hold copies of them.
    pub dp_bytes: f64,
    /// Between pipeline stages.
    pub pp_bytes: f64,
}

impl Traffic {
    /// The bytes with the names of their axes.
    pub fn axes(&self) -> [(&'static str, f64); 5] {
        [
            ("tp", self.tp_bytes),
            ("cp", self.cp_bytes),
            ("ep", self.ep_bytes),
            ("dp", self.dp_bytes),
            ("pp", self.pp_bytes),
        ]
    }
}

impl AddAssign for Traffic {
    fn add_assign(&mut self, other: Self) {
        self.tp_bytes += other.tp_bytes;
        self.cp_bytes += other.cp_bytes;
        self.ep_bytes += other.ep_bytes;
        self.dp_bytes += other.dp_bytes;
        self.pp_bytes += other.pp_bytes;
    }
}

/// Bytes that a rank sends in a pass, and the number of collectives.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Sent {
    pub(crate) bytes: f64,
    pub(crate) calls: f64,
}

impl Sent {
    pub(crate) fn new(bytes: f64, calls: f64) -> Self {
        Self { bytes, calls }
    }

    /// Seconds at this bandwidth.
    pub(crate) fn seconds(self, bandwidth: f64) -> f64 {
        self.bytes / bandwidth + self.calls * COLLECTIVE
    }
}

impl AddAssign for Sent {
    fn add_assign(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.calls += other.calls;
    }
}

/// The part of a tensor that a rank of `ranks` sends in an all-gather or a reduce-scatter.
pub(crate) fn others(ranks: usize) -> f64 {
    (ranks - 1) as f64 / ranks as f64
}

/// What a rank sends in forward and in backward.
pub(crate) type BothPasses = [Sent; 2];

impl Rank<'_> {
    /// Over tensor-parallel ranks, in block `index` for a micro-batch.
    pub(crate) fn sent_by_block_over_tp(&self, index: usize) -> BothPasses {
        let Layout { tp, sp, .. } = self.layout;
        if tp == 1 {
            return Default::default();
        }
        let tokens = self.tokens_of(index).on_rank;
        let sizes = self.sizes();
        // What the first matrices of attention read, or the matrices after the latents.
        let read = sizes.latents.map_or(sizes.hidden, |latents| {
            latents.query.unwrap_or(sizes.hidden) + latents.key_value + latents.rotary
        });
        let has_mlp = match self.model.layer_experts(index) {
            Some(experts) => experts.shared_ffn.is_some(),
            None => true,
        };
        let mut halves = vec![read];
        halves.extend(has_mlp.then_some(sizes.hidden));
        halves.extend(self.model.attends_to_encoder(index).then_some(sizes.hidden));
        let part = others(tp);
        let gathered = self.gathered_element(index);
        let mut sent = BothPasses::default();
        for read in halves {
            let of_read = part * tokens * read;
            let of_output = part * tokens * sizes.hidden * self.element;
            if sp {
                let forward = gathered * of_read + of_output;
                let output = gathered * part * tokens * sizes.hidden;
                sent[0] += Sent::new(forward, 2.0);
                sent[1] += Sent::new(output + (gathered + self.element) * of_read, 3.0);
            } else {
                sent[0] += Sent::new(2.0 * of_output, 1.0);
                sent[1] += Sent::new(2.0 * of_read * self.element, 1.0);
            }
        }
        sent
    }

    /// Over tensor-parallel ranks, by the embedding (`first`) or by output matrix and loss.
    pub(crate) fn sent_by_end_over_tp(&self, first: bool) -> BothPasses {
        let Layout { tp, sp, .. } = self.layout;
        if tp == 1 {
            return Default::default();
        }
        let tokens = self.tokens(false).on_rank;
        let stream = others(tp) * tokens * self.sizes().hidden * self.element;
        let loss = Sent::new((tp - 1) as f64 * 4.0 * 4.0 * tokens, 1.0);
        match (first, sp) {
            (true, true) => [Sent::new(stream, 1.0), Sent::new(stream, 1.0)],
            (true, false) => [Sent::new(2.0 * stream, 1.0), Sent::default()],
            (false, true) => {
                let mut forward = Sent::new(stream, 1.0);
                forward += loss;
                [forward, Sent::new(2.0 * stream, 2.0)]
            }
            (false, false) => [loss, Sent::new(2.0 * stream, 1.0)],
        }
    }

    /// Over context-parallel ranks, in block `index` for a micro-batch.
    pub(crate) fn sent_over_cp(&self, index: usize) -> BothPasses {
        let cp = self.context_ranks();
        match self.context_comm(index) {
            _ if cp == 1 => Default::default(),
            ContextComm::P2p => self.sent_in_ring(index, cp),
            ContextComm::AllGather => {
                let [forward, _] = self.sent_in_ring(index, cp);
                let backward = forward.bytes * (self.element + 4.0) / self.element;
                [Sent::new(forward.bytes, 2.0), Sent::new(backward, 4.0)]
            }
            ContextComm::A2a => self.sent_for_heads(index, cp),
            ContextComm::A2aP2p { low } => both(
                self.sent_for_heads(index, low),
                // Each rank of a group has a part of the heads for the tokens of all its ranks.
                self.sent_in_ring(index, cp / low),
            ),
        }
    }

    /// The keys and values of block `index` that pass each of `ranks` ranks.
    pub(crate) fn sent_in_ring(&self, index: usize, ranks: usize) -> BothPasses {
        let sizes = self.sizes();
        let tokens = self.tokens_of(index).on_rank;
        let elements = match sizes.latents {
            Some(_) => tokens * (sizes.query + sizes.values),
            None => tokens * 2.0 * sizes.key_value,
        };
        let others = (ranks - 1) as f64;
        let forward = Sent::new(self.element * others * elements, 2.0 * others);
        let sums = 4.0 * ranks as f64;
        let backward = (self.element * others + sums) * elements;
        [forward, Sent::new(backward, 4.0 * others + 2.0)]
    }

    /// The all-to-alls between `ranks` ranks that exchange tokens of block `index` for heads.
    pub(crate) fn sent_for_heads(&self, index: usize, ranks: usize) -> BothPasses {
        let sizes = self.sizes();
        let tokens = self.tokens_of(index).on_rank;
        let [key, value] = match sizes.latents {
            Some(_) => [sizes.query, sizes.values],
            None => [sizes.key_value; 2],
        };
        let features = sizes.query + key + sizes.values;
        let bytes = others(ranks) * self.element * tokens * (features + value);
        [Sent::new(bytes, 4.0); 2]
    }

    /// Over the ranks that split experts, in block `index` for a micro-batch, if every expert is
    /// equally likely.
    pub(crate) fn sent_over_ep(&self, index: usize) -> BothPasses {
        both(
            self.exchanged_over_ep(index),
            self.gathered_for_experts(index),
        )
    }

    /// The all-to-alls of rows over `ep`, in block `index` for a micro-batch.
    pub(crate) fn exchanged_over_ep(&self, index: usize) -> BothPasses {
        let Layout { ep, etp, .. } = self.layout;
        let Some(experts) = self.model.layer_experts(index).filter(|_| ep > 1) else {
            return Default::default();
        };
        if self.config.moe.dispatcher == Dispatcher::AllGather {
            return Default::default();
        }
        let every = experts.top_k as f64;
        // As the dispatcher decides.
        let limit = if experts.num <= 32 { 0.5 } else { 0.75 };
        let sends_once = etp == 1 && copies(experts.num, experts.top_k, ep) <= limit * every;
        let copies = if sends_once {
            copies_in_groups(experts, ep)
        } else {
            every
        };
        let bytes = copies * others(ep) * self.bytes_of_stream(index);
        [Sent::new(2.0 * bytes, 2.0); 2]
    }

    /// What ranks that hold parts of the same experts gather, and the sums that they scatter, in
    /// block `index` for a micro-batch. With the dispatcher `all_gather`, all ranks that split
    /// experts do.
    pub(crate) fn gathered_for_experts(&self, index: usize) -> BothPasses {
        let Layout { ep, etp, .. } = self.layout;
        let Some(experts) = self.model.layer_experts(index).filter(|_| ep * etp > 1) else {
            return Default::default();
        };
        let bytes = self.bytes_of_stream(index);
        let gathered = match self.config.moe.dispatcher {
            Dispatcher::AllGather => (ep * etp - 1) as f64 * bytes,
            _ if etp == 1 => return Default::default(),
            _ => experts.top_k as f64 * (etp - 1) as f64 * bytes,
        };
        [Sent::new(2.0 * gathered, 2.0); 2]
    }

    /// The bytes of the residual stream that block `index` reads on this rank.
    fn bytes_of_stream(&self, index: usize) -> f64 {
        self.tokens_of(index).of_stream * self.sizes().hidden * self.element
    }

    /// The bytes of the residual stream that a stage sends to the next one for a micro-batch.
    pub(crate) fn sent_between_stages(&self) -> f64 {
        let halves: &[bool] = if self.model.is_encoder_decoder() {
            &[true, false]
        } else {
            &[false]
        };
        let rows = |half: &bool| self.tokens(*half).of_stream;
        let rows: f64 = halves.iter().map(rows).sum();
        rows * self.sizes().hidden * self.element
    }
}

/// The sum of what is sent in each pass.
fn both(mut one: BothPasses, other: BothPasses) -> BothPasses {
    one[0] += other[0];
    one[1] += other[1];
    one
}

/// On how many of `ranks` ranks a token has experts, if all groups and all of their experts are
/// equally likely.
fn copies_in_groups(experts: &Experts, ranks: usize) -> f64 {
    let Experts { num, top_k, .. } = *experts;
    match experts.groups {
        // All experts of a token are on the ranks of its groups.
        Some([groups, kept, _]) if ranks.is_multiple_of(groups) => {
            copies(num / groups * kept, top_k, ranks / groups * kept)
        }
        _ => copies(num, top_k, ranks),
    }
}

/// On how many of `ranks` ranks a token has experts, if all choices of `top_k` of `num` experts are
/// equally likely.
fn copies(num: usize, top_k: usize, ranks: usize) -> f64 {
    let outside = num - num / ranks;
    let none: f64 = (0..top_k)
        .map(|chosen| outside.saturating_sub(chosen) as f64 / (num - chosen) as f64)
        .product();
    ranks as f64 * (1.0 - none)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_has_as_many_copies_as_ranks_with_its_experts() {
        assert_eq!(copies(8, 1, 4), 1.0);
        assert_eq!(copies(8, 8, 4), 4.0);
        // Two experts of eight, on two ranks with four: 1 + 4/7.
        assert!((copies(8, 2, 2) - 11.0 / 7.0).abs() < 1e-12);
    }

    #[test]
    fn a_token_has_copies_only_on_the_ranks_of_its_groups() {
        let mut experts = Experts::new(16, 4, 32);
        experts.groups = Some([8, 2, 2]);
        // All four experts are in two groups of two, each on a rank.
        assert_eq!(copies_in_groups(&experts, 8), 2.0);
        assert_eq!(copies_in_groups(&experts, 16), 4.0);
        // A rank with several groups: any of them may be kept.
        assert_eq!(copies_in_groups(&experts, 4), copies(16, 4, 4));
    }
}
