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
        if cp == 1 {
            return Default::default();
        }
        let sizes = self.sizes();
        let tokens = self.tokens_of(index).on_rank;
        let ring = |ranks: usize, tokens: f64| {
            let elements = match sizes.latents {
                Some(_) => tokens * (sizes.query + sizes.values),
                None => tokens * 2.0 * sizes.key_value,
            };
            let others = (ranks - 1) as f64;
            let forward = Sent::new(self.element * others * elements, 2.0 * others);
            let sums = 4.0 * ranks as f64;
            let backward = (self.element * others + sums) * elements;
            [forward, Sent::new(backward, 4.0 * others + 2.0)]
        };
        let exchange = |ranks: usize| {
            let key_value = if sizes.latents.is_some() {
                sizes.query
            } else {
                sizes.key_value
            };
            let features = sizes.query + key_value + sizes.values;
            let values = if sizes.latents.is_some() {
                sizes.values
            } else {
                sizes.key_value
            };
            let bytes = others(ranks) * self.element * tokens * (features + values);
            [Sent::new(bytes, 4.0), Sent::new(bytes, 4.0)]
        };
        match self.context_comm(index) {
            ContextComm::P2p => ring(cp, tokens),
            ContextComm::AllGather => {
                let [forward, _] = ring(cp, tokens);
                let backward = forward.bytes * (self.element + 4.0) / self.element;
                [Sent::new(forward.bytes, 2.0), Sent::new(backward, 4.0)]
            }
            ContextComm::A2a => exchange(cp),
            ContextComm::A2aP2p { low } => {
                let [mut forward, mut backward] = exchange(low);
                // Each rank of a group has a part of the heads for the tokens of all its ranks.
                let [ring_forward, ring_backward] = ring(cp / low, tokens);
                forward += ring_forward;
                backward += ring_backward;
                [forward, backward]
            }
        }
    }

    /// Over the ranks that split experts, in block `index` for a micro-batch, if every expert is
    /// equally likely.
    pub(crate) fn sent_over_ep(&self, index: usize) -> BothPasses {
        let Layout { ep, etp, .. } = self.layout;
        let Some(experts) = self.model.layer_experts(index).filter(|_| ep * etp > 1) else {
            return Default::default();
        };
        let rows = self.tokens_of(index).of_stream;
        let bytes = rows * self.sizes().hidden * self.element;
        if self.config.moe.dispatcher == Dispatcher::AllGather {
            let all = (ep * etp - 1) as f64 * bytes;
            return [Sent::new(2.0 * all, 2.0), Sent::new(2.0 * all, 2.0)];
        }
        let copies = copies(experts.num, experts.top_k, ep);
        let every = experts.top_k as f64;
        // As the dispatcher decides.
        let limit = if experts.num <= 32 { 0.5 } else { 0.75 };
        let sends_once = etp == 1 && copies <= limit * every;
        let sent = if sends_once { copies } else { every } * others(ep) * bytes;
        // Ranks that share experts gather the rows, and scatter the sums.
        let shared = every * (etp - 1) as f64 * bytes;
        let pass = Sent::new(2.0 * (sent + shared), if etp > 1 { 4.0 } else { 2.0 });
        [pass, pass]
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
}
