//! Routing under automatic differentiation. The gradient of the logits is computed by hand, with the
//! gradients of losses that are not part of the summed loss.

use burn::tensor::{DType, Tensor};
use megaburn_autograd::CheckpointOperands;
use megaburn_autograd::backend_ops::as_row;

use super::fallback;
#[cfg(feature = "cuda")]
use super::launch;
use super::options::RouterOptions;
use super::routed::{Chosen, ExpertChoice, Routed, RouterGradients};

/// Routes the tokens: the weights, as a function of the logits, and the rest of [`Routed`].
pub(super) fn routed(
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
    let mut operands = CheckpointOperands::new(&device);
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

/// `x` without its graph.
pub(super) fn off_graph<const D: usize>(x: &Tensor<D>) -> Tensor<D> {
    if x.device().is_autodiff() {
        x.clone().inner()
    } else {
        x.clone()
    }
}
