//! `ParallelLinear` under all layouts.

use burn::{
    nn::Initializer,
    tensor::{Tensor, TensorData},
};
use megaburn_mesh::FusedPart;
use megaburn_parallel::{
    ParallelLinear, ParallelLinearConfig, ReplicatedLinear, ReplicatedLinearConfig, Split,
};
use rstest::rstest;

use crate::{
    support::{autodiff, fresh_seed},
    trial::{End, Setting, assert_same_under_layout, stream},
};

fn check(setting: Setting, config: &ParallelLinearConfig) {
    let config = config.clone().with_name("layer");
    let build = |group: &_| config.init(group, &autodiff());
    assert_same_under_layout(&setting, build, ParallelLinear::forward);
    if config.bias {
        // Double the returned bias before adding it, so that its gradient doubles too.
        let with_bias = |layer: &ParallelLinear, x: Tensor<3>| {
            let (y, bias) = layer.forward_with_bias(x);
            y + bias.unwrap().unsqueeze::<3>() * 2.0
        };
        assert_same_under_layout(&setting, build, with_bias);
    }
}

fn features(size: usize) -> End {
    End::Features(vec![FusedPart::new(size)])
}

#[rstest]
fn a_column_split_is_the_whole_layer(
    #[values(1, 2, 3, 4, 8)] ranks: usize,
    #[values(true, false)] bias: bool,
    #[values(true, false)] sequence_parallel: bool,
    #[values(true, false)] gather_output: bool,
) {
    let seed = fresh_seed();
    for [seq, batch, d_input, d_output] in [[24, 1, 10, 48], [2 * ranks, 3, 7, 5 * ranks]] {
        let config = ParallelLinearConfig::new(d_input, d_output)
            .with_gather_output(gather_output)
            .with_bias(bias)
            .with_sequence_parallel(sequence_parallel);
        let output = if gather_output {
            End::Whole
        } else {
            features(d_output)
        };
        let shapes = [[seq, batch, d_input], [seq, batch, d_output]];
        let ends = [stream(sequence_parallel), output];
        check(
            Setting {
                ranks,
                seed,
                shapes,
                ends,
            },
            &config,
        );
    }
}

#[rstest]
fn a_row_split_is_the_whole_layer(
    #[values(1, 2, 3, 4, 8)] ranks: usize,
    #[values(true, false)] bias: bool,
    #[values((true, true), (true, false), (false, false))] (parallel, sequence): (bool, bool),
) {
    let seed = fresh_seed();
    for [seq, batch, d_input, d_output] in [[24, 1, 48, 10], [2 * ranks, 3, 5 * ranks, 7]] {
        let config = ParallelLinearConfig::row(d_input, d_output)
            .with_input_is_parallel(parallel)
            .with_bias(bias)
            .with_sequence_parallel(sequence);
        let input = if parallel {
            features(d_input)
        } else {
            End::Whole
        };
        let shapes = [[seq, batch, d_input], [seq, batch, d_output]];
        let ends = [input, stream(sequence)];
        check(
            Setting {
                ranks,
                seed,
                shapes,
                ends,
            },
            &config,
        );
    }
}

#[rstest]
fn fused_parts_are_split_each_by_itself(
    #[values(1, 2, 4, 8)] ranks: usize,
    #[values(1, 2, 8)] kv_heads: usize,
    #[values(true, false)] sequence_parallel: bool,
) {
    // With fewer key/value heads than ranks, the heads are replicated.
    let seed = fresh_seed();
    let parts = [
        FusedPart::units(8, 3),
        FusedPart::units(kv_heads, 3),
        FusedPart::units(kv_heads, 3),
    ];
    let seq = ranks * 3;
    let d_output = parts.iter().map(FusedPart::size).sum();
    let config = ParallelLinearConfig::column(10, d_output)
        .with_parts(parts)
        .with_sequence_parallel(sequence_parallel);
    let shapes = [[seq, 2, 10], [seq, 2, d_output]];
    let ends = [stream(sequence_parallel), End::Features(parts.to_vec())];
    check(
        Setting {
            ranks,
            seed,
            shapes,
            ends,
        },
        &config,
    );

    let parts = [FusedPart::new(8), FusedPart::units(8, 2)];
    let config = ParallelLinearConfig::row(24, 9)
        .with_parts(parts)
        .with_sequence_parallel(sequence_parallel);
    let shapes = [[seq, 2, 24], [seq, 2, 9]];
    let ends = [End::Features(parts.to_vec()), stream(sequence_parallel)];
    check(
        Setting {
            ranks,
            seed,
            shapes,
            ends,
        },
        &config,
    );
}

#[rstest]
#[case(Initializer::Constant { value: 0.3 })]
#[case(Initializer::Ones)]
#[case(Initializer::Zeros)]
#[case(Initializer::Uniform { min: -0.5, max: 2.0 })]
#[case(Initializer::Normal { mean: 1.0, std: 0.5 })]
#[case(Initializer::KaimingUniform { gain: 0.7, fan_out_only: false })]
#[case(Initializer::KaimingUniform { gain: 0.7, fan_out_only: true })]
#[case(Initializer::KaimingNormal { gain: 1.3, fan_out_only: false })]
#[case(Initializer::KaimingNormal { gain: 1.3, fan_out_only: true })]
#[case(Initializer::XavierUniform { gain: 1.1 })]
#[case(Initializer::XavierNormal { gain: 0.9 })]
fn named_weights_have_the_law_of_burns_initializer(#[case] initializer: Initializer) {
    let group = megaburn_collective::Group::single(fresh_seed());
    let moments = |data: TensorData| {
        let values: Vec<f64> = data.iter::<f64>().collect();
        let n = values.len() as f64;
        let mean = values.iter().sum::<f64>() / n;
        let spread = (values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n).sqrt();
        let largest = values.iter().fold(0.0, |m: f64, v| m.max((v - mean).abs()));
        (mean, spread, largest)
    };
    let draw = |config: ParallelLinearConfig| {
        let layer = config
            .with_initializer(initializer.clone())
            .init(&group, &autodiff())
            .unwrap();
        moments(layer.weight.val().into_data())
    };
    // The two fans differ, and the named layer is drawn with the global fans.
    let config = ParallelLinearConfig::new(300, 100).with_split(Split::Column);
    let (mean, spread, largest) = draw(config.clone().with_name("layer"));
    let (burn_mean, burn_spread, burn_largest) = draw(config);
    assert!(
        (mean - burn_mean).abs() <= 0.04 * burn_spread + 1e-6,
        "{mean} {burn_mean}"
    );
    assert!(
        (spread - burn_spread).abs() <= 0.03 * burn_spread + 1e-6,
        "{spread} {burn_spread}"
    );
    // Bounded distributions have the same bounds.
    if !matches!(
        initializer,
        Initializer::Normal { .. }
            | Initializer::KaimingNormal { .. }
            | Initializer::XavierNormal { .. }
    ) {
        assert!(
            (largest - burn_largest).abs() <= 0.03 * burn_largest + 1e-6,
            "{largest} {burn_largest}"
        );
    }
}

#[test]
fn tensors_of_any_rank_pass() {
    let seed = fresh_seed();
    let outputs = |ranks| {
        crate::support::on_ranks(ranks, seed, |group| {
            let config = ParallelLinearConfig::new(4, 8).with_name("layer");
            let layer = config.init(&group, &autodiff()).unwrap();
            let x = crate::support::leaf::<4>(crate::support::normal(&[2, 3, 1, 4], seed, "x"));
            let flat = x.clone().slice([0..1, 0..1, 0..1, 0..4]).reshape([4]);
            let four = layer.forward(x);
            let one = layer.forward(flat);
            (four.into_data(), one.into_data())
        })
    };
    let whole = outputs(1).remove(0);
    for (four, one) in outputs(4) {
        crate::support::assert_close("four dimensions", &four, &whole.0, 1e-6);
        crate::support::assert_close("one dimension", &one, &whole.1, 1e-6);
    }
}

#[rstest]
fn a_matrix_that_all_hold_sees_all_tokens_or_its_own(
    #[values(1, 2, 3, 4)] ranks: usize,
    #[values(true, false)] sequence_parallel: bool,
    #[values(true, false)] bias: bool,
) {
    let seed = fresh_seed();
    for [per_rank, batch, d_input, d_output] in [[2, 2, 8, 12], [1, 3, 7, 5]] {
        let seq = per_rank * ranks;
        let end = stream(sequence_parallel);
        let shapes = [[seq, batch, d_input], [seq, batch, d_output]];
        let setting = Setting {
            ranks,
            seed,
            shapes,
            ends: [end.clone(), end],
        };
        let config = ReplicatedLinearConfig::new(d_input, d_output)
            .with_bias(bias)
            .with_sequence_parallel(sequence_parallel)
            .with_name("layer");
        let build = |group: &_| config.init(group, &autodiff());
        assert_same_under_layout(&setting, build, ReplicatedLinear::forward);
    }
}
