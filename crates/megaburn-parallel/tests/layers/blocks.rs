//! Norms, MLPs and attention under all layouts.

use burn::{nn::Initializer, tensor::Tensor};
use megaburn_collective::Group;
use megaburn_kernels::RopeConfig;
use megaburn_parallel::{
    Activation, Attention, Mlp, MlpConfig, Norm, NormConfig, NormKind, PositionEmbedding,
    PositionEmbeddingConfig, QkNorm, QkNormKind, Residual, SelfAttentionConfig,
};
use rstest::rstest;

use crate::{
    support::{assert_close, autodiff, fresh_seed},
    trial::{Setting, assert_same_under_layout, stream},
};

/// The setting of a layer that maps the residual stream to the residual stream.
fn residual(ranks: usize, [seq, batch, hidden]: [usize; 3], sequence_parallel: bool) -> Setting {
    let shape = [seq, batch, hidden];
    let end = stream(sequence_parallel);
    Setting {
        ranks,
        seed: fresh_seed(),
        shapes: [shape; 2],
        ends: [end.clone(), end],
    }
}

#[rstest]
fn norms_see_their_own_tokens_only(
    #[values(1, 2, 3, 4, 8)] ranks: usize,
    #[values(true, false)] sequence_parallel: bool,
    #[values((1, 2, 8), (3, 1, 7))] (per_rank, batch, hidden): (usize, usize, usize),
) {
    let setting = residual(ranks, [per_rank * ranks, batch, hidden], sequence_parallel);
    let rms = NormConfig::rms(hidden)
        .with_sequence_parallel(sequence_parallel)
        .with_zero_centered_gamma(ranks == 2);
    let build = |group: &Group| Ok(rms.init(group, &autodiff()));
    assert_same_under_layout(&setting, build, Norm::forward);
    for bias in [true, false] {
        let layer = NormConfig::layer(hidden)
            .with_bias(bias)
            .with_sequence_parallel(sequence_parallel);
        let build = |group: &Group| Ok(layer.init(group, &autodiff()));
        assert_same_under_layout(&setting, build, Norm::forward);
    }
}

#[rstest]
fn a_norm_adds_the_last_term_of_the_residual_stream(
    #[values(1, 2, 3)] ranks: usize,
    #[values(true, false)] sequence_parallel: bool,
    #[values(NormKind::Rms, NormKind::Layer)] kind: NormKind,
    #[values(1, 2)] terms: usize,
) {
    let setting = residual(ranks, [2 * ranks, 3, 7], sequence_parallel);
    let config = NormConfig::new(7, kind).with_sequence_parallel(sequence_parallel);
    let build = |group: &Group| Ok(config.init(group, &autodiff()));
    let term = |x: &Tensor<3>, i: usize| x.clone().tanh() * (i + 1) as f64;
    let stream = |layer: &Norm, x: Tensor<3>| {
        let mut stream = Residual::from(x.clone());
        for i in 0..terms {
            stream += term(&x, i);
        }
        stream += stream.normed(layer).into_tensor();
        let z = stream.normed(layer);
        z.into_tensor() + stream.sum()
    };
    assert_same_under_layout(&setting, build, stream);
    // The same computation with separate additions.
    let words = |layer: &Norm, x: Tensor<3>| {
        let x = (0..terms).fold(x.clone(), |sum, i| sum + term(&x, i));
        let x = x.clone() + layer.forward(x);
        layer.forward(x.clone()) + x
    };
    let found = setting.run(build, stream);
    let expected = setting.run(build, words);
    assert_close("output", &found.output, &expected.output, 1e-6);
    assert_close("gradient", &found.input_grad, &expected.input_grad, 3e-6);
    for (path, grad) in &found.grads {
        assert_close(path, grad, &expected.grads[path], 3e-6);
    }
}

#[rstest]
fn position_vectors_go_to_their_own_tokens(
    #[values(1, 2, 3, 4)] ranks: usize,
    #[values(true, false)] sequence_parallel: bool,
    #[values((1, 2, 8), (3, 1, 7))] (per_rank, batch, hidden): (usize, usize, usize),
) {
    let setting = residual(ranks, [per_rank * ranks, batch, hidden], sequence_parallel);
    let config = PositionEmbeddingConfig::new(3 * per_rank * ranks, hidden)
        .with_sequence_parallel(sequence_parallel)
        .with_name("positions");
    let build = |group: &Group| config.init(group, &autodiff());
    // Consecutive positions, and positions with gaps as in a packed batch.
    for stride in [1, 2] {
        let positions: Vec<usize> = (0..per_rank * ranks).map(|i| 2 + stride * i).collect();
        assert_same_under_layout(&setting, build, |layer: &PositionEmbedding, x| {
            x + layer.forward(&positions)
        });
    }
}

#[rstest]
fn a_gated_mlp_keeps_gate_and_up_together(
    #[values(1, 2, 3, 4, 8)] ranks: usize,
    #[values(true, false)] sequence_parallel: bool,
    #[values([2, 2, 8, 24], [1, 3, 5, 48])] sizes: [usize; 4],
) {
    let [per_rank, batch, hidden, ffn] = sizes;
    let setting = residual(ranks, [per_rank * ranks, batch, hidden], sequence_parallel);
    let config = MlpConfig::gated(hidden, ffn)
        .with_sequence_parallel(sequence_parallel)
        .with_name("blocks.0.mlp");
    let build = |group: &Group| config.init(group, &autodiff());
    assert_same_under_layout(&setting, build, Mlp::forward);
}

#[rstest]
fn an_mlp_has_each_activation(
    #[values(1, 2, 3, 4, 8)] ranks: usize,
    #[values(true, false)] sequence_parallel: bool,
    #[values(
        Activation::Gelu,
        Activation::GeluTanh,
        Activation::Relu,
        Activation::SquaredRelu,
        Activation::GeGlu,
        Activation::GeGluTanh
    )]
    activation: Activation,
    #[values(true, false)] bias: bool,
) {
    let setting = residual(ranks, [2 * ranks, 3, 7], sequence_parallel);
    let config = MlpConfig::new(7, 24)
        .with_activation(activation)
        .with_bias(bias)
        .with_sequence_parallel(sequence_parallel)
        .with_name("blocks.1.mlp");
    let build = |group: &Group| config.init(group, &autodiff());
    assert_same_under_layout(&setting, build, Mlp::forward);
}

fn check_attention(setting: &Setting, config: SelfAttentionConfig) {
    // A standard deviation large enough that the scores matter.
    let config = config
        .with_initializer(Initializer::Normal {
            mean: 0.0,
            std: 0.4,
        })
        .with_name("blocks.2.attention");
    let build = |group: &Group| config.init(group, &autodiff());
    let forward = |layer: &Attention, x: Tensor<3>| {
        let positions = 0..setting.shapes[0][0];
        let rope = RopeConfig::new(config.head_dim)
            .init(positions, &autodiff())
            .unwrap();
        layer.forward(x, Some(&rope))
    };
    assert_same_under_layout(setting, build, forward);
    // Without rope: learned positions are added elsewhere.
    let forward = |layer: &Attention, x: Tensor<3>| layer.forward(x, None);
    assert_same_under_layout(setting, build, forward);
}

#[rstest]
#[case::one_kv_head_over_eight(8, 8, 1)]
#[case::two_kv_heads_over_eight(8, 8, 2)]
#[case::one_kv_head_over_four(4, 4, 1)]
#[case::two_kv_heads_over_four(4, 8, 2)]
#[case::as_many_kv_heads_as_ranks(4, 8, 4)]
#[case::grouped_over_three(3, 6, 3)]
#[case::one_kv_head_over_three(3, 6, 1)]
#[case::every_head_its_own(2, 6, 6)]
#[case::grouped_over_two(2, 6, 2)]
fn attention_splits_its_heads(
    #[case] ranks: usize,
    #[case] heads: usize,
    #[case] kv_heads: usize,
    #[values(true, false)] sequence_parallel: bool,
    #[values(
        (false, None, None, None),
        (true, Some(3), Some(QkNormKind::L2), Some(0.7)),
        (false, None, Some(QkNormKind::Head), None),
        (true, None, Some(QkNormKind::Width), None)
    )]
    (bias, window, qk_norm, soft_cap): (bool, Option<usize>, Option<QkNormKind>, Option<f64>),
) {
    for [per_rank, batch, hidden] in [[2, 2, 12], [3, 1, 7]] {
        let setting = residual(ranks, [per_rank * ranks, batch, hidden], sequence_parallel);
        let mut config = SelfAttentionConfig::new(hidden, heads, kv_heads, 4)
            .with_qkv_bias(bias)
            .with_output_bias(bias)
            .with_sequence_parallel(sequence_parallel);
        config.window = window;
        config.qk_norm = qk_norm.map(|kind| QkNorm::new().with_kind(kind));
        config.soft_cap = soft_cap;
        config.softmax_scale = soft_cap;
        check_attention(&setting, config);
    }
}

#[test]
fn a_window_changes_what_late_tokens_see() {
    let setting = residual(1, [6, 1, 8], false);
    let output = |window| {
        let mut config = SelfAttentionConfig::new(8, 2, 1, 4).with_name("attention");
        config.window = window;
        let build = |group: &Group| config.init(group, &autodiff());
        let rope = RopeConfig::new(4).init(0..6, &autodiff()).unwrap();
        let trial = setting.run(build, |layer: &Attention, x| layer.forward(x, Some(&rope)));
        crate::support::floats(&trial.output)
    };
    let all = output(None);
    let windowed = output(Some(2));
    assert_eq!(all[..16], windowed[..16]); // tokens 0 and 1 have all earlier tokens in the window
    assert!(
        all[16..]
            .iter()
            .zip(&windowed[16..])
            .any(|(a, b)| (a - b).abs() > 1e-7)
    );
}
