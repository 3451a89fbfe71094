//! A reference implementation that follows Hugging Face's DeepSeek.

use burn::{
    module::Param,
    tensor::{Tensor, TensorData, activation},
};
use megaburn_collective::Group;
use megaburn_kernels::YarnScaling;
use megaburn_parallel::Attention;
use rstest::rstest;

use super::{
    case::{Case, with_gammas},
    found,
};
use crate::{
    sequences::Subject,
    support::{assert_close, autodiff, fresh_seed},
};

/// Hugging Face's `DeepseekV3Attention`, line by line, for `x: [s, b, hidden]`.
fn reference(case: &Case, layer: &Attention, x: Tensor<3>) -> Tensor<3> {
    let [nope, rope, values] = case.dims;
    let [s, b] = case.tokens;
    let h = case.heads;
    let linear = |x: Tensor<3>, weight: &Param<Tensor<2>>| x.matmul(weight.val().unsqueeze::<3>());
    let norm = |x: Tensor<3>, gamma: &Param<Tensor<1>>| {
        let variance = (x.clone() * x.clone()).mean_dim(2);
        x / (variance + 1e-6).sqrt() * gamma.val().unsqueeze::<3>()
    };
    let heads = |x: Tensor<3>, d: usize| x.reshape([b, s, h, d]).swap_dims(1, 2);
    let x = x.swap_dims(0, 1);
    let kv_down = layer.kv_down.as_ref().unwrap();
    let kv_norm = layer.kv_norm.as_ref().unwrap();
    let kv_up = layer.kv_up.as_ref().unwrap();

    let q = match (&layer.q_down, &layer.q_norm, &layer.q_up, &layer.q) {
        (None, None, None, Some(q)) => linear(x.clone(), &q.weight),
        (Some(down), Some(gamma), Some(up), None) => linear(
            norm(linear(x.clone(), &down.weight), &gamma.gamma),
            &up.weight,
        ),
        _ => panic!("a layer with and without a latent of queries"),
    };
    let q = heads(q, nope + rope);
    let q_pass = q.clone().narrow(3, 0, nope);
    let q_rot = q.narrow(3, nope, rope);
    let compressed = linear(x, &kv_down.weight);
    let k_pass = compressed.clone().narrow(2, 0, case.kv_rank);
    let k_rot = compressed
        .narrow(2, case.kv_rank, rope)
        .reshape([b, 1, s, rope]);
    let k_pass = linear(norm(k_pass, &kv_norm.gamma), &kv_up.weight);
    let k_pass = heads(k_pass, nope + values);
    let (k_pass, v) = (
        k_pass.clone().narrow(3, 0, nope),
        k_pass.narrow(3, nope, values),
    );

    // `apply_rotary_pos_emb_interleave`
    let frequencies = case.rope().frequencies().unwrap();
    let factor = case.yarn.as_ref().map_or(1.0, YarnScaling::table_factor);
    let table = |of: fn(f64) -> f64| {
        let angles = (0..s).flat_map(|p| {
            let angles = frequencies
                .iter()
                .chain(&frequencies)
                .map(move |f| f * p as f64);
            angles
                .map(|angle| (of(angle) * factor) as f32)
                .collect::<Vec<_>>()
        });
        let table = TensorData::new(angles.collect(), [1, 1, s, rope]);
        Tensor::<4>::from_data(table, &autodiff())
    };
    let cos = table(f64::cos);
    let sin = table(f64::sin);
    let rotated = |x: Tensor<4>| {
        let [b, h, s, d] = x.dims();
        let x = x
            .reshape([b, h, s, d / 2, 2])
            .swap_dims(4, 3)
            .reshape([b, h, s, d]);
        let first = x.clone().narrow(3, 0, d / 2);
        let second = x.clone().narrow(3, d / 2, d / 2);
        x * cos.clone() + Tensor::cat(vec![-second, first], 3) * sin.clone()
    };
    let q = Tensor::cat(vec![q_pass, rotated(q_rot)], 3);
    let k = Tensor::cat(vec![k_pass, rotated(k_rot).repeat_dim(1, h)], 3);

    // `eager_attention_forward`, causal
    let scaling = match &case.yarn {
        None => case.scale(),
        Some(yarn) => {
            let mscale = 0.1 * yarn.mscale_all_dim.unwrap() * yarn.factor.ln() + 1.0;
            case.scale() * mscale * mscale
        }
    };
    let hidden = (0..s).flat_map(|i| (0..s).map(move |j| if j > i { -1e30f32 } else { 0.0 }));
    let hidden = TensorData::new(hidden.collect(), [1, 1, s, s]);
    let scores = q.matmul(k.swap_dims(2, 3)) * scaling + Tensor::from_data(hidden, &autodiff());
    let attended = activation::softmax(scores, 3).matmul(v);
    let attended = attended.swap_dims(1, 2).reshape([b, s, h * values]);
    linear(attended, &layer.output.weight).swap_dims(0, 1)
}

#[rstest]
fn one_rank_computes_what_hugging_face_does(
    #[values(Case::even([8, 2], 4), Case::ragged([7, 3], 3), Case::ragged([41, 1], 5))] case: Case,
    #[values(true, false)] with_latent: bool,
    #[values(true, false)] with_yarn: bool,
) {
    let mut case = case;
    case.q_rank = case.q_rank.filter(|_| with_latent);
    case.yarn = case.yarn.filter(|_| with_yarn);
    let seed = fresh_seed();
    let layer = case
        .config()
        .init(&Group::single(seed), &autodiff())
        .unwrap();
    let layer = with_gammas(layer, seed);
    let rope = case.rope().init(0..case.tokens[0], &autodiff()).unwrap();
    let ours = found(&layer, case.shape(), seed, |x| {
        layer.forward(x, Some(&rope))
    });
    let theirs = found(&layer, case.shape(), seed, |x| reference(&case, &layer, x));
    assert_eq!(ours.len(), if with_latent { 9 } else { 7 });
    for ((path, ours), (_, theirs)) in ours.iter().zip(&theirs) {
        assert_close(&format!("{case:?}: {path}"), ours, theirs, 1e-5);
    }
}
