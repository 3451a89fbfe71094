//! `ParallelDropout` drops the same elements under every layout.

use burn::{
    module::Module,
    prelude::Device,
    tensor::{Tensor, TensorData},
};
use megaburn_collective::Group;
use megaburn_mesh::Zigzag;
use megaburn_parallel::{
    ParallelDropout, ParallelDropoutConfig, ParallelError, PlanBuilder, Sharded, TokenBlock,
};
use rstest::rstest;

use crate::{
    support::{assert_bits, assert_close, autodiff, floats, fresh_seed, leaf, normal},
    trial::{Setting, stream},
};

#[derive(Module, Debug)]
struct Dropped {
    dropout: ParallelDropout,
}

impl Sharded for Dropped {
    fn shards(&self, _plan: &mut PlanBuilder) {} // no parameters
}

const PROB: f64 = 0.3;

fn dropout(group: &Group, name: &str) -> ParallelDropout {
    ParallelDropoutConfig::new(PROB, name.into())
        .init(group, Zigzag::WHOLE)
        .unwrap()
}

#[rstest]
fn every_layout_drops_the_same_elements(
    #[values(1, 2, 3, 4, 8)] ranks: usize,
    #[values(true, false)] sequence_parallel: bool,
    #[values((2, 2, 8), (3, 1, 7))] (per_rank, batch, hidden): (usize, usize, usize),
) {
    let block = TokenBlock {
        step: 5,
        global_batch: 4,
        first_sample: 1,
    };
    let shapes = [[per_rank * ranks, batch, hidden]; 2];
    let run = |ranks, sequence_parallel| {
        let config = ParallelDropoutConfig::new(PROB, "blocks.3.dropout".into())
            .with_sequence_parallel(sequence_parallel);
        let build = |group: &Group| {
            Ok::<_, ParallelError>(Dropped {
                dropout: config.init(group, Zigzag::WHOLE)?,
            })
        };
        let end = stream(sequence_parallel);
        Setting {
            ranks,
            seed: 3,
            shapes,
            ends: [end.clone(), end],
        }
        .run(build, |layer: &Dropped, x| {
            layer.dropout.forward(x, Some(block))
        })
    };
    let one = run(1, false);
    let many = run(ranks, sequence_parallel);
    assert_bits("output", &many.output, &one.output);
    assert_bits("gradient", &many.input_grad, &one.input_grad);
    let zeros = floats(&one.output)
        .iter()
        .filter(|&&value| value == 0.0)
        .count();
    assert!(
        zeros > 0 && zeros < floats(&one.output).len(),
        "{zeros} dropped"
    );
}

#[test]
fn micro_batches_drop_what_the_whole_batch_drops() {
    let seed = fresh_seed();
    let layer = dropout(&Group::single(seed), "dropout");
    let x = leaf::<3>(normal(&[5, 7, 6], seed, "x"));
    let part = |first_sample, samples| {
        let block = TokenBlock {
            step: 2,
            global_batch: 7,
            first_sample,
        };
        layer.forward(x.clone().narrow(1, first_sample, samples), Some(block))
    };
    let whole = part(0, 7).into_data();
    for sizes in [vec![1; 7], vec![2, 2, 2, 1], vec![3, 4]] {
        let mut first = 0;
        let mut parts = Vec::new();
        for size in sizes {
            parts.push(part(first, size));
            first += size;
        }
        assert_bits(
            "joined micro-batches",
            &Tensor::cat(parts, 1).into_data(),
            &whole,
        );
    }
}

#[test]
fn the_gradient_uses_the_mask_and_the_rate_is_right() {
    let seed = fresh_seed();
    let layer = dropout(&Group::single(seed), "dropout");
    let shape = [50, 8, 100];
    let block = TokenBlock {
        step: 0,
        global_batch: 8,
        first_sample: 0,
    };
    let x = leaf::<3>(normal(&shape, seed, "x"));
    let y = layer.forward(x.clone(), Some(block));
    let weight = Tensor::<3>::from_data(normal(&shape, seed, "weight"), &autodiff());
    let grad = x
        .grad(&(y.clone() * weight.clone()).sum().backward())
        .unwrap()
        .into_data();
    let kept = y
        .to_data()
        .iter::<f32>()
        .map(|y| if y == 0.0 { 0.0 } else { 1.0 })
        .collect();
    let kept: Vec<f32> = kept;
    let rate = 1.0 - f64::from(kept.iter().sum::<f32>()) / kept.len() as f64;
    assert!((rate - PROB).abs() < 0.012, "{rate}"); // 5 standard deviations
    let mask = Tensor::<3>::from_data(TensorData::new(kept, shape), &autodiff());
    let scaled = |x: Tensor<3>| (x * mask.clone() / (1.0 - PROB)).into_data();
    assert_close("values", &y.into_data(), &scaled(x), 1e-6);
    assert_close("gradient", &grad, &scaled(weight), 1e-6);
}

#[test]
fn another_step_path_or_seed_drops_other_elements() {
    let x = Tensor::<3>::ones([8, 2, 16], &autodiff());
    let drop = |seed, name, step| {
        let block = TokenBlock {
            step,
            global_batch: 2,
            first_sample: 0,
        };
        floats(
            &dropout(&Group::single(seed), name)
                .forward(x.clone(), Some(block))
                .into_data(),
        )
    };
    let base = drop(1, "a", 0);
    assert_eq!(base, drop(1, "a", 0));
    assert_ne!(base, drop(2, "a", 0));
    assert_ne!(base, drop(1, "b", 0));
    assert_ne!(base, drop(1, "a", 1));
}

#[test]
fn nothing_drops_in_evaluation_or_with_probability_zero() {
    let group = Group::single(1);
    let block = TokenBlock {
        step: 0,
        global_batch: 2,
        first_sample: 0,
    };
    let x = normal(&[8, 2, 16], fresh_seed(), "x");
    let plain = Tensor::<3>::from_data(x.clone(), &Device::flex());
    assert_bits(
        "evaluation",
        &dropout(&group, "a").forward(plain, Some(block)).into_data(),
        &x,
    );
    let none = ParallelDropoutConfig::new(0.0, "a".into())
        .init(&group, Zigzag::WHOLE)
        .unwrap();
    assert_bits(
        "no dropout",
        &none.forward(leaf(x.clone()), Some(block)).into_data(),
        &x,
    );
}
