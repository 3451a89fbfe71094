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
pub(crate) mod reference;

use burn::tensor::{DType, Int, Tensor};
use megaburn_autograd::CheckpointFunction;
use megaburn_autograd::arg_check::{self, float, int};
use megaburn_autograd::backend_ops::as_row;

pub use choose::{choose_experts, expert_weights, router_scores};
pub use logits::router_logits;

/// How a router computes scores from its logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterScores {
    /// A softmax over all experts.
    Softmax,
    /// A sigmoid per expert.
    Sigmoid,
}

/// Group-limited routing: the experts of a token are chosen from some groups of neighboring experts
/// only (DeepSeek's node-limited routing).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouterGroups {
    /// The number of groups.
    pub num: usize,
    /// The number of groups from which a token's experts are chosen.
    pub kept: usize,
    /// A group's score is the sum of this many of its best expert scores.
    pub best: usize,
}

/// How tokens are routed.
#[derive(Clone, Debug, PartialEq)]
pub struct RouterOptions {
    /// The number of experts per token.
    pub top_k: usize,
    /// The scores by which experts are chosen.
    pub scores: RouterScores,
    /// Whether a token's weights are divided by their sum. With softmax scores, this equals the
    /// softmax over the chosen logits.
    pub normalise: bool,
    /// The factor of all weights.
    pub scale: f64,
    /// Group-limited routing; `None` chooses from all experts.
    pub groups: Option<RouterGroups>,
}

/// Added to the divisor of normalized weights.
pub(in crate::moe) const TINY: f64 = 1e-20;

impl RouterOptions {
    /// Panics unless tokens can have `top_k` of these experts.
    fn check(&self, op: &str, num_experts: usize) {
        let Self { top_k, groups, .. } = *self;
        let within = groups.map_or(num_experts, |groups| {
            assert!(
                groups.num > 0
                    && num_experts.is_multiple_of(groups.num)
                    && groups.kept <= groups.num,
                "{op}: {num_experts} experts do not fit {groups:?}"
            );
            groups.kept * (num_experts / groups.num)
        });
        assert!(
            (1..=within).contains(&top_k),
            "{op}: top_k {top_k} must be between 1 and the number of experts to choose from, \
            {within}"
        );
    }
}

/// The routing of tokens to experts.
#[derive(Clone, Debug)]
pub struct Routed {
    /// The weight of each token's experts, `[t, k]` in f32; differentiable with respect to the
    /// logits.
    pub weights: Tensor<2>,
    /// The experts of each token, best first, `[t, k]` in i32, off the autodiff device.
    pub experts: Tensor<2, Int>,
    /// The scores of all experts, `[t, e]` in f32, off the autodiff device.
    pub scores: Tensor<2>,
}

/// Gradients that the backward pass from weights to logits adds: those of losses that are not part
/// of the summed loss (Megatron's `MoEAuxLossAutoScaler`). Each is `[t, e]` or broadcastable to it,
/// off the autodiff device.
#[derive(Clone, Debug, Default)]
pub struct RouterGradients {
    /// The gradient of the scores.
    pub of_scores: Option<Tensor<2>>,
    /// The gradient of the logits.
    pub of_logits: Option<Tensor<2>>,
}

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

/// How experts are chosen.
enum ExpertChoice {
    /// By the best scores, plus a bias if there is one.
    Best(Option<Tensor<1>>),
    Given(Tensor<2, Int>),
}

fn routed(
    op: &str,
    logits: Tensor<2>,
    choice: ExpertChoice,
    options: &RouterOptions,
    extra: impl FnOnce(&Routed) -> RouterGradients,
) -> Routed {
    let [t, e] = logits.dims();
    options.check(op, e);
    let logits = logits.cast(DType::F32);
    let routed = forward(off_graph(&logits), choice, options);
    let extra = extra(&routed);
    for gradient in [&extra.of_scores, &extra.of_logits].into_iter().flatten() {
        let fits = gradient
            .dims()
            .into_iter()
            .zip([t, e])
            .all(|(n, all)| n == all || n == 1);
        assert!(
            fits,
            "{op}: a gradient {:?} does not match scores [{t}, {e}]",
            gradient.dims()
        );
    }
    let device = logits.device();
    if !device.is_autodiff() {
        return routed;
    }
    let Routed {
        weights,
        experts,
        scores,
    } = routed;
    let mut operands = CheckpointFunction::new(&device);
    operands.add(logits);
    let found = (experts.clone(), scores.clone());
    let options = options.clone();
    let [weights] = operands.results([Tensor::from_inner(weights)], move |[dweights]| {
        let dweights: Tensor<2> = dweights.expect("the result has a gradient");
        let (experts, scores) = found;
        let chosen = Chosen {
            dweights: dweights.cast(DType::F32),
            experts,
            scores,
        };
        vec![Some(as_row(gradient(chosen, extra, &options)))]
    });
    Routed {
        weights,
        experts,
        scores,
    }
}

/// The tensors from which the gradient of the logits is computed.
struct Chosen {
    dweights: Tensor<2>,
    experts: Tensor<2, Int>,
    scores: Tensor<2>,
}

fn forward(logits: Tensor<2>, choice: ExpertChoice, options: &RouterOptions) -> Routed {
    #[cfg(feature = "cuda")]
    if launch::takes(&logits) {
        return launch::forward(logits, choice, options);
    }
    fallback::forward(logits, choice, options)
}

fn gradient(chosen: Chosen, extra: RouterGradients, options: &RouterOptions) -> Tensor<2> {
    #[cfg(feature = "cuda")]
    if launch::takes(&chosen.scores) {
        return launch::gradient(chosen, extra, options);
    }
    fallback::gradient(chosen, extra, options)
}

fn off_graph<const D: usize>(x: &Tensor<D>) -> Tensor<D> {
    if x.device().is_autodiff() {
        x.clone().inner()
    } else {
        x.clone()
    }
}

#[cfg(test)]
mod tests;
