use burn::tensor::TensorData;
use megaburn_autograd::testing::{
    assert_close, assert_refused, constant, leaf, normal, quantized, values,
};
use rstest::rstest;

use super::*;

fn options(top_k: usize, scores: RouterScores, groups: Option<[usize; 3]>) -> RouterOptions {
    let groups = groups.map(|[num, kept, best]| RouterGroups { num, kept, best });
    RouterOptions {
        top_k,
        scores,
        normalise: false,
        scale: 1.0,
        groups,
    }
}

fn nothing(_: &Routed) -> RouterGradients {
    RouterGradients::default()
}

fn numbers(x: Tensor<2, Int>) -> Vec<i64> {
    assert_eq!(x.dtype(), DType::I32);
    x.into_data().iter::<i64>().collect()
}

#[rstest]
fn values_and_gradients_are_those_of_the_steps(
    #[values(RouterScores::Softmax, RouterScores::Sigmoid)] scores: RouterScores,
    #[values((false, 1.0), (true, 1.0), (true, 2.5))] (normalise, scale): (bool, f64),
    #[values(([5, 6], 2, None), ([3, 4], 4, None), ([7, 6], 2, Some([3, 2, 2])), ([4, 1], 1, None))]
    (shape, top_k, groups): ([usize; 2], usize, Option<[usize; 3]>),
    #[values([false, false], [true, false], [false, true], [true, true])] has: [bool; 2],
    #[values(false, true)] biased: bool,
) {
    let how = RouterOptions {
        normalise,
        scale,
        ..options(top_k, scores, groups)
    };
    let logits = leaf(normal(shape));
    let bias = biased.then(|| normal([shape[1]]));
    // One gradient has a row per token, the other a single row for all.
    let [of_scores, of_logits] = [normal(shape).inner(), normal([1, shape[1]]).inner()];
    let extra = |found: &Routed| {
        assert_eq!(found.weights.dims(), [shape[0], top_k]);
        assert!(!found.weights.device().is_autodiff() && !found.scores.device().is_autodiff());
        RouterGradients {
            of_scores: has[0].then(|| of_scores.clone()),
            of_logits: has[1].then(|| of_logits.clone()),
        }
    };
    let found = route(logits.clone(), bias.clone(), &how, extra);
    let expected = reference::route(logits.clone(), bias, &how, extra);
    assert_eq!(numbers(found.experts), numbers(expected.experts));
    assert_eq!(values(found.scores), values(expected.scores));
    // (Flex computes softmax differently under autodiff.)
    assert_close(found.weights.clone(), expected.weights.clone(), 1e-6);
    let dy = constant(found.weights.dims());
    let found = (found.weights * dy.clone()).sum().backward();
    let expected = (expected.weights * dy).sum().backward();
    assert_close(
        logits.grad(&found).unwrap(),
        logits.grad(&expected).unwrap(),
        2e-6,
    );
}

#[rstest]
fn tokens_go_where_they_are_sent(
    #[values(([5, 6], 2), ([3, 4], 3), ([0, 4], 1))] (shape, top_k): ([usize; 2], usize),
    #[values(DType::I32, DType::I64)] dtype: DType,
) {
    let how = RouterOptions {
        normalise: true,
        ..options(top_k, RouterScores::Softmax, None)
    };
    let logits = leaf(normal(shape));
    let dy = constant([shape[0], top_k]);
    let weighed = |found: Routed| {
        let grads = (found.weights.clone() * dy.clone()).sum().backward();
        (
            numbers(found.experts),
            found.weights,
            logits.grad(&grads).unwrap(),
        )
    };
    let round_robin: Vec<i64> = (0..shape[0] * top_k)
        .map(|slot| (slot % shape[1]) as i64)
        .collect();
    let sent = TensorData::new(round_robin.clone(), [shape[0], top_k]);
    let sent = Tensor::from_data(sent, (&logits.device().inner(), dtype));
    let (experts, weights, gradient) = weighed(route_to(logits.clone(), sent, &how, nothing));
    assert_eq!(experts, round_robin);
    // Compare with the separate steps.
    let chosen: Vec<u32> = round_robin.iter().map(|&expert| expert as u32).collect();
    if shape[0] > 0 {
        let scores = router_scores(logits.clone(), how.scores);
        let expected = expert_weights(scores, &chosen, &how);
        assert_close(weights, expected.clone(), 1e-6);
        let grads = (expected * dy.clone()).sum().backward();
        assert_close(gradient, logits.grad(&grads).unwrap(), 1e-6);
    }
    // `route_to` with the experts that `route` chooses gives the same result.
    let best = route(logits.clone(), None, &how, nothing);
    let again = route_to(logits.clone(), best.experts.clone(), &how, nothing);
    let [(_, a, da), (_, b, db)] = [best, again].map(weighed);
    assert_eq!((values(a), values(da)), (values(b), values(db)));
}

#[test]
fn narrow_logits_are_routed_in_f32() {
    let logits = leaf(normal([4, 6]).cast(DType::BF16));
    let how = options(2, RouterScores::Sigmoid, None);
    let found = route(logits.clone(), None, &how, nothing);
    assert_eq!(found.weights.dtype(), DType::F32);
    let grads = found.weights.sum().backward();
    assert_eq!(logits.grad(&grads).unwrap().dtype(), DType::BF16);
}

#[test]
fn what_is_not_differentiated_is_routed_alike() {
    let logits = normal([4, 6]);
    let how = options(2, RouterScores::Softmax, None);
    let found = route(logits.clone().inner(), None, &how, |_| RouterGradients {
        of_scores: Some(logits.clone().inner()),
        of_logits: None,
    });
    let expected = route(logits, None, &how, nothing);
    assert_close(found.weights, expected.weights.inner(), 0.0);
}

#[test]
fn no_tokens_go_nowhere() {
    let logits = leaf(normal([0, 6]));
    let how = options(2, RouterScores::Softmax, Some([3, 2, 1]));
    let found = route(logits.clone(), None, &how, nothing);
    assert_eq!(
        (found.experts.dims(), found.scores.dims()),
        ([0, 2], [0, 6])
    );
    let grads = found.weights.sum().backward();
    assert_eq!(logits.grad(&grads).unwrap().dims(), [0, 6]);
}

#[test]
fn weights_of_a_bias_are_those_without_it() {
    let logits = Tensor::from_data(
        [[0.0f32, 2.0, 1.0, -1.0]],
        &megaburn_autograd::testing::device(),
    );
    let bias = Tensor::from_data([0.0f32, 0.0, 0.0, 9.0], &logits.device());
    let found = route(
        logits,
        Some(bias),
        &options(2, RouterScores::Sigmoid, None),
        nothing,
    );
    assert_eq!(numbers(found.experts), [3, 1]);
    let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
    let expected = TensorData::new(vec![sigmoid(-1.0), sigmoid(2.0)], [1, 2]);
    let expected = Tensor::from_data(expected, &found.weights.device());
    assert_close(found.weights, expected, 1e-6);
}

#[rstest]
#[case::many(|| route(constant([3, 4]), None, &options(5, RouterScores::Softmax, None), nothing), "route: top_k 5 must be between 1 and the number of experts to choose from, 4")]
#[case::none(|| route(constant([3, 4]), None, &options(0, RouterScores::Softmax, None), nothing), "route: top_k 0 must be between 1 and the number of experts to choose from, 4")]
#[case::groups(|| route(constant([3, 4]), None, &options(3, RouterScores::Softmax, Some([2, 1, 2])), nothing), "route: top_k 3 must be between 1 and the number of experts to choose from, 2")]
#[case::uneven(|| route(constant([3, 4]), None, &options(1, RouterScores::Softmax, Some([3, 1, 1])), nothing), "route: 4 experts do not fit RouterGroups")]
#[case::bias(|| route(constant([3, 4]), Some(constant([3])), &options(1, RouterScores::Softmax, None), nothing), "route: \
    there must be one bias per expert")]
#[case::dtype(|| route(quantized([4, 4]), None, &options(1, RouterScores::Softmax, None), nothing), "route: logits is qfloat")]
#[case::sent(
    || {
        let sent = Tensor::zeros([3, 1], &megaburn_autograd::testing::device().inner());
        route_to(constant([3, 4]), sent, &options(2, RouterScores::Softmax, None), nothing)
    },
    "route_to: experts must be [t, k]"
)]
#[case::gradient(
    || route(constant([3, 4]), None, &options(1, RouterScores::Softmax, None), |_| RouterGradients {
        of_scores: Some(constant([2, 4]).inner()),
        of_logits: None,
    }),
    "route: a gradient [2, 4] does not match scores [3, 4]"
)]
fn what_does_not_fit_is_refused(#[case] call: fn() -> Routed, #[case] message: &str) {
    assert_refused(call, message);
}
