//! Layers that gather quantised shards of tokens, against layers that quantise what they gathered.

use std::sync::Arc;

use burn::tensor::{Int, Tensor};
use megaburn_autograd::RecomputeFn;
use megaburn_collective::{
    Group,
    region::{gather_from_sequence, max_over, reduce_scatter_to_sequence},
};
use megaburn_kernels::{
    AmaxReduction, AmaxSource, LinearOptions, LinearQuantization, MatrixRole, QuantizationRecipe,
    Scaling, SequenceShards, ShardCollectives, SmallFloat, quantized_linear,
};
use megaburn_mesh::FusedPart;
use megaburn_parallel::{
    LinearPrecision, ParallelLinear, ParallelLinearConfig, Recomputable, Split, quantized_layers,
};
use rstest::rstest;

use crate::{
    support::{assert_bits, autodiff, cut, floats, fresh_seed, leaf, normal, on_ranks},
    trial::{End, Setting, Trial},
};

fn recipe(scaling: Scaling) -> QuantizationRecipe {
    QuantizationRecipe {
        scaling,
        forward: SmallFloat::E4m3,
        gradients: SmallFloat::E5m2,
        power_of_two_scales: false,
    }
}

fn tensorwise(gather: bool) -> LinearPrecision {
    LinearPrecision::new(recipe(Scaling::Tensor)).with_fp8_sequence_gather(gather)
}

/// Where the magnitude comes from that a scale is derived from.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Scales {
    Current,
    /// The first step of delayed scaling.
    First,
    /// A step with a magnitude of steps before, which the largest elements exceed.
    Later,
}

/// A layer with sequence parallelism and its ends.
fn layer(split: Split, [d_input, d_output]: [usize; 2]) -> (ParallelLinearConfig, [End; 2]) {
    let features = |size| End::Features(vec![FusedPart::new(size)]);
    let (config, ends) = match split {
        Split::Column => (
            ParallelLinearConfig::column(d_input, d_output),
            [End::Sequence, features(d_output)],
        ),
        Split::Row => (
            ParallelLinearConfig::row(d_input, d_output),
            [features(d_input), End::Sequence],
        ),
    };
    (config.with_sequence_parallel(true).with_name("layer"), ends)
}

fn assert_same_bits(found: &Trial, expected: &Trial) {
    assert_bits("output", &found.output, &expected.output);
    assert_bits("input gradient", &found.input_grad, &expected.input_grad);
    assert!(!expected.grads.is_empty());
    for (path, grad) in &expected.grads {
        assert_bits(path, &found.grads[path], grad);
    }
}

/// The layer applied to its input, which backward may recompute.
fn applied(layer: &ParallelLinear, x: Tensor<3>, recomputes: bool) -> Tensor<3> {
    if !recomputes {
        return layer.forward(x);
    }
    let inner = x.clone().inner();
    let again = RecomputeFn::new(move || inner.clone());
    layer.forward(Recomputable::recomputed(x, again))
}

#[rstest]
fn shards_that_are_gathered_in_fp8_change_no_bit(
    #[values(Split::Column, Split::Row)] split: Split,
    #[values((2, [6, 2], [10, 24]), (2, [2, 1], [34, 6]), (4, [12, 3], [20, 8]))]
    (ranks, [seq, batch], [d_input, d_output]): (usize, [usize; 2], [usize; 2]),
    #[values(Scales::Current, Scales::First, Scales::Later)] scales: Scales,
    #[values(false, true)] recomputes: bool,
) {
    let (config, ends) = layer(split, [d_input, d_output]);
    let setting = Setting {
        ranks,
        seed: fresh_seed(),
        shapes: [[seq, batch, d_input], [seq, batch, d_output]],
        ends,
    };
    let run = |gather| {
        let precision = tensorwise(gather).with_delayed(scales != Scales::Current);
        let config = config.clone().with_precision(Some(precision));
        let build = |group: &Group| {
            let layer = config.init(group, &autodiff())?;
            if scales == Scales::Later {
                let known = &quantized_layers(&layer)[""];
                for role in [MatrixRole::Input, MatrixRole::Weight, MatrixRole::Gradient] {
                    let amax = Tensor::from_floats([0.4], &autodiff().inner());
                    known.delayed(role).set_derived(Some(amax));
                }
            }
            Ok(layer)
        };
        setting.run(build, |layer, x| applied(layer, x, recomputes))
    };
    assert_same_bits(&run(true), &run(false));
}

/// A layer changes between gathering in FP8 and in the type of the parameters with its precision.
#[rstest]
fn what_is_gathered_follows_the_precision(#[values(Split::Column, Split::Row)] split: Split) {
    let (config, ends) = layer(split, [64, 64]);
    let setting = Setting {
        ranks: 2,
        seed: fresh_seed(),
        shapes: [[4, 2, 64]; 2],
        ends,
    };
    let run = |built: Option<LinearPrecision>, set: Option<LinearPrecision>| {
        let config = config.clone().with_precision(built);
        let build = |group: &Group| {
            let layer = config.init(group, &autodiff())?;
            for layer in quantized_layers(&layer).into_values() {
                layer.set(set);
            }
            Ok(layer)
        };
        setting.run(build, ParallelLinear::forward)
    };
    let blocks = LinearPrecision::new(recipe(Scaling::Microscaling));
    let [quantised, plain] = [Some(tensorwise(true)), None].map(|of| run(of, of));
    assert_ne!(floats(&quantised.output), floats(&plain.output));
    for set in [None, Some(blocks), Some(tensorwise(false))] {
        assert_same_bits(&run(Some(tensorwise(true)), set), &run(set, set));
    }
    let from_blocks = run(Some(blocks), Some(tensorwise(true)));
    assert_same_bits(&from_blocks, &quantised);
}

/// The collectives of a group, on the CPU.
#[derive(Debug)]
struct Members(Group);

impl ShardCollectives for Members {
    fn num_ranks(&self) -> usize {
        self.0.size()
    }

    fn gather(&self, own: Tensor<2>) -> Tensor<2> {
        gather_from_sequence(own, &self.0)
    }

    fn gather_bytes(&self, _: Tensor<2, Int>) -> Tensor<2, Int> {
        unreachable!("CPUs gather numbers")
    }

    fn reduce_scatter(&self, partial: Tensor<2>) -> Tensor<2> {
        reduce_scatter_to_sequence(partial, &self.0)
    }
}

/// Planted omission: ranks that quantise their shards by largest magnitudes of their own.
#[rstest]
fn scales_of_shards_that_ranks_do_not_share_are_caught(
    #[values(MatrixRole::Input, MatrixRole::Gradient)] of: MatrixRole,
) {
    let seed = fresh_seed();
    let run = |shares: Option<bool>| {
        let all = on_ranks(2, seed, |group| {
            let source = |role: MatrixRole| {
                let group = group.clone();
                let reduction = AmaxReduction::new(move |own| max_over(own, &group));
                AmaxSource::Current(Some(reduction).filter(|_| role == of && shares == Some(true)))
            };
            let quantization = LinearQuantization {
                input: source(MatrixRole::Input),
                gradient: source(MatrixRole::Gradient),
                shards: shares.map(|_| SequenceShards {
                    of,
                    over: Arc::new(Members(group.clone())),
                }),
                ..LinearQuantization::new(recipe(Scaling::Tensor))
            };
            let whole = |what: &str, cols| {
                let spec = End::Sequence.spec([8, 1, cols], group.rank(), group.size());
                // Shards whose largest magnitudes differ.
                let factor = 1.0 + 0.37 * group.rank() as f64;
                let own = cut(&normal(&[8, 1, cols], seed, what), &spec, false);
                let own = Tensor::<3>::from_data(own, &autodiff().inner()) * factor;
                gather_from_sequence(own, &group).into_data()
            };
            let shard = |data| {
                let spec = End::Sequence.spec([8, 1, 24], group.rank(), group.size());
                cut(&data, &spec, false)
            };
            let w = leaf::<2>(normal(&[24, 24], seed, "w"));
            let [x, dy] = ["x", "dy"].map(|what| whole(what, 24));
            let is_input = shares.is_some() && of == MatrixRole::Input;
            let is_gradient = shares.is_some() && of == MatrixRole::Gradient;
            let x = leaf::<3>(if is_input { shard(x) } else { x });
            let dy = Tensor::from_data(if is_gradient { shard(dy) } else { dy }, &autodiff());
            let options = LinearOptions::default();
            let y = quantized_linear(x, w.clone(), None, options, quantization);
            let grads = (y * dy).sum().backward();
            floats(&w.grad(&grads).unwrap().into_data())
        });
        all.into_iter().next().unwrap()
    };
    let whole = run(None);
    let distance = |other: &[f32]| {
        let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| x * x).sum::<f32>().sqrt();
        let off = norm(&mut whole.iter().zip(other).map(|(a, b)| a - b));
        off / norm(&mut whole.iter().copied())
    };
    assert_eq!(distance(&run(Some(true))), 0.0);
    let alone = distance(&run(Some(false)));
    assert!(alone > 3e-3, "{alone}");
}

/// A scale that is derived from other steps does not hide what is not finite in another rank's shard.
#[rstest]
fn what_is_not_finite_in_a_shard_reaches_all_ranks(#[values(f32::INFINITY, f32::NAN)] broken: f32) {
    let (config, _) = layer(Split::Column, [12, 6]);
    let config = config.with_precision(Some(tensorwise(true).with_delayed(true)));
    let seed = fresh_seed();
    let outputs = on_ranks(2, seed, |group| {
        let layer = config.init(&group, &autodiff()).unwrap();
        let amax = Tensor::from_floats([3.0], &autodiff().inner());
        let input = quantized_layers(&layer)[""]
            .delayed(MatrixRole::Input)
            .clone();
        input.set_derived(Some(amax));
        let x = leaf::<3>(normal(&[2, 1, 12], seed, "x"));
        let factor = if group.rank() == 1 { broken } else { 1.0 };
        floats(&layer.forward(x * factor).into_data())
    });
    for output in outputs {
        // Four tokens with three of the features each.
        let (first, second) = output.split_at(2 * 3);
        assert!(first.iter().all(|y| y.is_finite()));
        assert!(second.iter().all(|y| y.is_nan()));
    }
}
