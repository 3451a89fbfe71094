//! Layers that multiply quantised matrices, against one rank.

use burn::tensor::{Tensor, TensorData};
use megaburn_collective::Group;
use megaburn_kernels::{
    LinearOptions, LinearQuantization, MatrixRole, Nvfp4, QuantizationRecipe, Scaling, SmallFloat,
    WeightSpan, quantized_linear, swiglu,
};
use megaburn_mesh::{Axis, FusedPart, ShardSpec, Zigzag};
use megaburn_parallel::{
    LinearPrecision, Mlp, MlpConfig, ParallelLinear, ParallelLinearConfig, PrecisionScope,
    ReplicatedLinear, ReplicatedLinearConfig, TokenBlock, quantized_layers,
};
use rstest::rstest;

use crate::{
    support::{assert_close, autodiff, cut, floats, fresh_seed, join, leaf, normal, on_ranks},
    trial::{End, Setting, assert_same_under_layout, stream},
};

fn precision(scaling: Scaling) -> LinearPrecision {
    if let Scaling::Nvfp4(parts) = scaling {
        return LinearPrecision::new(QuantizationRecipe::nvfp4(parts));
    }
    LinearPrecision::new(QuantizationRecipe {
        scaling,
        forward: SmallFloat::E4m3,
        gradients: SmallFloat::E5m2,
        power_of_two_scales: false,
    })
}

const TENSOR: Scaling = Scaling::Tensor;
const NVFP4: Scaling = Scaling::Nvfp4(Nvfp4 {
    stochastic_rounding: true,
    random_hadamard: true,
    two_dimensional_weights: true,
});

/// All ranks derive the same scales as one rank and so quantise to the same numbers: the results
/// differ by the order of sums only.
#[rstest]
fn a_quantised_column_split_is_the_whole_layer(
    #[values(
        (TENSOR, 3, [6, 2, 10, 24]),
        (TENSOR, 4, [8, 1, 7, 20]),
        (Scaling::Blocks, 2, [4, 3, 40, 256]),
        (Scaling::Microscaling, 3, [6, 1, 50, 96]),
        (NVFP4, 2, [4, 3, 40, 64]),
        (NVFP4, 3, [6, 3, 24, 48])
    )]
    (scaling, ranks, sizes): (Scaling, usize, [usize; 4]),
    #[values(false, true)] delayed: bool,
    #[values(false, true)] sequence_parallel: bool,
    #[values(false, true)] gather_output: bool,
) {
    let [seq, batch, d_input, d_output] = sizes;
    let config = ParallelLinearConfig::new(d_input, d_output)
        .with_gather_output(gather_output)
        .with_sequence_parallel(sequence_parallel)
        .with_precision(Some(precision(scaling).with_delayed(delayed)))
        .with_name("layer");
    let output = if gather_output {
        End::Whole
    } else {
        End::Features(vec![FusedPart::new(d_output)])
    };
    let setting = Setting {
        ranks,
        seed: fresh_seed(),
        shapes: [[seq, batch, d_input], [seq, batch, d_output]],
        ends: [stream(sequence_parallel), output],
    };
    let build = |group: &_| config.init(group, &autodiff());
    assert_same_under_layout(&setting, build, ParallelLinear::forward);
}

#[rstest]
fn a_quantised_row_split_is_the_whole_layer(
    #[values(
        (TENSOR, 3, [6, 2, 24, 10]),
        (TENSOR, 4, [8, 1, 20, 7]),
        (Scaling::Blocks, 2, [4, 3, 256, 40]),
        (Scaling::Microscaling, 3, [6, 1, 96, 50]),
        (NVFP4, 2, [4, 3, 64, 40]),
        (NVFP4, 3, [6, 3, 48, 24])
    )]
    (scaling, ranks, sizes): (Scaling, usize, [usize; 4]),
    #[values(false, true)] delayed: bool,
    #[values(false, true)] sequence_parallel: bool,
) {
    let [seq, batch, d_input, d_output] = sizes;
    let config = ParallelLinearConfig::row(d_input, d_output)
        .with_sequence_parallel(sequence_parallel)
        .with_precision(Some(precision(scaling).with_delayed(delayed)))
        .with_name("layer");
    let input = End::Features(vec![FusedPart::new(d_input)]);
    let setting = Setting {
        ranks,
        seed: fresh_seed(),
        shapes: [[seq, batch, d_input], [seq, batch, d_output]],
        ends: [input, stream(sequence_parallel)],
    };
    let build = |group: &_| config.init(group, &autodiff());
    assert_same_under_layout(&setting, build, ParallelLinear::forward);
}

/// Gate and up are one matrix, and so are queries, keys and values: one scale each. Random numbers are
/// those of the whole matrix, of which a rank holds two parts.
#[rstest]
fn quantised_fused_parts_have_one_scale(
    #[values((TENSOR, 3), (NVFP4, 16))] (scaling, unit): (Scaling, usize),
    #[values(2, 4)] ranks: usize,
) {
    let parts = [FusedPart::units(8, unit), FusedPart::units(4, unit)];
    let d_output = parts.iter().map(FusedPart::size).sum();
    let config = ParallelLinearConfig::column(10, d_output)
        .with_parts(parts)
        .with_precision(Some(precision(scaling)))
        .with_name("layer");
    let setting = Setting {
        ranks,
        seed: fresh_seed(),
        shapes: [[4, 2, 10], [4, 2, d_output]],
        ends: [End::Whole, End::Features(parts.to_vec())],
    };
    let build = |group: &_| config.init(group, &autodiff());
    assert_same_under_layout(&setting, build, ParallelLinear::forward);
}

#[rstest]
fn a_quantised_matrix_that_all_hold_is_the_layer_of_one_rank(
    #[values(2, 3)] ranks: usize,
    #[values(false, true)] sequence_parallel: bool,
) {
    let shapes = [[6, 2, 9], [6, 2, 5]];
    let end = stream(sequence_parallel);
    let setting = Setting {
        ranks,
        seed: fresh_seed(),
        shapes,
        ends: [end.clone(), end],
    };
    let config = ReplicatedLinearConfig::new(9, 5)
        .with_bias(true)
        .with_sequence_parallel(sequence_parallel)
        .with_precision(Some(precision(TENSOR)))
        .with_name("layer");
    let build = |group: &_| config.init(group, &autodiff());
    assert_same_under_layout(&setting, build, ReplicatedLinear::forward);
}

/// Column and row, with an activation between them whose rounding may decide a tie: a number in
/// many hundreds would then differ by 1/16.
#[rstest]
fn a_quantised_mlp_is_that_of_one_rank(
    #[values(false, true)] recompute: bool,
    #[values(2, 4)] ranks: usize,
) {
    let config = MlpConfig::gated(24, 40)
        .with_precision(Some(precision(TENSOR)))
        .with_recompute(recompute)
        .with_name("mlp");
    let shapes = [[4, 2, 24]; 2];
    let setting = Setting {
        ranks: 1,
        seed: fresh_seed(),
        shapes,
        ends: [End::Whole, End::Whole],
    };
    let run = |ranks| {
        let build = |group: &_| config.init(group, &autodiff());
        let forward = |mlp: &Mlp, x| mlp.forward(x);
        let setting = Setting {
            ranks,
            ..setting.clone()
        };
        setting.run(build, forward)
    };
    let (one, many) = (run(1), run(ranks));
    assert_close("output", &many.output, &one.output, 5e-3);
    assert_close("input gradient", &many.input_grad, &one.input_grad, 5e-3);
    for (path, grad) in &one.grads {
        assert_close(path, &many.grads[path], grad, 5e-3);
    }
}

/// The magnitudes that the activation's kernels find are those that the matrices find themselves.
#[rstest]
fn a_quantised_mlp_is_its_parts_to_the_bit(
    #[values(false, true)] recompute: bool,
    #[values(false, true)] delayed: bool,
    #[values(false, true)] sequence_parallel: bool,
) {
    let config = MlpConfig::gated(24, 40)
        .with_precision(Some(precision(TENSOR).with_delayed(delayed)))
        .with_recompute(recompute)
        .with_sequence_parallel(sequence_parallel)
        .with_name("mlp");
    let setting = Setting {
        ranks: 2,
        seed: fresh_seed(),
        shapes: [[4, 2, 24]; 2],
        ends: [stream(sequence_parallel), stream(sequence_parallel)],
    };
    let run = |forward: fn(&Mlp, Tensor<3>) -> Tensor<3>| {
        setting.run(|group: &_| config.init(group, &autodiff()), forward)
    };
    let found = run(|mlp, x| mlp.forward(x));
    let expected = run(|mlp, x| mlp.down.forward(swiglu(mlp.up.forward(x))));
    assert_eq!(floats(&found.output), floats(&expected.output));
    assert_eq!(floats(&found.input_grad), floats(&expected.input_grad));
    for (path, grad) in &expected.grads {
        assert_eq!(floats(&found.grads[path]), floats(grad), "{path}");
    }
}

/// The input of this rank's row split, and its part of the output.
fn row_part(group: &Group, seed: u64, forward: impl Fn(Tensor<3>) -> Tensor<3>) -> TensorData {
    let shape = [4, 2, 24];
    let parts = [FusedPart::new(24)];
    let spec = ShardSpec::split(&shape, 2, &parts, Axis::Tp, group.rank(), group.size()).unwrap();
    forward(leaf(cut(&normal(&shape, seed, "input"), &spec, false))).into_data()
}

/// Planted omission: ranks that derive a scale from their own part differ from one rank by far more
/// than the tolerance of the tests above.
#[test]
fn scales_that_ranks_do_not_share_are_caught() {
    let seed = fresh_seed();
    let config = ParallelLinearConfig::row(24, 10)
        .with_bias(false)
        .with_precision(Some(precision(TENSOR)))
        .with_name("layer");
    let run = |ranks, shares| {
        let all = on_ranks(ranks, seed, |group| {
            let layer = config.init(&group, &autodiff()).unwrap();
            row_part(&group, seed, |x| match shares {
                true => layer.forward(x),
                false => {
                    let own = LinearQuantization::new(precision(TENSOR).recipe);
                    let options = LinearOptions::default();
                    let y = quantized_linear(x, layer.weight.val(), None, options, own);
                    megaburn_collective::region::reduce_from(y, &group)
                }
            })
        });
        floats(&all[0])
    };
    let one = run(1, true);
    let distance = |other: Vec<f32>| {
        let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| x * x).sum::<f32>().sqrt();
        let off = norm(&mut one.iter().zip(&other).map(|(a, b)| a - b));
        off / norm(&mut one.iter().copied())
    };
    let shared = distance(run(2, true));
    let alone = distance(run(2, false));
    assert!(shared < 3e-6, "{shared}");
    assert!(alone > 3e-3, "{alone}");
}

/// Tokens on several ranks, as with context parallelism: each rank has the whole weight.
#[rstest]
fn ranks_with_other_tokens_share_the_scales_of_tokens(
    #[values(true, false)] is_column: bool,
    #[values(true, false)] shares: bool,
) {
    let seed = fresh_seed();
    let [d_input, d_output] = [12, 10];
    let config = if is_column {
        ParallelLinearConfig::column(d_input, d_output)
    } else {
        ParallelLinearConfig::row(d_input, d_output)
    };
    let config = config
        .with_bias(false)
        .with_precision(Some(precision(TENSOR)))
        .with_name("layer");
    let run = |ranks| {
        let all = on_ranks(ranks, seed, |cp| {
            let alone = Group::single(seed);
            let layer = config.init(&alone, &autodiff()).unwrap();
            let layer = if shares {
                layer.in_scope(&PrecisionScope::new(cp.clone(), Zigzag::WHOLE))
            } else {
                layer
            };
            let spec = |features| {
                let shape = [8, 2, features];
                let end = End::Sequence;
                (shape, end.spec(shape, cp.rank(), cp.size()))
            };
            let (shape, input) = spec(d_input);
            let x = leaf::<3>(cut(&normal(&shape, seed, "input"), &input, false));
            let y = layer.forward(x.clone());
            let (shape, output) = spec(d_output);
            let dy = cut(&normal(&shape, seed, "weight"), &output, false);
            let grads = (y.clone() * Tensor::from_data(dy, &autodiff()))
                .sum()
                .backward();
            let dx = x.grad(&grads).unwrap().into_data();
            ((output, y.into_data()), (input, dx))
        });
        let (y, dx): (Vec<_>, Vec<_>) = all.into_iter().unzip();
        [join("output", &y), join("input gradient", &dx)].map(|data| floats(&data))
    };
    let [one, two] = [run(1), run(2)];
    for (one, two) in one.iter().zip(&two) {
        let off = one.iter().zip(two).map(|(a, b)| (a - b).abs());
        let off = off.fold(0.0, f32::max);
        assert_eq!(off < 1e-5, shares, "{off}");
    }
}

/// Splits that would cut a block are refused with the numbers, and a remedy.
#[rstest]
#[case(
    Scaling::Blocks,
    ParallelLinearConfig::column(8, 192),
    "blocks of 128 output features share a scale, and 2 ranks would cut them: each has 96 of 192"
)]
#[case(
    Scaling::Blocks,
    ParallelLinearConfig::row(192, 8),
    "each has 96 of 192 features; use sizes that are multiples of 256"
)]
#[case(Scaling::Microscaling, ParallelLinearConfig::column(8, 80).with_parts([FusedPart::new(64), FusedPart::new(16)]), "each has 8 of 16 features; use sizes that are multiples of 64")]
fn splits_that_cut_a_block_are_refused(
    #[case] scaling: Scaling,
    #[case] config: ParallelLinearConfig,
    #[case] message: &str,
) {
    let config = config
        .with_precision(Some(precision(scaling)))
        .with_name("layer");
    let errors = on_ranks(2, 0, |group| config.init(&group, &autodiff()).err());
    for error in errors {
        let error = error.unwrap().to_string();
        assert!(error.contains(message), "{error}");
    }
    config.init(&Group::single(0), &autodiff()).unwrap();
}

/// Delayed scaling records the magnitudes of training passes, and a
/// number that is not finite makes the result NaN.
#[test]
fn delayed_scales_are_those_that_are_set() {
    let config = ParallelLinearConfig::new(4, 3)
        .with_bias(false)
        .with_precision(Some(precision(TENSOR).with_delayed(true)))
        .with_name("layer");
    let layer = config.init(&Group::single(1), &autodiff()).unwrap();
    let layers = quantized_layers(&layer);
    let input = layers[""].delayed(MatrixRole::Input);
    let x = normal(&[2, 1, 4], 7, "x");
    let inner = Tensor::<3>::from_data(x.clone(), &autodiff().inner());
    let valid = burn::module::Module::valid(&layer);
    let by_own = valid.forward(inner.clone()).into_data();
    assert!(input.take_current().is_none(), "it was recorded");
    let y = layer.forward(leaf::<3>(x.clone()));
    assert_eq!(y.into_data(), by_own);
    let largest = floats(&x)
        .into_iter()
        .fold(0.0f32, |most, x| most.max(x.abs()));
    let current = input.take_current().unwrap();
    assert_eq!(floats(&current.clone().into_data()), [largest]);
    // A weight that is kept for an evaluation would not be recorded in the pass that is trained on.
    let span = WeightSpan::default();
    let scoped = layer.clone().in_scope(&PrecisionScope {
        weights: span.clone(),
        ..PrecisionScope::new(Group::single(1), Zigzag::WHOLE)
    });
    {
        let _unchanged = span.unchanged();
        let in_span = burn::module::Module::valid(&scoped).forward(inner.clone());
        assert_eq!(in_span.into_data(), by_own);
        scoped.forward(leaf::<3>(x.clone()));
        let layers = quantized_layers(&scoped);
        let weight = layers[""].delayed(MatrixRole::Weight).take_current();
        assert!(weight.is_some(), "the weight was not recorded");
    }
    // A scale for magnitudes of up to a tenth saturates the larger ones.
    input.set_derived(Some(current.clone() * 0.1));
    let saturated = valid.forward(inner.clone()).into_data();
    let norm = |data: &TensorData| floats(data).iter().map(|x| x * x).sum::<f32>();
    assert!(norm(&saturated) < 0.5 * norm(&by_own));
    let broken = inner * f32::INFINITY;
    assert!(
        floats(&valid.forward(broken).into_data())
            .iter()
            .all(|y| y.is_nan())
    );
}

/// A precision that is set holds for all clones of the layer, as for the one in a model, and only
/// passes that are trained on are counted.
#[test]
fn the_precision_of_a_layer_can_change() {
    let config = ParallelLinearConfig::new(40, 24).with_name("layer");
    let plain = config.init(&Group::single(1), &autodiff()).unwrap();
    let config = config.with_precision(Some(precision(TENSOR)));
    let layer = config.init(&Group::single(1), &autodiff()).unwrap();
    let [switch] = quantized_layers(&layer)
        .into_values()
        .collect::<Vec<_>>()
        .try_into()
        .unwrap();
    let x = || leaf::<3>(normal(&[5, 2, 40], 7, "x"));
    let [quantised, exact] = [&layer, &plain].map(|layer| layer.forward(x()).into_data());
    assert_ne!(quantised, exact);
    assert!(switch.counts().take(MatrixRole::Input).is_none());
    switch.set_counted(true);
    layer.clone().forward(x());
    let counts = switch.counts().take(MatrixRole::Input).unwrap();
    let nonzero = floats(&counts.numbers.into_data())[2];
    assert_eq!(nonzero, (5 * 2 * 40) as f32);
    burn::module::Module::valid(&layer).forward(x().inner());
    switch.set(None);
    assert_eq!(layer.clone().forward(x()).into_data(), exact);
    assert!(switch.counts().take(MatrixRole::Input).is_none());
    switch.set(Some(precision(Scaling::Microscaling)));
    let blocks = layer.forward(x()).into_data();
    assert_ne!(blocks, exact);
    assert_ne!(blocks, quantised);
}

/// The rounding of a gradient depends on the step, and on the micro-batch in it.
#[test]
fn micro_batches_are_rounded_by_their_own_numbers() {
    let scope = PrecisionScope::new(Group::single(3), Zigzag::WHOLE);
    let config = ParallelLinearConfig::new(8, 32).with_precision(Some(precision(NVFP4)));
    let layer = config.init(&Group::single(3), &autodiff()).unwrap();
    let layer = layer.in_scope(&scope);
    let [x, dy] = [[4, 1, 8], [4, 1, 32]].map(|shape| normal(&shape, 5, "x"));
    let gradient = |step, first_sample| {
        scope
            .current
            .set(Some(TokenBlock::new(step, 2, first_sample)));
        let x = leaf::<3>(x.clone());
        let y = layer.forward(x.clone());
        scope.current.set(Some(TokenBlock::new(99, 2, 0)));
        let dy = Tensor::from_data(dy.clone(), &autodiff());
        floats(&x.grad(&(y * dy).sum().backward()).unwrap().into_data())
    };
    let first = gradient(1, 0);
    assert_eq!(gradient(1, 0), first);
    assert_ne!(gradient(1, 1), first);
    assert_ne!(gradient(2, 0), first);
}
