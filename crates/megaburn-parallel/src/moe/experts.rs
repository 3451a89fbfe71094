use burn::{module::Module, tensor::Tensor};
use megaburn_autograd::{OverlappedWgrads, RecomputeFn};
use megaburn_collective::{Group, region::max_over};
use megaburn_kernels::{
    AmaxReduction, GroupWeight, GroupedGemmChoice, GroupedOptions, LinearQuantization,
    grouped_linear,
};

use super::{ExpertGroups, expert_biases::ExpertBiases};
use crate::{
    linear::{ParallelLinear, PrecisionScope},
    mlp::Activation,
    recomputable::Recomputable,
    shards::Sharded,
};

/// An expert, `down(activation(up(x)))`. All experts of a rank are computed together.
#[derive(Module, Sharded, Debug)]
pub struct ExpertMlp {
    /// The up matrix, `[d_model, d_ffn / n]`; gated `[d_model, 2 * d_ffn / n]`: this rank's gate
    /// columns, then its up columns.
    pub up: ParallelLinear,
    /// The down matrix, `[d_ffn / n, d_model]`.
    pub down: ParallelLinear,
}

impl ExpertMlp {
    /// Makes it one of the experts of a layer in a model.
    pub(super) fn in_scope(self, scope: &PrecisionScope, of_tokens: Option<AmaxReduction>) -> Self {
        Self {
            up: self.up.in_experts(scope, of_tokens.clone()),
            down: self.down.in_experts(scope, of_tokens),
        }
    }

    /// As [`ParallelLinear::whole_sequence`].
    pub(super) fn whole_sequence(self) -> Self {
        Self {
            up: self.up.whole_sequence(),
            down: self.down.whole_sequence(),
        }
    }
}

/// The matrices of a rank's experts, for grouped GEMMs, and how they are quantised.
pub(super) struct ExpertWeights {
    up: Matrices,
    down: Matrices,
}

type Matrices = (Vec<GroupWeight>, Vec<LinearQuantization>);

impl ExpertWeights {
    pub(super) fn of<'a>(experts: impl Iterator<Item = &'a ExpertMlp>) -> Self {
        let experts: Vec<&ExpertMlp> = experts.collect();
        let matrices = |of: fn(&ExpertMlp) -> &ParallelLinear| {
            let layers = || experts.iter().map(|expert| of(expert));
            let quantizations = layers().filter_map(ParallelLinear::quantization);
            (
                layers().map(ParallelLinear::group_weight).collect(),
                quantizations.collect(),
            )
        };
        Self {
            up: matrices(|expert| &expert.up),
            down: matrices(|expert| &expert.down),
        }
    }
}

/// The reduction of the largest magnitudes of all experts' tokens over the ranks of `tokens`, which
/// have tokens of the same micro-batch: `None` if a rank's experts get all of them. A rank has the
/// experts `own` of `num_experts`.
pub(super) fn token_reduction(
    tokens: &Group,
    groups: &ExpertGroups,
    num_experts: usize,
) -> Option<AmaxReduction> {
    // Ranks are numbered so that either group consists of whole ones of the other, if their sizes
    // divide each other.
    let [all, of_experts] = [tokens.size(), groups.experts.size()];
    if all <= of_experts || !all.is_multiple_of(of_experts) {
        return None;
    }
    let first = groups.own(num_experts).start;
    let tokens = tokens.clone();
    Some(AmaxReduction::new(move |amaxes| {
        let len = amaxes.dims()[0];
        let none = |experts: usize| {
            (experts > 0).then(|| Tensor::zeros([experts], (&amaxes.device(), amaxes.dtype())))
        };
        let [before, after] = [none(first), none(num_experts - first - len)];
        let all = [before, Some(amaxes.clone()), after];
        let all = Tensor::cat(all.into_iter().flatten().collect(), 0);
        max_over(all, &tokens).narrow(0, first, len)
    }))
}

/// The settings of a pass through the experts.
pub(super) struct ExpertPass<'a> {
    pub(super) activation: Activation,
    pub(super) grouped_gemm: GroupedGemmChoice,
    /// Whether backward recomputes the activation.
    pub(super) recompute: bool,
    pub(super) rows_per_expert: &'a [usize],
    /// The biases of the experts, if they have any.
    pub(super) biases: Option<&'a ExpertBiases>,
    /// The overlap to which weight-gradient GEMMs are deferred; `None` runs them at once.
    pub(super) overlapped_wgrads: Option<&'a OverlappedWgrads>,
}

/// Applies each expert to its rows, which are sorted by expert, and multiplies the outputs by their
/// weights. If ranks share an expert, the result is this rank's partial sum.
///
/// A row's weight is multiplied with the activation's output, which backward has anyway, and with the
/// down bias. Multiplying the expert's output would be equivalent, but would require saving that
/// output.
///
/// # Shapes
/// `rows`: `[r, d_model]`, unchanged; `weights`: `[r]`
pub(super) fn forward(
    experts: ExpertWeights,
    pass: &ExpertPass<'_>,
    rows: Tensor<2>,
    weights: Tensor<1>,
) -> Tensor<2> {
    let ExpertPass {
        activation,
        grouped_gemm,
        recompute,
        rows_per_expert,
        biases,
        overlapped_wgrads,
    } = *pass;
    // Do not defer a weight gradient whose input is recomputed: it would stay in memory until the
    // next transfer.
    let options = |quantizations, again: Option<RecomputeFn>| {
        let overlapped_wgrads = overlapped_wgrads.filter(|_| again.is_none()).cloned();
        GroupedOptions {
            again,
            overlapped_wgrads,
            choice: grouped_gemm,
            quantizations,
        }
    };
    let (weights_up, quantizations) = experts.up;
    let up = grouped_linear(
        rows,
        rows_per_expert,
        weights_up,
        options(quantizations, None),
    );
    let up = match biases {
        Some(biases) => biases.add_up(up, rows_per_expert),
        None => up,
    };
    let for_biases = biases.map(|biases| (biases, weights.clone()));
    let kept = recompute.then(|| (up.clone().inner(), weights.clone().inner()));
    let activated = activation.weighted(up, weights);
    let activated: Recomputable<2> = match kept {
        Some((up, weights)) => Recomputable::recomputed(
            activated,
            RecomputeFn::new(move || activation.weighted(up.clone(), weights.clone())),
        ),
        None => activated.into(),
    };
    let (activated, again) = activated.into_parts();
    let (weights_down, quantizations) = experts.down;
    let options = options(quantizations, again);
    let y = grouped_linear(activated, rows_per_expert, weights_down, options);
    match for_biases {
        Some((biases, weights)) => biases.add_down(y, rows_per_expert, weights),
        None => y,
    }
}
