//! Attention with a cache reads token by token what it reads at once.

use burn::{
    module::Module,
    nn::Initializer,
    prelude::Device,
    tensor::{Distribution, Tensor},
};
use megaburn_kernels::RopeConfig;
use megaburn_parallel::{KvCache, Packed, SelfAttention, SelfAttentionConfig};
use rstest::rstest;

use crate::support::{assert_close, fresh_seed, on_ranks};

const HIDDEN: usize = 12;

/// How each of three sequences is read: tokens a pass, nothing where a pass leaves it out.
const PASSES: [[usize; 3]; 5] = [[4, 1, 0], [1, 3, 6], [0, 1, 1], [1, 1, 1], [2, 0, 1]];

#[rstest]
fn sequences_of_any_length_go_on_side_by_side(
    #[values(1, 2, 4)] ranks: usize,
    #[values((4, 2, None, None), (8, 1, Some(3), Some(1e-6)))] (heads, kv_heads, window, qk_norm): (
        usize,
        usize,
        Option<usize>,
        Option<f64>,
    ),
    #[values(true, false)] rotary: bool,
) {
    let seed = fresh_seed();
    let device = Device::flex();
    let lens = [0, 1, 2].map(|s| PASSES.iter().map(|pass| pass[s]).sum::<usize>());
    let inputs = lens.map(|len| {
        Tensor::<3>::random([len, 1, HIDDEN], Distribution::Normal(0.0, 1.0), &device).into_data()
    });
    on_ranks(ranks, seed, |group| {
        let mut config = SelfAttentionConfig::new(HIDDEN, heads, kv_heads, 4)
            .with_initializer(Initializer::Normal { mean: 0.0, std: 0.4 })
            .with_sequence_parallel(ranks > 1)
            .with_name("attention");
        (config.window, config.qk_norm) = (window, qk_norm);
        let layer = config.init(&group, &device.clone().autodiff()).unwrap();
        let layer: SelfAttention = layer.valid().whole_sequence();
        let rope = |positions: Vec<usize>| {
            rotary.then(|| RopeConfig::new(4).init(positions, &device).unwrap())
        };
        let inputs = inputs.clone().map(|data| Tensor::<3>::from_data(data, &device));

        let mut cache = KvCache::new(3);
        let mut read = [0; 3];
        let mut found: [Vec<Tensor<3>>; 3] = Default::default();
        for pass in PASSES {
            // Any order of the sequences will do.
            let taken: Vec<usize> = [2, 0, 1].into_iter().filter(|&s| pass[s] > 0).collect();
            let packed = Packed::new(taken.iter().map(|&s| (s, read[s], pass[s])));
            let x = taken.iter().map(|&s| inputs[s].clone().narrow(0, read[s], pass[s]));
            let rope = rope(packed.positions());
            let x = Tensor::cat(x.collect(), 0);
            let y = layer.forward_cached(x, rope.as_ref(), &packed, &mut cache);
            for segment in packed.segments() {
                let rows = segment.rows.clone();
                found[segment.sequence].push(y.clone().narrow(0, rows.start, rows.len()));
                read[segment.sequence] += rows.len();
            }
        }
        for (sequence, parts) in found.into_iter().enumerate() {
            let rope = rope((0..lens[sequence]).collect());
            let whole = layer.forward(inputs[sequence].clone(), rope.as_ref());
            let parts = Tensor::cat(parts, 0);
            assert_close("output", &parts.into_data(), &whole.into_data(), 1e-5);
        }
    });
}
