//! Activation memory: the bytes that the forward pass saves for backward, for the models of this
//! crate.
//!
//! The terms below are for one block, one micro-batch and one rank. The symbols are:
//! - `n = s b`: tokens of the micro-batch on this rank
//! - `r`: tokens of the rank's residual stream: `n / t` with sequence parallelism, else `n`
//! - `t`: tensor-parallel ranks
//! - `e`: bytes per element
//! - `h`: features of the residual stream
//! - `a`, `k`: features of queries and of keys
//! - `hq`, `hkv`: query heads and key/value heads
//! - `f`: features inside the MLP
//! - `u`: output features of the up matrix: `2 f` if gated, else `f`
//! - `V`: token ids of the padded vocabulary
//!
//! A block whose MLP reads what the attention reads saves one state of the residual stream, and one
//! output of the norm if they share it. A model with norms of outputs only has no outputs of norms
//! before attention and MLP, which read the residual stream itself.
//!
//! "Saved for" names the layers whose backward pass needs the tensor. "Unless" names the modules of
//! [`Recompute`] that remove the term.
//!
//! | tensor | saved for | bytes | unless |
//! |---|---|---|---|
//! | residual stream before attention and MLP | the two norms | `2 e h r` | |
//! | statistics of the norms, in f32 | the two norms | `8 r`; layer norm `16 r` | |
//! | outputs of the norms | qkv and up | `2 e h r` | `norm` |
//! | inputs of norms of outputs, if the model has them | these norms | `2 e h r` | |
//! | queries, keys, values | attention | `e (a + 2 k) n / t` | |
//! | queries and keys before their norms, and statistics | the norms of heads, if the model has them | `e (a + k) n / t + 4 (hq + hkv) n / t` | |
//! | output of attention | attention and the output matrix | `e a n / t` | |
//! | LSE | attention | `4 hq n / t` | `core_attention` |
//! | output of up | the activation | `e u n / t` | `mlp` |
//! | output of the activation | down | `e f n / t` | `activation`, `mlp` |
//! | the assembled qkv weight | qkv, if ranks hold copies of key/value heads | `e h (a + 2 k) / t` | |
//!
//! # Latent attention
//!
//! With latent attention, the rows of queries, keys and values are replaced by the following, and
//! `a` in the output of attention by `v`. Here `l` is the size of the key/value latent including
//! the rotated features that all heads share, `c` its size without them, `q` the size of the query
//! latent, and `v` the features of values.
//!
//! | tensor | saved for | bytes | unless |
//! |---|---|---|---|
//! | latents before their norms, and statistics | the norms of latents | `e (l + q) r + 8 r`; without `q` `4 r` less | |
//! | outputs of these norms | the up-projections | `e (c + q) r` | |
//! | queries, keys, values | attention | `e (2 a + v) n / t` | |
//!
//! # Experts
//!
//! If a block has experts in place of the MLP, each token goes to `k` of `E` experts. If all
//! experts receive equally many tokens, a rank has `m = k r d` rows, with `d` ranks that share an
//! expert (`etp`); `f` is the features inside one expert.
//!
//! | tensor | saved for | bytes | unless |
//! |---|---|---|---|
//! | output of the norm | router and shared expert | `e h r` | `mlp` together with `norm` |
//! | scores in f32 | the router | `4 E r` | `mlp` |
//! | the router's weight in f32, if elements are narrower | the router | `4 h E` | `mlp` |
//! | rows | up | `e h m` | `mlp` |
//! | routing weights of the rows, in f32 | activation and router | `4 m + 4 k r` | `mlp` |
//! | source indices of the rows | dispatch and combine | `32 k r`; with deduplicated all-to-all `12 k r`, plus as many for each copy that arrives | `mlp` |
//! | output of up | the activation | `e u m / d` | `mlp` |
//! | output of the activation | down | `e f m / d` | `activation`, `mlp` |
//!
//! A shared expert adds the terms of an MLP. A rank whose experts are chosen more often than others
//! receives more than `m` rows.
//!
//! # Fallback attention and context parallelism
//!
//! Attention that is [composed](Scores::Kept) of matrix products and a softmax (on CPUs and in f32)
//! saves, in place of the LSE:
//! - the probabilities, `e hq / t` for each pair of positions of a block of scores
//! - a second copy of its output
//! - for grouped-query attention without rotations and norms of heads, a copy of the queries
//! - with attention dropout, the dropout factors in f32, which are not counted here
//!
//! With context parallelism, `n` is the number of tokens that a rank holds. Attention over several
//! ranks saves the LSE on CPUs too. With `a2a`, its output is saved twice: `e a n / t` more.
//!
//! # Full recompute
//!
//! With full recompute, a group of blocks saves only the input of its first norm and the
//! statistics, `e h r + 4 r` (layer norm `8 r`). While backward is in one of the groups, the rank
//! additionally holds what the blocks of that group save without recompute. With selective save,
//! the output and LSE of each recomputed block's attention are saved too, `e a n / t + 4 hq n / t`.
//!
//! With activation offload, host memory holds the residual stream before each group, and the last
//! term, which is not added to it yet. The GPU holds these two tensors, `2 e h r`, only for the
//! model's last group, and, once for all micro-batches, for the copy to the host in flight.
//!
//! # First and last stage, multi-token prediction
//!
//! The first stage adds the token ids. The last stage adds:
//! - a norm like those above, and its output (unless `norm`)
//! - the logits, `e V n / t`, twice with a soft cap; nothing with the fused linear cross-entropy
//! - three f32 values and a label per token
//! - in a masked language model, the input of the activation of its head, and input, output and
//!   statistics of the norm, `3 e h r + 4 r` (layer norm `8 r`)
//!
//! A norm of the residual stream after attention and MLP counts as a norm of outputs; the last
//! stage then has no norm of its own. A norm of the embeddings adds its input and statistics.
//!
//! A block of multi-token prediction saves the terms of any block and, before it, the embeddings of
//! its tokens, the statistics of two norms (of the embeddings and of the output of the depth
//! before) and the outputs of both, `3 e h r + 8 r` (layer norm `16 r`). After the block it adds
//! the terms of the last stage, and token ids. The output of the depth before is already saved for
//! that depth's head; with `norm` it adds `e h r`. If the block is recomputed, only the embeddings,
//! the output of the block, `2 e h r`, and the terms of the head are saved.
//!
//! # Encoder and decoder
//!
//! In an encoder-decoder model, a block counts the tokens of its half. A block of the decoder adds
//! the terms of cross attention, with `m` tokens of the encoder and the sizes of the decoder:
//!
//! | tensor | saved for | bytes | unless |
//! |---|---|---|---|
//! | residual stream before cross attention, statistics | its norm | `e h r + 4 r`; layer norm `8 r` | |
//! | output of the norm | queries | `e h r` | `norm` |
//! | queries, keys and values | cross attention | `e a n / t + 2 e k m / t` | |
//! | output of cross attention, LSE | cross attention and the output matrix | `e a n / t + 4 hq n / t` | |
//!
//! A stage with blocks of the decoder saves the output of the encoder once, which all of them read,
//! and the stage with the last block of the encoder the input of the norm after it.
//!
//! # The paper's formula
//!
//! For comparison, [`ActivationMemory::layer_by_paper_formula`] is the formula of Korthikanti et
//! al. (2022), <https://arxiv.org/abs/2205.05198>, section 4, with the core attention recomputed:
//! `s b h (10 + 24 / t)`, with sequence parallelism `34 s b h / t` bytes per layer, for
//! `a = k = h`, `f = u = 4 h` and `e = 2`. The function applies the formula tensor by tensor, so
//! that it holds for other sizes too. It includes dropout masks (`2 h r`), which models without
//! dropout do not have. It covers neither latent attention nor experts.

mod halves;
mod paper;
mod terms;
#[cfg(test)]
mod tests;

use std::ops::Range;

use megaburn_mesh::pad_vocab;
use megaburn_parallel::NormKind;

use crate::decoder::{DecoderConfig, Recompute, Segment};

/// Whether attention saves its scores for backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scores {
    /// Fused kernels, on GPUs in bf16 or f16, which never save scores.
    #[default]
    Never,
    /// Composed attention, which saves the probabilities.
    Kept,
}

/// A model and the settings of its run that determine the activation memory.
#[derive(Clone, Debug, PartialEq)]
pub struct ActivationMemory {
    /// The model.
    pub model: DecoderConfig,
    /// Tokens per sequence; in an encoder-decoder model, those of the encoder.
    pub seq_len: usize,
    /// Tokens of the decoder per sequence in an encoder-decoder model; else not used.
    pub decoder_seq_len: usize,
    /// Sequences per micro-batch.
    pub micro_batch: usize,
    /// Bytes per element: 2 in bf16 and f16, 4 in f32.
    pub element: usize,
    /// Number of tensor-parallel ranks.
    pub tp: usize,
    /// Whether sequence parallelism is on.
    pub sequence_parallel: bool,
    /// Number of context-parallel ranks.
    pub cp: usize,
    /// Whether context parallelism exchanges heads for sequence (`a2a`).
    pub shares_heads: bool,
    /// Number of expert-tensor-parallel ranks, which share an expert.
    pub etp: usize,
    /// Which activations backward recomputes.
    pub recompute: Recompute,
    /// Whether attention saves its scores.
    pub scores: Scores,
    /// Whether the loss is a fused linear cross-entropy, which never holds all logits.
    pub fused_loss: bool,
}

/// Which ends of the model a pipeline stage has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageEnds {
    /// The embedding.
    pub first: bool,
    /// The head and the loss.
    pub last: bool,
}

/// Bytes of a statistic; bytes of an id (upper bound).
const STATISTIC: usize = 4;
const ID: usize = 8;
/// The vocabulary of each rank is padded to a multiple of this number.
const VOCAB_MULTIPLE: usize = 128;

impl ActivationMemory {
    /// A model in bf16 on one rank, without recompute.
    pub fn new(model: DecoderConfig, seq_len: usize, micro_batch: usize) -> Self {
        Self {
            model,
            seq_len,
            decoder_seq_len: seq_len,
            micro_batch,
            element: 2,
            tp: 1,
            sequence_parallel: false,
            cp: 1,
            shares_heads: false,
            etp: 1,
            recompute: Recompute::default(),
            scores: Scores::Never,
            fused_loss: false,
        }
    }

    /// Bytes that a rank of a pipeline stage with these `blocks` holds, after the forward pass of
    /// `in_flight` micro-batches whose backward pass has not run.
    pub fn stage(&self, blocks: Range<usize>, ends: StageEnds, in_flight: usize) -> usize {
        if self.model.is_encoder_decoder() {
            return self.stage_of_halves(blocks, ends, in_flight);
        }
        let stream = self.stream();
        let held = |Segment { blocks, recomputed }| match (recomputed, self.recompute.offload) {
            (true, true) => self.kept_attention(blocks.len()),
            (true, false) => {
                stream + self.rows() * self.statistics() + self.kept_attention(blocks.len())
            }
            (false, _) => blocks.map(|index| self.layer(index)).sum(),
        };
        let segments = self.segments(blocks.clone());
        let groups = segments.filter(|segment| segment.recomputed);
        let (leave, stay): (Vec<_>, Vec<_>) = if self.recompute.offload {
            groups.partition(|group| group.blocks.end < blocks.end || !ends.last)
        } else {
            Default::default()
        };
        let has_stayed = 2 * stream * stay.len();
        let leaving = if leave.is_empty() { 0 } else { 2 * stream };
        let num_blocks = blocks.len();
        let blocks = self.segments(blocks).map(held).sum::<usize>() + has_stayed;
        let first = if ends.first { self.first() } else { 0 };
        let last = if ends.last {
            self.last() + self.mtp(num_blocks)
        } else {
            0
        };
        in_flight * (blocks + first + last) + leaving
    }

    /// The most bytes that a rank holds in addition to [`Self::stage`] while backward recomputes
    /// some of these blocks.
    pub fn again(&self, blocks: Range<usize>) -> usize {
        let mut plain = Self {
            recompute: Recompute::default(),
            ..self.clone()
        };
        if self.recompute.keep_attention {
            // With selective save, backward of attention starts from the saved LSE, on CPUs too.
            plain.scores = Scores::Never;
        }
        let groups = self.segments(blocks).filter(|segment| segment.recomputed);
        let held = groups.map(|group| {
            let kept = self
                .half_of(group.blocks.start)
                .kept_attention(group.blocks.len());
            group.blocks.map(|index| plain.layer(index)).sum::<usize>() - kept
        });
        // The stream and the last term of this group are back from host memory, and those of the
        // group before are being prefetched.
        let stream = self.stream();
        let came = if self.recompute.offload {
            4 * stream
        } else {
            0
        };
        held.max().map_or(0, |held| held + came)
    }

    fn segments(&self, blocks: Range<usize>) -> impl Iterator<Item = Segment> {
        self.recompute.segments_of(&self.model, &blocks).into_iter()
    }

    /// Bytes that a rank saves of block `index` for a micro-batch, if the block is not recomputed
    /// in full.
    pub fn layer(&self, index: usize) -> usize {
        self.layer_terms(index).iter().map(|(_, bytes)| bytes).sum()
    }

    /// Bytes that the embedding saves.
    fn first(&self) -> usize {
        let lists = 1 + usize::from(self.model.token_types > 0);
        let norm = if self.model.embedding_norm {
            self.stream() + self.rows() * self.statistics()
        } else {
            0
        };
        lists * ID * self.tokens() + norm
    }

    /// Bytes that the last norm, the head and the loss save.
    fn last(&self) -> usize {
        if !self.model.norm_placement.has_last_norm() {
            return self.stream() + self.head();
        }
        let normed = if self.recompute.norm {
            0
        } else {
            self.stream()
        };
        self.stream() + self.rows() * self.statistics() + normed + self.head()
    }

    /// Bytes that the head and the loss save, without the output of the norm.
    fn head(&self) -> usize {
        let n = self.tokens();
        let e = self.element;
        let columns = pad_vocab(self.model.vocab, VOCAB_MULTIPLE, self.tp) / self.tp;
        // A soft cap keeps its result, in addition to the capped logits.
        let copies = if self.model.logits_soft_cap.is_some() {
            2
        } else {
            1
        };
        let logits = if self.fused_loss {
            0
        } else {
            copies * e * columns * n
        };
        // The input of the activation, and the input and the output of the norm.
        let before = if self.model.masked_head {
            3 * self.stream() + self.rows() * self.statistics()
        } else {
            0
        };
        before + logits + (3 * STATISTIC + ID) * n
    }

    /// Bytes that the blocks of multi-token prediction save, after `before` other blocks in their
    /// stage.
    fn mtp(&self, before: usize) -> usize {
        let stream = self.stream();
        let is_again = |depth: usize| self.recompute.recomputes_mtp(before + depth);
        let of_depth = |depth: usize| {
            let is_kept = !self.recompute.norm || (depth > 0 && is_again(depth - 1));
            let ended_in = if is_kept { 0 } else { stream };
            let held = if is_again(depth) {
                2 * stream + self.kept_attention(1) + self.head()
            } else {
                let joined = 3 * stream + 2 * self.statistics() * self.rows();
                joined + self.layer(self.model.layers + depth) + self.last()
            };
            self.first() + ended_in + held
        };
        (0..self.model.mtp_layers).map(of_depth).sum()
    }

    /// Bytes of a norm's statistics per token.
    fn statistics(&self) -> usize {
        match self.model.norm {
            NormKind::Rms => STATISTIC,
            NormKind::Layer => 2 * STATISTIC,
        }
    }

    /// Bytes of the residual stream of a micro-batch.
    fn stream(&self) -> usize {
        self.rows() * self.element * self.model.hidden
    }

    /// Tokens of a micro-batch on this rank. [`Self::rows`] is the number of tokens in its residual
    /// stream.
    fn tokens(&self) -> usize {
        self.seq_len / self.cp * self.micro_batch
    }

    fn rows(&self) -> usize {
        if self.sequence_parallel {
            self.tokens() / self.tp
        } else {
            self.tokens()
        }
    }
}
