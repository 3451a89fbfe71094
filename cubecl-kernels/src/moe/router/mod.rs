//! The router: from logits to the experts of each token and their weights.
//!
//! Source: Megatron-LM `megatron/core/transformer/moe/moe_utils.py`,
//! `topk_routing_with_score_function`, and its kernel `fused_topk_with_score_function`;
//! Transformers `modeling_mixtral.py`, `modeling_deepseek_v3.py`.

mod choose;
mod fallback;
#[cfg(feature = "cuda")]
mod kernels;
#[cfg(feature = "cuda")]
mod launch;
mod logits;
mod op;
mod options;
pub(crate) mod reference;
mod routed;

use burn::tensor::{DType, Int, Tensor};
use megaburn_autograd::arg_check::{self, float, int};

pub use choose::{choose_experts, expert_weights, router_scores};
pub use logits::router_logits;
use op::{off_graph, routed};
pub(super) use options::TINY;
pub use options::{RouterGroups, RouterOptions, RouterScores};
use routed::ExpertChoice;
pub use routed::{Routed, RouterGradients};

/// Chooses the experts of each token and computes their weights: [`router_scores`] in f32, then
/// [`choose_experts`] and [`expert_weights`]. On a GPU this is one kernel, and its gradient
/// another; the host waits for neither.
///
/// `bias` affects the choice only, not the weights. `extra` is called once with the result, off the
/// autodiff device; the gradients it returns are ignored if nothing is differentiated.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use megaburn_kernels::{RouterGradients, RouterOptions, RouterScores, route};
///
/// let logits = Tensor::<2>::random([5, 8], Distribution::Default, &Device::flex());
/// let options = RouterOptions {
///     top_k: 2,
///     scores: RouterScores::Softmax,
///     normalise: true,
///     scale: 1.0,
///     groups: None,
/// };
/// let routed = route(logits, None, &options, |_| RouterGradients::default());
/// let apart = (routed.weights.sum_dim(1) - 1.0).abs().max();
/// assert!(apart.into_scalar::<f32>() < 1e-6);
/// ```
///
/// # Shapes
/// `logits`: `[t, e]`, `bias`: `[e]`; results: see [`Routed`]
///
/// # Panics
/// As [`choose_experts`]; or if a gradient or the bias does not fit the number of experts or
/// tokens.
pub fn route(
    logits: Tensor<2>,
    bias: Option<Tensor<1>>,
    options: &RouterOptions,
    extra: impl FnOnce(&Routed) -> RouterGradients,
) -> Routed {
    let of_bias = bias.iter().map(|bias| float("bias", bias));
    arg_check::check(
        "route",
        [float("logits", &logits)].into_iter().chain(of_bias),
    );
    let bias = bias.map(|bias| {
        assert_eq!(
            bias.dims(),
            [logits.dims()[1]],
            "route: there must be one bias per expert"
        );
        off_graph(&bias).cast(DType::F32)
    });
    routed("route", logits, ExpertChoice::Best(bias), options, extra)
}

/// [`route`] with given experts, e.g. chosen round robin or by an earlier pass.
///
/// # Shapes
/// `experts`: `[t, k]`, distinct expert indices per token; otherwise as [`route`]
///
/// # Panics
/// As [`route`]; or if there are not `k` experts per token.
pub fn route_to(
    logits: Tensor<2>,
    experts: Tensor<2, Int>,
    options: &RouterOptions,
    extra: impl FnOnce(&Routed) -> RouterGradients,
) -> Routed {
    let of = [float("logits", &logits), int("experts", &experts)];
    arg_check::check("route_to", of);
    let shape = [logits.dims()[0], options.top_k];
    assert_eq!(experts.dims(), shape, "route_to: experts must be [t, k]");
    routed(
        "route_to",
        logits,
        ExpertChoice::Given(experts.cast(DType::I32)),
        options,
        extra,
    )
}

#[cfg(test)]
mod tests;
