//! Attention with a cache gives the same output token by token as in one pass.

use burn::{
    module::Module,
    nn::Initializer,
    prelude::Device,
    tensor::{Tensor, TensorData},
};
use megaburn_kernels::{RopeConfig, RopeTable};
use megaburn_parallel::{KvCache, Packed, QkNorm, QkNormKind, SelfAttentionConfig};
use rstest::rstest;

use crate::support::{assert_close, fresh_seed, normal, on_ranks};

const HIDDEN: usize = 12;

/// Tokens that each pass reads of each of three sequences; 0 leaves the sequence out of the pass.
const PASSES: [[usize; 3]; 5] = [[4, 1, 0], [1, 3, 6], [0, 1, 1], [1, 1, 1], [2, 0, 1]];

/// Three sequences of standard normal numbers.
pub(crate) fn inputs(seed: u64, hidden: usize) -> [TensorData; 3] {
    [0, 1, 2].map(|s| {
        let len = PASSES.iter().map(|pass| pass[s]).sum();
        normal(&[len, 1, hidden], seed, &format!("sequence {s}"))
    })
}

type Rope<'a> = Option<&'a RopeTable>;

/// Asserts that `cached`, pass by pass, gives the output of `forward` on full sequences.
pub(crate) fn assert_goes_on(
    inputs: &[Tensor<3>; 3],
    rope: impl Fn(Vec<usize>) -> Option<RopeTable>,
    forward: impl Fn(Tensor<3>, Rope) -> Tensor<3>,
    cached: impl Fn(Tensor<3>, Rope, &Packed, &mut KvCache) -> Tensor<3>,
) {
    let mut cache = KvCache::new(3);
    let mut read = [0; 3];
    let mut found: [Vec<Tensor<3>>; 3] = Default::default();
    for pass in PASSES {
        // The order of the sequences is arbitrary.
        let taken: Vec<usize> = [2, 0, 1].into_iter().filter(|&s| pass[s] > 0).collect();
        let packed = Packed::new(taken.iter().map(|&s| (s, read[s], pass[s])));
        let x = taken
            .iter()
            .map(|&s| inputs[s].clone().narrow(0, read[s], pass[s]));
        let x = Tensor::cat(x.collect(), 0);
        let y = cached(x, rope(packed.positions()).as_ref(), &packed, &mut cache);
        for segment in packed.segments() {
            let rows = segment.rows.clone();
            found[segment.sequence].push(y.clone().narrow(0, rows.start, rows.len()));
            read[segment.sequence] += rows.len();
        }
    }
    for (x, parts) in inputs.iter().zip(found) {
        let whole = forward(x.clone(), rope((0..x.dims()[0]).collect()).as_ref());
        let parts = Tensor::cat(parts, 0);
        assert_close("output", &parts.into_data(), &whole.into_data(), 1e-5);
    }
}

#[rstest]
fn sequences_of_any_length_go_on_side_by_side(
    #[values(1, 2, 4)] ranks: usize,
    #[values((4, 2, None, None), (8, 1, Some(3), Some(QkNormKind::Head)))]
    (heads, kv_heads, window, qk_norm): (usize, usize, Option<usize>, Option<QkNormKind>),
    #[values(true, false)] rotary: bool,
    #[values(true, false)] sinks: bool,
) {
    let seed = fresh_seed();
    let device = Device::flex();
    let inputs = inputs(seed, HIDDEN);
    on_ranks(ranks, seed, |group| {
        let mut config = SelfAttentionConfig::new(HIDDEN, heads, kv_heads, 4)
            .with_initializer(Initializer::Normal {
                mean: 0.0,
                std: 0.4,
            })
            .with_sequence_parallel(ranks > 1)
            .with_sinks(sinks)
            .with_name("attention");
        config.window = window;
        config.qk_norm = qk_norm.map(|kind| QkNorm::new().with_kind(kind));
        config.soft_cap = window.map(|_| 0.9);
        let layer = config.init(&group, &device.clone().autodiff()).unwrap();
        let layer = layer.valid().whole_sequence();
        let rope = |positions: Vec<usize>| {
            rotary.then(|| RopeConfig::new(4).init(positions, &device).unwrap())
        };
        let inputs = inputs
            .clone()
            .map(|data| Tensor::<3>::from_data(data, &device));

        assert_goes_on(
            &inputs,
            rope,
            |x, rope| layer.forward(x, rope),
            |x, rope, packed, cache| layer.forward_cached(x, rope, packed, cache),
        );
    });
}
