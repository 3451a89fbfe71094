//! Fallback for routing: chooses experts on the host and composes the gradient of Burn's
//! operations.
//!
//! With normalized weights `w = c s / (S + tiny)`, where `S` is the sum of a token's chosen scores:
//! `ds_i = (c dw_i - sum_j c dw_j s_j / S) / S`. Then `dx = s (ds - sum s ds)` for softmax logits,
//! and `dx = ds s (1 - s)` for sigmoid logits.

use burn::tensor::{DType, IndexingUpdateOp, Int, Tensor, TensorData};

use super::choose::{choose_experts, expert_weights, router_scores};
use super::options::{RouterOptions, RouterScores, TINY};
use super::routed::{Chosen, ExpertChoice, Routed, RouterGradients};

pub(super) fn forward(logits: Tensor<2>, choice: ExpertChoice, options: &RouterOptions) -> Routed {
    let [t, e] = logits.dims();
    let k = options.top_k;
    let device = logits.device();
    if t == 0 {
        let none = |columns| Tensor::empty([0, columns], (&device, DType::F32));
        let experts = Tensor::empty([0, k], (&device, DType::I32));
        return Routed {
            weights: none(k),
            experts,
            scores: none(e),
        };
    }
    let scores = router_scores(logits, options.scores);
    let chosen = match choice {
        ExpertChoice::Best(bias) => {
            let plain = host(scores.clone().flatten(0, 1));
            choose_experts(&plain, e, bias.map(host).as_deref(), options)
        }
        ExpertChoice::Given(experts) => experts.into_data().iter().collect(),
    };
    let numbers: Vec<i32> = chosen.iter().map(|&expert| expert as i32).collect();
    let experts = TensorData::new(numbers, [t, k]);
    let experts = Tensor::<2, Int>::from_data(experts, (&device, DType::I32));
    let weights = expert_weights(scores.clone(), &chosen, options);
    Routed {
        weights,
        experts,
        scores,
    }
}

pub(super) fn gradient(
    chosen: Chosen,
    extra: RouterGradients,
    options: &RouterOptions,
) -> Tensor<2> {
    let Chosen {
        dweights,
        experts,
        scores,
    } = chosen;
    let shape = scores.dims();
    if shape[0] == 0 {
        return scores;
    }
    let mut of_chosen = dweights * options.scale;
    if options.normalise {
        let own = scores.clone().gather(1, experts.clone());
        let sum = own.clone().sum_dim(1) + TINY;
        let mean = (of_chosen.clone() * own).sum_dim(1) / sum.clone();
        of_chosen = (of_chosen - mean) / sum;
    }
    let mut ds = scores
        .zeros_like()
        .scatter(1, experts, of_chosen, IndexingUpdateOp::Add);
    if let Some(gradient) = extra.of_scores {
        ds = ds + gradient.cast(DType::F32).expand(shape);
    }
    let dx = match options.scores {
        RouterScores::Softmax => {
            let mean = (scores.clone() * ds.clone()).sum_dim(1);
            scores * (ds - mean)
        }
        RouterScores::Sigmoid => ds * scores.clone() * (-scores + 1.0),
    };
    match extra.of_logits {
        Some(gradient) => dx + gradient.cast(DType::F32).expand(shape),
        None => dx,
    }
}

fn host(x: Tensor<1>) -> Vec<f32> {
    x.into_data().try_to_vec().expect("the tensor is f32")
}
