//! From a router's logits to the experts of each token and their weights.
//!
//! Source: Megatron-LM `megatron/core/transformer/moe/moe_utils.py`, `topk_routing_with_score_function`, and
//! its kernel `fused_topk_with_score_function`; Transformers `modeling_mixtral.py`,
//! `modeling_deepseek_v3.py`.

mod choose;
#[cfg(feature = "cuda")]
mod cube;
mod fallback;
#[cfg(feature = "cuda")]
mod kernels;
mod logits;
pub(crate) mod reference;

use burn::tensor::{DType, Int, Tensor};

pub use choose::{choose_experts, expert_weights, router_scores};
pub use logits::router_logits;

use crate::arg_check::{self, float, int};
use crate::backend_ops::as_row;
use crate::checkpoint_function::CheckpointFunction;

/// What a router makes of its logits before it chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterScores {
    /// Probabilities over all experts.
    Softmax,
    /// Each expert by itself.
    Sigmoid,
}

/// Experts are chosen from some of the groups of their neighbours only (DeepSeek's node-limited routing).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouterGroups {
    /// Groups that there are.
    pub num: usize,
    /// Groups that a token's experts may be of.
    pub kept: usize,
    /// How many of a group's best scores are its own, summed.
    pub best: usize,
}

/// How tokens are routed.
#[derive(Clone, Debug, PartialEq)]
pub struct RouterOptions {
    /// Experts of a token.
    pub top_k: usize,
    /// What they are chosen by.
    pub scores: RouterScores,
    /// Whether a token's weights are divided by their sum. Of a softmax that is the softmax of the chosen
    /// logits.
    pub normalise: bool,
    /// What weights are multiplied with.
    pub scale: f64,
    /// None: all experts are one group.
    pub groups: Option<RouterGroups>,
}

/// Added to what weights are divided by.
pub(in crate::moe) const TINY: f64 = 1e-20;

impl RouterOptions {
    /// Panics unless tokens can have so many of these experts.
    fn check(&self, op: &str, num_experts: usize) {
        let Self { top_k, groups, .. } = *self;
        let within = groups.map_or(num_experts, |groups| {
            assert!(
                groups.num > 0
                    && num_experts.is_multiple_of(groups.num)
                    && groups.kept <= groups.num,
                "{op}: {num_experts} experts in {groups:?}"
            );
            groups.kept * (num_experts / groups.num)
        });
        assert!(
            (1..=within).contains(&top_k),
            "{op}: {top_k} experts of {within}"
        );
    }
}

/// Where tokens go.
#[derive(Clone, Debug)]
pub struct Routed {
    /// What each token's experts count, `[t, k]` in f32: a function of the logits.
    pub weights: Tensor<2>,
    /// Its experts, the best first, `[t, k]` in i32, off the autodiff device.
    pub experts: Tensor<2, Int>,
    /// The scores of all experts, `[t, e]` in f32, off the autodiff device.
    pub scores: Tensor<2>,
}

/// Gradients that are added on the way back from the weights to the logits: those of losses that are not
/// summed with the others (Megatron's `MoEAuxLossAutoScaler`). Each is `[t, e]`, or what is
/// repeated to it, off the autodiff device.
#[derive(Clone, Debug, Default)]
pub struct RouterGradients {
    /// Of the scores.
    pub of_scores: Option<Tensor<2>>,
    /// Of the logits.
    pub of_logits: Option<Tensor<2>>,
}

/// The experts of each token and their weights: [`router_scores`] in f32, of which [`choose_experts`]
/// chooses and [`expert_weights`] weighs. On a GPU that is one kernel, the gradient another one, and the
/// host waits for neither.
///
/// `bias` takes part in the choice, and in nothing else. `extra` is called once, with what was found, off
/// the autodiff device; what it gives is not looked at where nothing is differentiated.
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
/// As [`choose_experts`]; if a gradient or the bias is of other experts or tokens.
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
        assert_eq!(bias.dims(), [logits.dims()[1]], "route: one bias an expert");
        off_graph(&bias).cast(DType::F32)
    });
    routed("route", logits, ExpertChoice::Best(bias), options, extra)
}

/// [`route`] to experts that somebody else chose: in turn, or as another pass did.
///
/// # Shapes
/// `experts`: `[t, k]`, each an expert's number and no two of a token the same; else as [`route`]
///
/// # Panics
/// As [`route`]; if there are other experts than `k` a token.
pub fn route_to(
    logits: Tensor<2>,
    experts: Tensor<2, Int>,
    options: &RouterOptions,
    extra: impl FnOnce(&Routed) -> RouterGradients,
) -> Routed {
    let of = [float("logits", &logits), int("experts", &experts)];
    arg_check::check("route_to", of);
    let shape = [logits.dims()[0], options.top_k];
    assert_eq!(experts.dims(), shape, "route_to: experts are not [t, k]");
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
    /// The best, with a bias where there is one.
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
            "{op}: a gradient {:?} of scores [{t}, {e}]",
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
        let dweights: Tensor<2> = dweights.expect("backward came from it");
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

/// What the gradient of the logits is made of.
struct Chosen {
    dweights: Tensor<2>,
    experts: Tensor<2, Int>,
    scores: Tensor<2>,
}

fn forward(logits: Tensor<2>, choice: ExpertChoice, options: &RouterOptions) -> Routed {
    #[cfg(feature = "cuda")]
    if cube::takes(&logits) {
        return cube::forward(logits, choice, options);
    }
    fallback::forward(logits, choice, options)
}

fn gradient(chosen: Chosen, extra: RouterGradients, options: &RouterOptions) -> Tensor<2> {
    #[cfg(feature = "cuda")]
    if cube::takes(&chosen.scores) {
        return cube::gradient(chosen, extra, options);
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
