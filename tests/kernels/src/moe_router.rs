//! Tests of routing on the GPU: chosen experts, their weights and gradients.

use burn::{
    prelude::Device,
    tensor::{DType, Tensor, TensorData},
};
use megaburn_kernels::{
    Routed, RouterGradients, RouterGroups, RouterOptions, RouterScores, choose_experts, reference,
    route, route_to, router_logits,
};

use super::compare::*;
use super::moe::{ints, numbers, poison, random};

pub(super) const TESTS: &[super::Test] = &[
    ("tokens_are_routed_as_on_the_cpu", routes),
    ("tokens_go_where_they_are_sent", sent),
    ("what_is_no_number_is_chosen_last", not_numbers),
    ("no_tokens_go_nowhere", nothing),
    ("more_experts_than_a_plane_holds_are_routed_too", many),
    ("logits_of_narrow_tokens_are_those_of_f32", logits),
];

const TOKENS: usize = 21;

#[derive(Clone, Debug)]
struct Case {
    num_experts: usize,
    options: RouterOptions,
    biased: bool,
}

fn case(num_experts: usize, top_k: usize, scores: RouterScores) -> Case {
    let options = RouterOptions {
        top_k,
        scores,
        normalise: false,
        scale: 1.0,
        groups: None,
    };
    Case {
        num_experts,
        options,
        biased: false,
    }
}

impl Case {
    fn normalised(mut self, scale: f64) -> Self {
        self.options.normalise = true;
        self.options.scale = scale;
        self
    }

    fn grouped(mut self, [num, kept, best]: [usize; 3]) -> Self {
        self.options.groups = Some(RouterGroups { num, kept, best });
        self
    }

    fn biased(self) -> Self {
        Self {
            biased: true,
            ..self
        }
    }

    /// Logits with many ties; distinct ones are far enough apart for the CPU to order them the same
    /// way.
    fn logits(&self, tokens: usize) -> TensorData {
        let of = random(tokens * self.num_experts, 256).into_iter();
        let of: Vec<f32> = of.map(|x| x as f32 / 32.0 - 4.0).collect();
        TensorData::new(of, [tokens, self.num_experts])
    }

    fn bias(&self) -> Option<Vec<f32>> {
        let of = || {
            random(self.num_experts, 3)
                .into_iter()
                .map(|x| x as f32 / 2.0)
                .collect()
        };
        self.biased.then(of)
    }
}

fn cases() -> Vec<Case> {
    use RouterScores::{Sigmoid, Softmax};
    vec![
        case(1, 1, Softmax),
        case(8, 1, Sigmoid),
        case(8, 2, Softmax).normalised(1.0),
        case(8, 8, Sigmoid).normalised(0.5),
        case(60, 1, Sigmoid).biased(),
        case(60, 2, Softmax).biased(),
        case(60, 8, Softmax),
        case(256, 2, Softmax).normalised(1.0),
        case(256, 8, Sigmoid)
            .normalised(2.5)
            .biased()
            .grouped([8, 4, 2]),
        case(64, 8, Softmax).grouped([8, 3, 1]),
        // More groups than a lane holds, with fewer experts each than are summed for the group's
        // score.
        case(72, 8, Sigmoid).biased().grouped([36, 9, 5]),
        // More experts per token than lanes, of the most experts that a plane holds.
        case(512, 40, Sigmoid).normalised(1.0),
    ]
}

/// Weights, scores and the gradient of logits, then the experts.
type Found = (Vec<Vec<f32>>, Vec<i64>);

fn run(
    device: &Device,
    case: &Case,
    [logits, dweights]: [&TensorData; 2],
    bias: Option<&[f32]>,
    extra: &[Option<TensorData>; 2],
) -> Result<Found, String> {
    let logits: Tensor<2> = leaf(logits, device, DType::F32);
    let bias = bias.map(|bias| Tensor::<1>::from_data(bias, &logits.device()));
    let of = |data: &Option<TensorData>| Some(Tensor::from_data(data.clone()?, device));
    let gradients = |_: &Routed| {
        let [of_scores, of_logits] = extra.each_ref().map(of);
        RouterGradients {
            of_scores,
            of_logits,
        }
    };
    let Routed {
        weights,
        experts,
        scores,
    } = if device == &Device::flex() {
        reference::route(logits.clone(), bias, &case.options, gradients)
    } else {
        route(logits.clone(), bias, &case.options, gradients)
    };
    let dweights = Tensor::from_data(dweights.clone(), &logits.device());
    let grads = (weights.clone() * dweights).sum().backward();
    let gradient = logits.grad(&grads).ok_or("no gradient")?;
    if experts.dtype() != DType::I32 {
        return Err(format!("experts in {:?}", experts.dtype()));
    }
    Ok((
        vec![host(weights)?, host(scores)?, host(gradient)?],
        numbers(experts)?,
    ))
}

fn routes() -> Result<(), String> {
    for case in cases() {
        let Case {
            num_experts,
            options,
            ..
        } = &case;
        let shape = [TOKENS, *num_experts];
        for kind in 0..4 {
            let what = format!("{case:?} with gradients {kind}");
            let logits = case.logits(TOKENS);
            let bias = case.bias();
            let dweights = normal([TOKENS, options.top_k], DType::F32);
            // One gradient has a row per token, the other a single row for all.
            let all = normal(shape, DType::F32);
            let one = normal([1, *num_experts], DType::F32);
            let extra = match kind {
                0 => [None, None],
                1 => [Some(all), None],
                2 => [None, Some(one)],
                _ => [Some(one), Some(all)],
            };
            let inputs = [&logits, &dweights];
            let expected = run(&Device::flex(), &case, inputs, bias.as_deref(), &extra)?;
            let sizes = [*num_experts, options.top_k].map(|columns| 4 * TOKENS * columns);
            poison(&sizes)?;
            let found = run(&Device::cuda(0), &case, inputs, bias.as_deref(), &extra)?;
            let of_scores = choose_experts(&found.0[1], *num_experts, bias.as_deref(), options);
            if !found
                .1
                .iter()
                .copied()
                .eq(of_scores.iter().map(|&expert| i64::from(expert)))
            {
                return Err(format!("{what}: experts that these scores do not choose"));
            }
            if found.1 != expected.1 {
                return Err(format!("{what}: other experts"));
            }
            let names = ["weights", "scores", "gradient"];
            for ((name, found), expected) in names.into_iter().zip(&found.0).zip(&expected.0) {
                close(&format!("{what}: {name}"), found, expected, 2e-6)?;
            }
            if run(&Device::cuda(0), &case, inputs, bias.as_deref(), &extra)? != found {
                return Err(format!("{what}: other bits the second time"));
            }
        }
    }
    Ok(())
}

/// Routing to given experts: to the best ones, with the same bits as `route`, and round robin.
fn sent() -> Result<(), String> {
    let device = Device::cuda(0);
    for case in cases().into_iter().filter(|case| !case.biased) {
        let Case {
            num_experts,
            options,
            ..
        } = &case;
        let top_k = options.top_k;
        let data = case.logits(TOKENS);
        let dweights = normal([TOKENS, top_k], DType::F32);
        let weighed = |device: &Device, experts: Option<&[i64]>| -> Result<_, String> {
            let logits: Tensor<2> = leaf(&data, device, DType::F32);
            let extra = |_: &Routed| RouterGradients::default();
            let found = match experts {
                None => route(logits.clone(), None, options, extra),
                Some(experts) => {
                    let experts = ints(experts, [TOKENS, top_k], device, DType::I32);
                    route_to(logits.clone(), experts, options, extra)
                }
            };
            let dweights = Tensor::from_data(dweights.clone(), &logits.device());
            let grads = (found.weights.clone() * dweights).sum().backward();
            let gradient = logits.grad(&grads).ok_or("no gradient")?;
            let floats = [found.weights, found.scores, gradient].map(host);
            Ok((
                numbers(found.experts)?,
                floats.into_iter().collect::<Result<Vec<_>, _>>()?,
            ))
        };
        let best = weighed(&device, None)?;
        if weighed(&device, Some(&best.0))? != best {
            return Err(format!("{case:?}: other bits of the best experts"));
        }
        let round_robin: Vec<_> = (0..TOKENS * top_k)
            .map(|slot| (slot % num_experts) as i64)
            .collect();
        let (experts, found) = weighed(&device, Some(&round_robin))?;
        let (_, expected) = weighed(&Device::flex(), Some(&round_robin))?;
        if experts != round_robin {
            return Err(format!("{case:?}: other experts than those in turn"));
        }
        for (found, expected) in found.iter().zip(&expected) {
            close(&format!("{case:?} in turn"), found, expected, 2e-6)?;
        }
    }
    Ok(())
}

fn not_numbers() -> Result<(), String> {
    let mut bias = vec![0.0; 60];
    bias[7] = f32::NEG_INFINITY;
    bias[9] = f32::NAN;
    bias[50] = f32::NEG_INFINITY;
    let plain = [
        case(8, 2, RouterScores::Softmax),
        case(60, 8, RouterScores::Sigmoid),
    ];
    let grouped = case(60, 8, RouterScores::Sigmoid)
        .biased()
        .grouped([12, 2, 3]);
    for case in plain.into_iter().chain([grouped]) {
        let Case {
            num_experts,
            options,
            biased,
        } = &case;
        let bias = biased.then_some(bias.as_slice());
        let mut logits: Vec<f32> = case.logits(TOKENS).iter().collect();
        let odd = [f32::NAN, f32::NEG_INFINITY, f32::INFINITY];
        // One, all but one, and all of a token's logits are replaced.
        for (token, row) in logits.chunks_mut(*num_experts).enumerate() {
            let last = [0, 1, num_experts - 1, *num_experts][token % 4];
            row[..last]
                .iter_mut()
                .for_each(|logit| *logit = odd[token % 3]);
        }
        let logits = TensorData::new(logits, [TOKENS, *num_experts]);
        let logits = Tensor::<2>::from_data(logits, &Device::cuda(0));
        let on_gpu = bias.map(|bias| Tensor::<1>::from_data(bias, &logits.device()));
        let found = route(logits, on_gpu, options, |_| RouterGradients::default());
        let scores = host(found.scores)?;
        let experts = numbers(found.experts)?;
        let nans = scores.iter().filter(|score| score.is_nan()).count();
        let chosen = choose_experts(&scores, *num_experts, bias, options);
        let chosen: Vec<i64> = chosen.into_iter().map(i64::from).collect();
        if experts != chosen || nans == 0 {
            return Err(format!(
                "{case:?}, {nans} are none: {experts:?} for {chosen:?}"
            ));
        }
    }
    Ok(())
}

fn nothing() -> Result<(), String> {
    let logits = Tensor::<2>::empty([0, 8], &Device::cuda(0).autodiff()).require_grad();
    let options = case(8, 2, RouterScores::Softmax).options;
    let found = route(logits.clone(), None, &options, |_| {
        RouterGradients::default()
    });
    let grads = found.weights.clone().sum().backward();
    let gradient = logits.grad(&grads).ok_or("no gradient")?;
    let dims = [
        found.weights.dims(),
        found.experts.dims(),
        found.scores.dims(),
        gradient.dims(),
    ];
    if dims == [[0, 2], [0, 2], [0, 8], [0, 8]] {
        Ok(())
    } else {
        Err(format!("{dims:?}"))
    }
}

fn many() -> Result<(), String> {
    let case = case(600, 3, RouterScores::Sigmoid).normalised(1.0);
    let logits = case.logits(5);
    let dweights = normal([5, 3], DType::F32);
    let run = |device: &Device| run(device, &case, [&logits, &dweights], None, &[None, None]);
    let expected = run(&Device::flex())?;
    let found = run(&Device::cuda(0))?;
    if found.1 != expected.1 {
        return Err("600 experts: others".into());
    }
    // All chosen scores are near 1. The gradient contains `1 - score`, to which the last bit of a
    // score is a larger relative change.
    found
        .0
        .iter()
        .zip(&expected.0)
        .try_for_each(|(a, b)| close("600 experts", a, b, 2e-5))
}

/// Tensor cores round sums a little more than f32 does: by 3e-6 of the largest over 2048 columns.
/// Logits rounded to bf16 would be off by 4e-3.
fn logits() -> Result<(), String> {
    for [t, d, e] in [[21, 64, 8], [37, 130, 5], [256, 2048, 64]] {
        let [x, w] = [[t, d], [d, e]].map(|shape| normal(shape, DType::BF16));
        let dy = normal([t, e], DType::F32);
        let run = |device: &Device, narrow: bool| -> Result<_, String> {
            let x: Tensor<2> = leaf(&x, device, if narrow { DType::BF16 } else { DType::F32 });
            let weight: Tensor<2> = leaf(&w, device, DType::F32);
            let copy = narrow.then(|| weight.clone().inner().cast(DType::BF16));
            let y = router_logits(x.clone(), weight.clone(), copy);
            let dy = Tensor::from_data(dy.clone(), &y.device());
            let grads = (y.clone() * dy).sum().backward();
            let [dx, dw] = [&x, &weight].map(|x| x.grad(&grads));
            let of = |gradient: Option<_>| host(gradient.ok_or("no gradient")?);
            Ok([host(y)?, of(dw)?, of(dx)?])
        };
        poison(&[4 * t * e, 12 * d * e, 2 * t * d])?;
        let found = run(&Device::cuda(0), true)?;
        let expected = run(&Device::flex(), false)?;
        let tolerances = [("logits", 1e-5), ("of weights", 1e-5), ("of tokens", 4e-3)];
        for ((name, tolerance), (a, b)) in tolerances.into_iter().zip(found.iter().zip(&expected)) {
            close(&format!("[{t}, {d}, {e}]: {name}"), a, b, tolerance)?;
        }
        if run(&Device::cuda(0), true)? != found {
            return Err(format!("[{t}, {d}, {e}]: other bits the second time"));
        }
    }
    Ok(())
}
