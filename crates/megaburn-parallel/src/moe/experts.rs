use burn::{module::Module, tensor::Tensor};
use megaburn_autograd::{OverlappedWgrads, RecomputeFn};
use megaburn_kernels::{GroupWeight, GroupedGemmChoice, GroupedOptions, grouped_linear};

use super::expert_biases::ExpertBiases;
use crate::{
    linear::ParallelLinear,
    mlp::Activation,
    recomputable::Recomputable,
    shards::{PlanBuilder, Sharded},
};

/// An expert, `down(activation(up(x)))`. All experts of a rank are computed together.
#[derive(Module, Debug)]
pub struct ExpertMlp {
    /// The up matrix, `[d_model, d_ffn / n]`; gated `[d_model, 2 * d_ffn / n]`: this rank's gate
    /// columns, then its up columns.
    pub up: ParallelLinear,
    /// The down matrix, `[d_ffn / n, d_model]`.
    pub down: ParallelLinear,
}

impl Sharded for ExpertMlp {
    fn shards(&self, plan: &mut PlanBuilder) {
        plan.child("up", &self.up);
        plan.child("down", &self.down);
    }
}

/// The matrices of a rank's experts, for grouped GEMMs.
pub(super) struct ExpertWeights {
    up: Vec<GroupWeight>,
    down: Vec<GroupWeight>,
}

impl ExpertWeights {
    pub(super) fn of<'a>(experts: impl Iterator<Item = &'a ExpertMlp>) -> Self {
        let both = |expert: &ExpertMlp| (expert.up.group_weight(), expert.down.group_weight());
        let (up, down) = experts.map(both).unzip();
        Self { up, down }
    }
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
    let options = |again: Option<RecomputeFn>| {
        let overlapped_wgrads = overlapped_wgrads.filter(|_| again.is_none()).cloned();
        GroupedOptions {
            again,
            overlapped_wgrads,
            choice: grouped_gemm,
        }
    };
    let up = grouped_linear(rows, rows_per_expert, experts.up, options(None));
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
    let y = grouped_linear(activated, rows_per_expert, experts.down, options(again));
    match for_biases {
        Some((biases, weights)) => biases.add_down(y, rows_per_expert, weights),
        None => y,
    }
}
