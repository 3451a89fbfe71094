use burn::tensor::{DType, Int, Tensor, TensorData};

use super::choose::{choose_experts, expert_weights, router_scores};
use super::op::off_graph;
use super::options::RouterOptions;
use super::routed::{Routed, RouterGradients};
use crate::moe::with_gradient;

/// [`route`](crate::route) by its definition, step by step.
pub fn route(
    logits: Tensor<2>,
    bias: Option<Tensor<1>>,
    options: &RouterOptions,
    extra: impl FnOnce(&Routed) -> RouterGradients,
) -> Routed {
    let [tokens, num_experts] = logits.dims();
    let scores = router_scores(off_graph(&logits), options.scores);
    let [plain, bias] = [
        Some(scores.clone().flatten(0, 1)),
        bias.map(|bias| off_graph(&bias)),
    ]
    .map(|x: Option<Tensor<1>>| x.map(|x| -> Vec<f32> { x.into_data().iter().collect() }));
    let plain = plain.expect("the scores are present");
    let chosen = choose_experts(&plain, num_experts, bias.as_deref(), options);
    let numbers: Vec<i32> = chosen.iter().map(|&expert| expert as i32).collect();
    let numbers = TensorData::new(numbers, [tokens, options.top_k]);
    let experts = Tensor::<2, Int>::from_data(numbers, (&scores.device(), DType::I32));
    let weights = expert_weights(scores.clone(), &chosen, options);
    let found = Routed {
        weights,
        experts,
        scores,
    };
    let RouterGradients {
        of_scores,
        of_logits,
    } = extra(&found);
    let logits = match of_logits {
        Some(gradient) => with_gradient(logits, gradient),
        None => logits,
    };
    let scores = router_scores(logits, options.scores);
    let scores = match of_scores {
        Some(gradient) => with_gradient(scores, gradient),
        None => scores,
    };
    Routed {
        weights: expert_weights(scores, &chosen, options),
        ..found
    }
}
