//! ALiBi against its definition in plain tensors, over ranks and with a cache.

use burn::{
    module::Module,
    nn::Initializer,
    prelude::Device,
    tensor::{Tensor, TensorData, activation},
};
use megaburn_collective::Group;
use megaburn_parallel::{
    Alibi, AlibiKeys, Attention, KvCache, Packed, PositionTables, SelfAttentionConfig,
};
use rstest::rstest;

use crate::support::{assert_close, autodiff, floats, fresh_seed, leaf, normal, on_ranks};

const HIDDEN: usize = 12;
const HEAD_DIM: usize = 6;

fn layer(heads: [usize; 2], scaled: bool, group: &Group, sp: bool) -> Attention {
    let wide = Initializer::Normal {
        mean: 0.0,
        std: 0.4,
    };
    let [heads, kv_heads] = heads;
    SelfAttentionConfig::new(HIDDEN, heads, kv_heads, HEAD_DIM)
        .with_initializer(wide.clone())
        .with_output_initializer(wide)
        .with_alibi(Some(Alibi::new().with_scaled(scaled)))
        .with_sequence_parallel(sp)
        .with_name("attention")
        .init(group, &autodiff())
        .unwrap()
}

fn tables(keys: &AlibiKeys) -> PositionTables<'_> {
    PositionTables {
        alibi: Some(keys),
        ..PositionTables::default()
    }
}

/// The scores of all pairs, with `slope * (key - query)` added, and their softmax.
fn plainly(layer: &Attention, x: Tensor<3>, heads: [usize; 2], scaled: bool) -> Tensor<3> {
    let [s, b, _] = x.dims();
    let [heads, kv_heads] = heads;
    let qkv = x.matmul(layer.qkv.as_ref().unwrap().weight.val().unsqueeze());
    let mut start = 0;
    let mut taken = |count: usize| {
        let part = qkv.clone().narrow(2, start, count * HEAD_DIM);
        start += count * HEAD_DIM;
        let part = part.reshape([s, b, count, 1, HEAD_DIM]);
        let part = part.repeat_dim(3, heads / count);
        part.reshape([s, b, heads, HEAD_DIM]).permute([1, 2, 0, 3])
    };
    let [q, k, v] = [heads, kv_heads, kv_heads].map(&mut taken);
    let scale = (HEAD_DIM as f64).powf(-0.5);
    let slopes = Alibi::new().with_scaled(scaled).slopes(heads);
    let mut biases = Vec::new();
    for slope in slopes {
        for (query, key) in (0..s).flat_map(|query| (0..s).map(move |key| (query, key))) {
            let bias = slope * (key as f64 - query as f64) * if scaled { scale } else { 1.0 };
            biases.push(if key > query { -1e30 } else { bias as f32 });
        }
    }
    let biases = Tensor::from_data(TensorData::new(biases, [1, heads, s, s]), &autodiff());
    let scores = q.matmul(k.swap_dims(2, 3)) * scale + biases;
    let y = activation::softmax(scores, 3)
        .matmul(v)
        .permute([2, 0, 1, 3]);
    let y = y.reshape([s, b, heads * HEAD_DIM]);
    y.matmul(layer.output.weight.val().unsqueeze())
}

#[rstest]
fn it_is_its_definition(
    #[values([4, 2], [6, 3], [3, 1])] heads: [usize; 2],
    #[values([5, 2], [9, 1])] tokens: [usize; 2],
    #[values(false, true)] scaled: bool,
) {
    let seed = fresh_seed();
    on_ranks(1, seed, |group| {
        let layer = layer(heads, scaled, &group, false);
        let [s, b] = tokens;
        let x = leaf::<3>(normal(&[s, b, HIDDEN], seed, "input"));
        let keys = AlibiKeys::new(&(0..s).collect::<Vec<_>>(), &autodiff());
        let weight = Tensor::<3>::from_data(normal(&[s, b, HIDDEN], seed, "weight"), &autodiff());
        let results = [
            layer.forward(x.clone(), tables(&keys)),
            plainly(&layer, x.clone(), heads, scaled),
        ];
        let [found, expected] = results.map(|y| {
            let grads = (y.clone() * weight.clone()).sum().backward();
            let qkv = layer.qkv.as_ref().unwrap().weight.val();
            [
                y.into_data(),
                x.grad(&grads).unwrap().into_data(),
                qkv.grad(&grads).unwrap().into_data(),
            ]
        });
        for (found, expected) in found.iter().zip(&expected) {
            assert_close("ALiBi", found, expected, 2e-5);
        }
    });
}

#[rstest]
#[case(2, [4, 2])]
#[case(3, [6, 3])]
fn ranks_have_the_slopes_of_their_heads(#[case] ranks: usize, #[case] heads: [usize; 2]) {
    let seed = fresh_seed();
    let run = |ranks: usize| {
        on_ranks(ranks, seed, |group| {
            let layer = layer(heads, false, &group, false);
            let x = Tensor::<3>::from_data(normal(&[7, 2, HIDDEN], seed, "input"), &autodiff());
            let keys = AlibiKeys::new(&[0, 1, 2, 3, 4, 5, 6], &autodiff());
            layer.forward(x, tables(&keys)).into_data()
        })
    };
    let expected = run(1).remove(0);
    for found in run(ranks) {
        assert_close("output", &found, &expected, 1e-5);
    }
}

#[test]
fn a_cache_goes_on_with_the_positions_of_its_keys() {
    let seed = fresh_seed();
    on_ranks(1, seed, |group| {
        let device = Device::flex();
        let layer = layer([4, 2], false, &group, false).valid().whole_sequence();
        let x = Tensor::<3>::from_data(normal(&[9, 1, HIDDEN], seed, "input"), &device);
        let whole = AlibiKeys::new(&(0..9).collect::<Vec<_>>(), &device);
        let expected = layer.forward(x.clone(), tables(&whole)).into_data();
        let mut cache = KvCache::new(1);
        let mut parts = Vec::new();
        for (start, len) in [(0, 4), (4, 1), (5, 4)] {
            let packed = Packed::new([(0, start, len)]);
            let keys = AlibiKeys::new(&packed.positions(), &device);
            let x = x.clone().narrow(0, start, len);
            parts.push(layer.forward_cached(x, tables(&keys), &packed, &mut cache));
        }
        let found = Tensor::cat(parts, 0).into_data();
        assert_eq!(floats(&found).len(), floats(&expected).len());
        assert_close("output", &found, &expected, 1e-5);
    });
}
