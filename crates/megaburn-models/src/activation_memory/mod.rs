//! What forward keeps for backward, in bytes, of the model as it is built.
//!
//! Of one block, one micro-batch and one rank, for `n = s b` tokens of which the residual stream of this
//! rank holds `r` (`n / t` with sequence parallelism, else all `n`), in elements of `e` bytes. `a` and `k`
//! are the features of queries and of keys, `f` those inside the MLP, `u` what its up matrix gives (`2 f`
//! gated, else `f`), `hq` and `hkv` the heads.
//!
//! | what | who keeps it | bytes | not with |
//! |---|---|---|---|
//! | residual stream before attention and MLP | the two norms | `2 e h r` | |
//! | its statistics in f32 | the two norms | `8 r`; layer norm `16 r` | |
//! | what the norms give | qkv and up | `2 e h r` | `norm` |
//! | queries, keys, values | attention | `e (a + 2 k) n / t` | |
//! | queries and keys before their norms, and statistics | the norms of heads, where there are such | `e (a + k) n / t + 4 (hq + hkv) n / t` | |
//! | what attention gives | itself and the output matrix | `e a n / t` | |
//! | sums of exponentials | attention | `4 hq n / t` | `core_attention` |
//! | what up gives | the activation | `e u n / t` | `mlp` |
//! | what the activation gives | down | `e f n / t` | `activation`, `mlp` |
//! | the weight put together | qkv, where ranks hold copies of key/value heads | `e h (a + 2 k) / t` | |
//!
//! Where keys and values are made of latents, of `l` features with those that are rotated for all heads and
//! `c` without, and `q` those of queries' latent, in place of what is said of queries, keys and values, with
//! `v` the features of values and `a` for those of attention's result `v` too:
//!
//! | what | who keeps it | bytes | not with |
//! |---|---|---|---|
//! | latents before their norms, and statistics | the norms of latents | `e (l + q) r + 8 r`; without `q` `4 r` less | |
//! | what these norms give | the matrices to heads | `e (c + q) r` | |
//! | queries, keys, values | attention | `e (2 a + v) n / t` | |
//!
//! Where a block has experts, of which a token goes to `k` of `E`, in place of the MLP, the rows of these are
//! `m = k r d`, for `d` ranks that share an expert (`etp`), if all experts are given as many; `f` are then
//! the features inside one:
//!
//! | what | who keeps it | bytes | not with |
//! |---|---|---|---|
//! | what the norm gives | router and shared expert | `e h r` | `mlp` together with `norm` |
//! | scores in f32 | the router | `4 E r` | `mlp` |
//! | its weight in f32, where elements are narrower | the router | `4 h E` | `mlp` |
//! | rows | up | `e h m` | `mlp` |
//! | their weights in f32 | activation and router | `4 m + 4 k r` | `mlp` |
//! | where they come from | those who send them | `32 k r`; where tokens go once to a rank, `12 k r` and as many for each copy that comes | `mlp` |
//! | what up gives | the activation | `e u m / d` | `mlp` |
//! | what the activation gives | down | `e f m / d` | `activation`, `mlp` |
//!
//! and of a shared expert what is said of an MLP. More rows than that come to a rank whose experts are chosen more
//! often than others.
//!
//! Attention [composed](Scores::Kept) of products and a softmax, as on CPUs and in f32, holds no sums but
//! probabilities, `e hq / t` for each pair of positions of a block of it, a second copy of what it gives,
//! and where there are neither rotations nor norms of heads one of queries that share keys. (With dropout of
//! attention it holds what each probability was multiplied with, too, in f32, which is not counted.)
//!
//! Where ranks share sequences, `n` are the tokens that a rank holds; attention across ranks holds sums of
//! exponentials on CPUs too, and where heads are shared out for it (`a2a`) what it gives twice, `e a n / t`
//! more.
//!
//! Where whole blocks are computed once more, all of it is one norm's stream and its statistics,
//! `e h r + 4 r` (layer norm `8 r`), for each group of them, and beside, while backward is in one
//! of the groups, what that one's blocks hold otherwise.
//!
//! Where attention is kept of these, what it gives and its sums of exponentials are held of each block too,
//! `e a n / t + 4 hq n / t`.
//!
//! With offload host memory has the stream before each group and the term that is still to be added to it,
//! and the GPU those of a group that is the model's last, `2 e h r`, and, once for all micro-batches, two that
//! are leaving.
//!
//! The first stage adds the ids of the tokens; the last one a norm like those above, what that gives (not
//! with `norm`), and either the logits, `e V n / t`, or nothing (the loss that goes without all logits),
//! with three f32 and a label a token.
//!
//! A block behind the last layer that predicts further tokens holds what any block does and, before it, the
//! vectors of its tokens, the statistics of their norm and of that of what the depth before ended in, and what
//! both norms give, `3 e h r + 8 r` (layer norm `16 r`), behind it once more what the last stage adds, and ids.
//! What the depth before ended in its head holds; with `norm` that is `e h r` more. Where the block is
//! computed once more, only the vectors and what it ends in are held, `2 e h r`, and what the head holds.
//!
//! Beside it stands the formula of Korthikanti et al. (2022), <https://arxiv.org/abs/2205.05198>, section 4,
//! with the core attention recomputed: `s b h (10 + 24 / t)`, with sequence parallelism `34 s b h / t`
//! bytes a layer, for `a = k = h`, `f = u = 4 h` and `e = 2`. [`ActivationMemory::layer_by_paper_formula`] says the
//! same tensor by tensor, for other sizes too, masks of dropout included (`2 h r`), which models without
//! dropout do not have. It knows neither latents nor experts.

mod paper;
mod terms;
#[cfg(test)]
mod tests;

use std::ops::Range;

use megaburn_mesh::pad_vocab;
use megaburn_parallel::NormKind;

use crate::decoder::{DecoderConfig, Recompute, Segment};
use terms::Sizes;

/// Whether attention holds its scores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scores {
    /// The fused kernels, on GPUs in bf16 or f16.
    #[default]
    Never,
    /// The composed attention, which holds the probabilities.
    Kept,
}

/// A model, and how it is run: what its activations are counted from.
#[derive(Clone, Debug, PartialEq)]
pub struct ActivationMemory {
    /// The model.
    pub model: DecoderConfig,
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// Sequences of a micro-batch.
    pub micro_batch: usize,
    /// Bytes of an element: 2 in bf16 and f16, 4 in f32.
    pub element: usize,
    /// Tensor-parallel ranks.
    pub tp: usize,
    /// Whether they split the sequence too.
    pub sequence_parallel: bool,
    /// Ranks that share each sequence.
    pub cp: usize,
    /// Whether they share heads out for attention.
    pub shares_heads: bool,
    /// Ranks that share an expert.
    pub etp: usize,
    /// What backward computes once more.
    pub recompute: Recompute,
    /// Whether attention holds its scores.
    pub scores: Scores,
    /// Whether the loss goes without all logits.
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

/// Bytes of a statistic, and of an id at most.
const STATISTIC: usize = 4;
const ID: usize = 8;
/// What each rank's vocabulary is padded to a multiple of.
const VOCAB_MULTIPLE: usize = 128;

impl ActivationMemory {
    /// Of bf16 on one rank, with nothing computed once more.
    pub fn new(model: DecoderConfig, seq_len: usize, micro_batch: usize) -> Self {
        Self {
            model,
            seq_len,
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

    /// What a rank of a pipeline stage of these blocks holds when forward has run for `in_flight`
    /// micro-batches whose backward has not.
    pub fn stage(&self, blocks: Range<usize>, ends: StageEnds, in_flight: usize) -> usize {
        let stream = self.stream();
        let held = |Segment { blocks, again }| match (again, self.recompute.offload) {
            (true, true) => self.kept_attention(blocks.len()),
            (true, false) => {
                stream + self.rows() * self.statistics() + self.kept_attention(blocks.len())
            }
            (false, _) => blocks.map(|index| self.layer(index)).sum(),
        };
        let groups = self.segments(blocks.clone()).filter(|group| group.again);
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

    /// What it holds beside that at most, while backward computes some of these blocks once more.
    pub fn again(&self, blocks: Range<usize>) -> usize {
        let mut plain = Self {
            recompute: Recompute::default(),
            ..self.clone()
        };
        if self.recompute.keep_attention {
            // It goes back from the sums of exponentials, on CPUs too.
            plain.scores = Scores::Never;
        }
        let groups = self.segments(blocks).filter(|segment| segment.again);
        let held = groups.map(|group| {
            let kept = self.kept_attention(group.blocks.len());
            group.blocks.map(|index| plain.layer(index)).sum::<usize>() - kept
        });
        // Its stream and last term came from host memory, and those of the group before are coming.
        let stream = self.stream();
        let came = if self.recompute.offload {
            4 * stream
        } else {
            0
        };
        held.max().map_or(0, |held| held + came)
    }

    fn segments(&self, blocks: Range<usize>) -> impl Iterator<Item = Segment> {
        let segments = self.recompute.segments(blocks.len()).into_iter();
        segments.map(move |Segment { blocks: of, again }| {
            let of = blocks.start + of.start..blocks.start + of.end;
            Segment { blocks: of, again }
        })
    }

    /// What a rank holds of block `index` for a micro-batch, if that is not computed once more as a whole.
    pub fn layer(&self, index: usize) -> usize {
        self.layer_terms(index).iter().map(|(_, bytes)| bytes).sum()
    }

    /// What the embedding holds.
    fn first(&self) -> usize {
        ID * self.tokens()
    }

    /// What the last norm, the head and the loss hold.
    fn last(&self) -> usize {
        let normed = if self.recompute.norm {
            0
        } else {
            self.stream()
        };
        self.stream() + self.rows() * self.statistics() + normed + self.head()
    }

    /// What the head and the loss hold beside what the norm gives.
    fn head(&self) -> usize {
        let n = self.tokens();
        let e = self.element;
        let columns = pad_vocab(self.model.vocab, VOCAB_MULTIPLE, self.tp) / self.tp;
        let logits = if self.fused_loss { 0 } else { e * columns * n };
        logits + (3 * STATISTIC + ID) * n
    }

    /// What the blocks that predict further tokens hold, behind so many others of their stage.
    fn mtp(&self, before: usize) -> usize {
        let stream = self.stream();
        let is_again = |depth: usize| self.recompute.is_behind(before + depth);
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

    /// Bytes of a norm's statistics of a token.
    fn statistics(&self) -> usize {
        match self.model.norm {
            NormKind::Rms => STATISTIC,
            NormKind::Layer => 2 * STATISTIC,
        }
    }

    /// The residual stream of a micro-batch.
    fn stream(&self) -> usize {
        self.rows() * self.element * self.model.hidden
    }

    /// Tokens of a micro-batch, and those of them that this rank's residual stream holds.
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
