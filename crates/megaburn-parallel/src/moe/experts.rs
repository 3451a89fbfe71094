use burn::{module::Module, tensor::Tensor};
use megaburn_kernels::{
    GroupWeight, GroupedOptions, OverlappedWgrads, RecomputeFn, grouped_linear,
};

use crate::{Activation, ParallelLinear, PlanBuilder, Recomputable, Sharded};

/// A feed-forward network, `down(activation(up(x)))`; of several that a rank has, all are computed together.
#[derive(Module, Debug)]
pub struct ExpertMlp {
    /// Up, `[d_model, d_ffn / n]`; gated `[d_model, 2 * d_ffn / n]`: this rank's gate columns, then its up
    /// columns.
    pub up: ParallelLinear,
    /// Down, `[d_ffn / n, d_model]`.
    pub down: ParallelLinear,
}

impl Sharded for ExpertMlp {
    fn shards(&self, plan: &mut PlanBuilder) {
        plan.child("up", &self.up);
        plan.child("down", &self.down);
    }
}

/// The matrices of a rank's experts.
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

/// How a pass goes through the experts.
pub(super) struct ExpertPass<'a> {
    pub(super) activation: Activation,
    /// Whether backward computes it once more.
    pub(super) recompute: bool,
    pub(super) rows_per_expert: &'a [usize],
    /// Beside what products that give weights' gradients are computed; none: at once.
    pub(super) beside: Option<&'a OverlappedWgrads>,
}

/// What each expert makes of its rows, which stand one expert's behind the other's, times their weights. Of
/// experts that ranks share it is this rank's term of a sum.
///
/// A row's weight is put on what the activation gives, from which backward has its gradient; on the expert's
/// result it would be the same, as the down matrix has no bias, and that would have to be kept.
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
        recompute,
        rows_per_expert,
        beside,
    } = *pass;
    // What is computed again would be held until something is sent.
    let options = |again: Option<RecomputeFn>| {
        let beside = beside.filter(|_| again.is_none()).cloned();
        GroupedOptions { again, beside }
    };
    let up = grouped_linear(rows, rows_per_expert, experts.up, options(None));
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
    grouped_linear(activated, rows_per_expert, experts.down, options(again))
}
