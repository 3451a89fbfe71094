use megaburn_collective::{Group, ProcessGroups};
use megaburn_kernels::AttentionKernel;
use megaburn_parallel::{ContextComm, ExpertGroups, LinearPrecision, MoeOptions};

use super::Recompute;

/// How the ranks compute and train a model. The options change none of its parameters; its sizes
/// are in [`DecoderConfig`](super::DecoderConfig).
///
/// ```
/// use megaburn_models::decoder::{ModelOptions, Recompute};
///
/// let recompute = Recompute { norm: true, ..Recompute::default() };
/// let options = ModelOptions { sequence_parallel: true, recompute, ..ModelOptions::default() };
/// assert!(!options.fused_linear_cross_entropy);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ModelOptions {
    /// Whether the residual stream between the blocks is sharded along the sequence over the
    /// tensor-parallel group.
    pub sequence_parallel: bool,
    /// How attention exchanges keys and values over the context-parallel ranks: one element for all
    /// layers, or one per layer of the full model.
    pub cp_comm: Vec<ContextComm>,
    /// The implementation of attention.
    pub attention: AttentionKernel,
    /// Dropout in training.
    pub dropout: Dropout,
    /// What the loss adds to the cross-entropy in training.
    pub loss: LossTerms,
    /// Which activations backward recomputes.
    pub recompute: Recompute,
    /// Whether training records the largest attention logit of each head
    /// ([`Attention::take_max_logits`](megaburn_parallel::Attention::take_max_logits)), which
    /// computes the products of queries and keys a second time.
    pub record_max_logits: bool,
    /// How the experts are used.
    pub moe: MoeOptions,
    /// Whether the loss computes logits in chunks and recomputes them in backward
    /// ([`CrossEntropy::forward_linear`](megaburn_parallel::CrossEntropy::forward_linear)), so that
    /// it never holds all of them.
    pub fused_linear_cross_entropy: bool,
    /// Which layers multiply quantised matrices.
    pub precision: Precision,
}

impl Default for ModelOptions {
    fn default() -> Self {
        Self {
            sequence_parallel: false,
            cp_comm: vec![ContextComm::P2p],
            attention: AttentionKernel::Auto,
            dropout: Dropout::default(),
            loss: LossTerms::default(),
            recompute: Recompute::default(),
            record_max_logits: false,
            moe: MoeOptions::default(),
            fused_linear_cross_entropy: false,
            precision: Precision::default(),
        }
    }
}

/// Dropout probabilities in training, in `[0, 1)`. Masks drop the same elements under every layout,
/// and also when backward recomputes them.
///
/// Source: Srivastava et al. (2014); Megatron-LM `--hidden-dropout` and `--attention-dropout`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Dropout {
    /// Dropout on the outputs of embedding, attention and MLP, which are added to the residual
    /// stream.
    pub hidden: f64,
    /// Dropout on the attention probabilities.
    pub attention: f64,
}

/// The precision of the matrix products in attention and MLPs. By default they are computed in the
/// type of the parameters. The products of all other layers always are: output projection, routers,
/// heads, and the projection of multi-token prediction.
///
/// Source: Megatron-LM `megatron/core/fp8_utils.py`, `get_fp8_context`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Precision {
    /// How matrices are quantised; `None` quantises none.
    pub linear: Option<LinearPrecision>,
    /// The number of first layers that are not quantised (Megatron's
    /// `--num-layers-at-start-in-bf16`).
    pub start: usize,
    /// The number of last layers that are not quantised (`--num-layers-at-end-in-bf16`). The blocks of
    /// multi-token prediction do not count as layers; they are quantised.
    pub end: usize,
    /// Whether routed experts are not quantised.
    pub experts_in_bf16: bool,
}

impl Precision {
    /// The precision of block `index` of a model of `layers` layers.
    pub fn of_block(&self, index: usize, layers: usize) -> Option<LinearPrecision> {
        let is_first = index < self.start;
        let is_last = (layers.saturating_sub(self.end)..layers).contains(&index);
        self.linear.filter(|_| !is_first && !is_last)
    }
}

/// What the loss adds to the cross-entropy in training; evaluations report the cross-entropy alone.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LossTerms {
    /// Share of the target's probability that is spread over the other tokens, in `[0, 1)`
    /// (Szegedy et al., 2016; Megatron-LM `megatron/core/tensor_parallel/cross_entropy.py`).
    pub label_smoothing: f64,
    /// Factor of the squared logarithm of the softmax's denominator (Chowdhery et al., "PaLM",
    /// 2022, section 5).
    pub z_loss: f64,
}

/// The groups that split a model.
#[derive(Clone, Debug)]
pub struct ModelGroups {
    /// The groups that split layers.
    pub layers: ExpertGroups,
    /// The context-parallel ranks: each sequence is split over them, so tokens, labels and streams
    /// are those of this rank's [chunks](megaburn_mesh::Zigzag). In generation they split prompts.
    pub cp: Group,
}

/// A tensor-parallel group only: every rank holds all experts unsharded, and full sequences.
impl From<&Group> for ModelGroups {
    fn from(tp: &Group) -> Self {
        Self {
            layers: tp.into(),
            cp: Group::single(tp.seed()),
        }
    }
}

impl From<&ProcessGroups> for ModelGroups {
    fn from(groups: &ProcessGroups) -> Self {
        Self {
            layers: groups.into(),
            cp: groups.cp.clone(),
        }
    }
}
