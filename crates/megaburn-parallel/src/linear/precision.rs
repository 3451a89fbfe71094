//! The precision of a linear layer's products, and which ranks share the scales of its matrices.

use burn::config::Config;
use megaburn_collective::{Group, region::max_over};
use megaburn_kernels::{AmaxReduction, QuantizationRecipe, Scaling, WeightSpan};
use megaburn_mesh::{FusedPart, Zigzag};

use super::{rounding::CurrentTokens, split::Split};

/// How linear layers quantise the matrices of their products.
///
/// All ranks that hold parts of a matrix derive its scale from the largest magnitude of the whole
/// matrix, so that every layout computes the numbers of one rank. Ranks with other samples
/// (data parallelism) do not share scales.
///
/// Source: Transformer Engine, `Float8CurrentScaling`, `DelayedScaling`, `Float8BlockScaling`,
/// `MXFP8BlockScaling` and `NVFP4BlockScaling`; Megatron-LM `megatron/core/fp8_utils.py` and
/// `fp4_utils.py`.
#[derive(Config, Debug, Copy, PartialEq)]
pub struct LinearPrecision {
    /// The formats, and which elements share a scale.
    pub recipe: QuantizationRecipe,
    /// Whether scales follow the largest magnitudes of the steps before
    /// ([`DelayedAmax`](megaburn_kernels::DelayedAmax)), which the trainer keeps.
    #[config(default = false)]
    pub delayed: bool,
    /// Whether a layer with sequence parallelism gathers shards of tokens in FP8 where the recipe has
    /// one scale per matrix, instead of quantising what was gathered. The numbers are the same.
    #[config(default = true)]
    pub fp8_sequence_gather: bool,
}

/// What the quantised layers of a model share on a rank.
#[derive(Clone, Debug)]
pub struct PrecisionScope {
    /// The ranks that work on the same sequences: they share the scales of tokens.
    pub tokens: Group,
    /// Says when no weight changes, so that each is quantised only once.
    pub weights: WeightSpan,
    /// Says which micro-batch the layers see.
    pub current: CurrentTokens,
    /// This rank's chunks of each sequence.
    pub context: Zigzag,
}

impl PrecisionScope {
    /// The scope of a model whose sequences are split over `tokens`, of which this rank holds the
    /// chunks of `context`.
    pub fn new(tokens: Group, context: Zigzag) -> Self {
        Self {
            tokens,
            weights: WeightSpan::default(),
            current: CurrentTokens::default(),
            context,
        }
    }
}

/// How the largest magnitudes of a layer's matrices are reduced over the ranks that hold parts of
/// them.
#[derive(Clone, Debug)]
pub(crate) struct AmaxReductions {
    pub(super) input: Option<AmaxReduction>,
    pub(super) weight: Option<AmaxReduction>,
    pub(super) gradient: Option<AmaxReduction>,
    /// That of a matrix of which each rank of the layer has a shard of the tokens, before these are
    /// gathered.
    pub(super) shards: Option<AmaxReduction>,
}

impl AmaxReductions {
    /// Those of a layer whose weight is split over `tp`. Sequences are split over the other
    /// ranks of `tp_cp`, if it has any.
    ///
    /// A column split has the whole input and its own features of the gradient; a row split has its
    /// own features of the input and the whole gradient.
    pub(super) fn of_split(split: Split, tp: &Group, tp_cp: &Group) -> Self {
        let of_tokens = (tp_cp.size() > tp.size()).then(|| over(tp_cp)).flatten();
        Self::of_features(split, tp, of_tokens)
    }

    /// Those of a layer whose weight is split over a group, and whose tokens are on other ranks too
    /// if `of_tokens` reduces over them.
    pub(crate) fn of_features(
        split: Split,
        group: &Group,
        of_tokens: Option<AmaxReduction>,
    ) -> Self {
        let of_both = of_tokens.clone().or_else(|| over(group));
        let (input, gradient) = match split {
            Split::Column => (of_tokens, of_both.clone()),
            Split::Row => (of_both.clone(), of_tokens),
        };
        Self {
            input,
            weight: over(group),
            gradient,
            shards: of_both,
        }
    }

    /// Those of a layer whose weight every rank holds, and whose tokens are split over a group.
    pub(super) fn of_tokens(tokens: Option<&Group>) -> Self {
        let of_tokens = tokens.and_then(over);
        Self {
            input: of_tokens.clone(),
            weight: None,
            gradient: of_tokens,
            shards: None,
        }
    }
}

/// The reduction over a group of more than one.
fn over(group: &Group) -> Option<AmaxReduction> {
    let group = Some(group.clone()).filter(|group| group.size() > 1)?;
    Some(AmaxReduction::new(move |amax| max_over(amax, &group)))
}

impl LinearPrecision {
    /// Whether shards of tokens are gathered as quantised elements.
    pub(super) fn gathers_quantized(&self) -> bool {
        self.fp8_sequence_gather && self.recipe.scaling == Scaling::Tensor
    }

    /// Why a dimension of these parts cannot be split over `ranks` without cutting a block of
    /// elements that share a scale.
    pub(super) fn refusal(
        &self,
        parts: &[FusedPart],
        ranks: usize,
        features: &str,
    ) -> Option<String> {
        let block = self.recipe.block_len().filter(|_| ranks > 1)?;
        let of_rank = |part: &FusedPart| (part.units / ranks).max(1) * part.unit;
        let cut = parts
            .iter()
            .find(|part| !of_rank(part).is_multiple_of(block))?;
        let (own, all) = (of_rank(cut), cut.size());
        let step = block * ranks;
        Some(format!(
            "blocks of {block} {features} features share a scale, and {ranks} ranks would cut them: \
            each has {own} of {all} features; use sizes that are multiples of {step}, fewer \
            tensor-parallel ranks, or a recipe with one scale per tensor"
        ))
    }
}
