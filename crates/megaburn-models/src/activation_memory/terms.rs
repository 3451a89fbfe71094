//! The activation memory of a block, term by term.

use megaburn_kernels::AttentionOptions;
use megaburn_parallel::{ALIBI_FEATURES, QkNormKind};

use super::{ActivationMemory, ID, STATISTIC, Scores};
use crate::decoder::{BlockOrder, DecoderConfig, Experts, Mla, Recompute};

/// The name and the bytes of a term.
pub(super) type Term = (&'static str, usize);

/// Features and heads of one rank.
pub(super) struct Sizes {
    pub(super) query: usize,
    pub(super) key_value: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) ffn: usize,
    pub(super) up: usize,
}

/// The norms of a block.
struct Norms {
    /// Norms before attention and MLP.
    inputs: usize,
    /// Norms of their outputs.
    outputs: usize,
    /// States of the residual stream that are saved, by the norms or by what reads the stream.
    streams: usize,
}

impl Norms {
    fn of(model: &DecoderConfig) -> Self {
        let placement = model.norm_placement;
        let inputs = match model.block_order {
            _ if !placement.has_input_norms() => 0,
            BlockOrder::ParallelSharedNorm => 1,
            BlockOrder::Serial | BlockOrder::Parallel => 2,
        };
        Self {
            inputs,
            outputs: if placement.has_output_norms() { 2 } else { 0 },
            streams: if model.block_order == BlockOrder::Serial {
                2
            } else {
                1
            },
        }
    }
}

impl ActivationMemory {
    /// The terms of [`Self::layer`]: name and bytes of each tensor that a rank saves of block
    /// `index`.
    pub fn layer_terms(&self, index: usize) -> Vec<Term> {
        let mut terms = self.half_of(index).own_terms(index);
        terms.extend(self.of_cross_attention(index));
        terms
    }

    /// The terms of self-attention and the MLP or experts.
    fn own_terms(&self, index: usize) -> Vec<Term> {
        let r = self.rows();
        let e = self.element;
        let hidden = self.model.hidden;
        let norms = Norms::of(&self.model);
        let mut terms = vec![
            (
                "residual stream before attention and MLP",
                norms.streams * e * hidden * r,
            ),
            (
                "statistics of the norms",
                (norms.inputs + norms.outputs) * self.statistics() * r,
            ),
            ("output of the norms", self.normed(index, norms.inputs)),
            (
                "input of the norms of outputs",
                norms.outputs * e * hidden * r,
            ),
        ];
        terms.extend(match &self.model.latent {
            Some(latent) => self.of_latent_attention(latent, index),
            None => self.of_attention(index),
        });
        if self.recompute.mlp {
            return terms;
        }
        terms.extend(match self.model.layer_experts(index) {
            Some(experts) => self.of_experts(experts),
            None => self.of_mlp(self.tokens(), self.model.ffn / self.tp),
        });
        terms
    }

    /// Bytes of the saved outputs of the norms before attention and MLP. Experts read their input in
    /// several places and do not recompute the norm.
    fn normed(&self, index: usize, norms: usize) -> usize {
        let one = self.element * self.model.hidden * self.rows();
        let Recompute { norm, mlp, .. } = self.recompute;
        let has_experts = self.model.layer_experts(index).is_some();
        match (norm, has_experts && !mlp) {
            (false, _) => norms * one,
            (true, true) => one.min(norms * one),
            (true, false) => 0,
        }
    }

    fn of_attention(&self, index: usize) -> Vec<Term> {
        let n = self.tokens();
        let e = self.element;
        let sizes = self.sizes();
        let Sizes {
            query,
            key_value,
            heads,
            kv_heads,
            ..
        } = sizes;
        let DecoderConfig {
            hidden, qk_norm, ..
        } = self.model;
        let qkv = query + 2 * key_value;
        let is_rotary = self.model.positions.rotary().is_some();
        let has_alibi = self.model.positions.alibi().is_some();
        let alone = is_rotary || has_alibi || qk_norm.is_some();
        // Features that ALiBi adds to heads.
        let wider = if has_alibi {
            e * ALIBI_FEATURES * (heads + kv_heads)
        } else {
            0
        };
        let before_norms = match qk_norm {
            None => 0,
            Some(QkNormKind::Head | QkNormKind::L2) => {
                e * (query + key_value) + STATISTIC * (heads + kv_heads)
            }
            Some(QkNormKind::Width) if self.tp == 1 => e * (query + key_value) + 2 * STATISTIC,
            // Composed over ranks: the values in f32, before and after they are divided.
            Some(QkNormKind::Width) => STATISTIC * (2 * (query + key_value) + 2),
        };
        // Composed attention copies queries that share keys into one tensor. If queries, keys and
        // values are still views of the qkv tensor, this copy is an additional tensor.
        let is_composed = self.is_fallback() && !self.recompute.core_attention;
        let is_grouped = is_composed && heads > kv_heads;
        let copied = if is_grouped && !alone { e * query } else { 0 };
        let copies = self.model.kv_heads < self.tp;
        let mut terms = vec![
            ("queries, keys and values", (e * qkv + copied + wider) * n),
            ("queries and keys before their norms", before_norms * n),
            (
                "assembled qkv weight",
                if copies { e * hidden * qkv } else { 0 },
            ),
        ];
        terms.extend(self.of_core(index, heads, query));
        terms
    }

    /// Terms of latent attention: the latents of the tokens of this rank's stream, and the queries,
    /// keys and values of this rank's heads.
    fn of_latent_attention(&self, latent: &Mla, index: usize) -> Vec<Term> {
        let n = self.tokens();
        let r = self.rows();
        let e = self.element;
        let Sizes { query, heads, .. } = self.sizes();
        let values = heads * latent.v_head_dim;
        let of_queries = latent
            .q_lora_rank
            .map_or(0, |rank| 2 * e * rank + STATISTIC);
        let of_keys = e * (2 * latent.kv_lora_rank + latent.qk_rope_head_dim) + STATISTIC;
        let mut terms = vec![
            ("queries, keys and values", e * (2 * query + values) * n),
            (
                "latents before and after their norms",
                (of_queries + of_keys) * r,
            ),
        ];
        terms.extend(self.of_core(index, heads, values));
        terms
    }

    /// Terms of the core attention, whose output has `given` features.
    fn of_core(&self, index: usize, heads: usize, given: usize) -> [Term; 2] {
        let n = self.tokens();
        let e = self.element;
        let in_heads = if self.shares_heads { e * given * n } else { 0 };
        // Composed attention saves its output by head, and the matrix after it by position.
        let by_head = e * given * n;
        let (again, of_scores) = match self.is_fallback() {
            _ if self.recompute.core_attention => (0, 0),
            false => (in_heads, STATISTIC * heads * n),
            // With a soft cap, the slopes of the capped scores are saved too.
            true if self.model.attention_soft_cap.is_some() => {
                (by_head, 2 * e * heads * self.pairs(index))
            }
            true => (by_head, e * heads * self.pairs(index)),
        };
        [
            ("output of attention", e * given * n + again),
            ("attention scores", of_scores),
        ]
    }

    /// Bytes of the saved attention outputs of `num_blocks` recomputed blocks (selective save).
    pub(super) fn kept_attention(&self, num_blocks: usize) -> usize {
        let Sizes { query, heads, .. } = self.sizes();
        let given = self
            .model
            .latent
            .as_ref()
            .map_or(query, |latent| heads * latent.v_head_dim);
        let of_block = (self.element * given + STATISTIC * heads) * self.tokens();
        if self.recompute.keep_attention {
            num_blocks * of_block
        } else {
            0
        }
    }

    /// Terms of an MLP with `ffn` features on this rank, for `tokens` tokens.
    fn of_mlp(&self, tokens: usize, ffn: usize) -> Vec<Term> {
        let up = if self.model.activation.is_gated() {
            2 * ffn
        } else {
            ffn
        };
        let activated = if self.recompute.activation { 0 } else { ffn };
        vec![
            ("output of up", self.element * up * tokens),
            (
                "output of the activation",
                self.element * activated * tokens,
            ),
        ]
    }

    /// Terms of experts that all receive equally many tokens.
    fn of_experts(&self, experts: &Experts) -> Vec<Term> {
        let r = self.rows();
        let e = self.element;
        let hidden = self.model.hidden;
        let slots = experts.top_k * r;
        // All ranks that share an expert read its rows.
        let rows = self.etp * slots;
        let weight = if e < STATISTIC {
            STATISTIC * hidden * experts.num
        } else {
            0
        };
        let mut terms = vec![
            ("router scores", STATISTIC * experts.num * r),
            ("router weight in f32", weight),
            ("permuted rows of experts", e * hidden * rows),
            ("weights of these rows", STATISTIC * (rows + slots)),
            ("indices of these rows", 4 * ID * slots),
        ];
        terms.extend(self.of_mlp(rows, experts.ffn / self.etp));
        if let Some(ffn) = experts.shared_ffn {
            terms.extend(self.of_mlp(self.tokens(), ffn / self.tp));
        }
        if self.model.mlp_bias {
            terms.push(("biases of these rows", STATISTIC * hidden * rows));
        }
        if experts.shared_gate {
            terms.extend([
                ("output of the shared expert", e * hidden * r),
                ("gate of the shared expert", 2 * e * r),
            ]);
        }
        terms
    }

    fn is_fallback(&self) -> bool {
        self.scores == Scores::Kept && self.cp == 1
    }

    /// Pairs of positions whose probabilities a head of the composed attention saves.
    fn pairs(&self, index: usize) -> usize {
        let window = self.model.layer_window(index);
        let options = AttentionOptions {
            window,
            causal: !self.model.sees_later(index),
            ..AttentionOptions::default()
        };
        self.micro_batch * options.fallback_pairs(self.seq_len)
    }

    /// The features and heads of this rank.
    pub(super) fn sizes(&self) -> Sizes {
        let DecoderConfig {
            heads,
            kv_heads,
            head_dim,
            ffn,
            activation,
            ..
        } = self.model;
        let heads = heads / self.tp;
        let kv_heads = (kv_heads / self.tp).max(1);
        let ffn = ffn / self.tp;
        let up = if activation.is_gated() { 2 * ffn } else { ffn };
        Sizes {
            query: heads * head_dim,
            key_value: kv_heads * head_dim,
            heads,
            kv_heads,
            ffn,
            up,
        }
    }
}
