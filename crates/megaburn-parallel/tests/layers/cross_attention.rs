//! Attention of a decoder to the output of an encoder.

use std::sync::Arc;

use burn::{
    module::{Module, Param},
    nn::Initializer,
    prelude::Device,
    tensor::{Tensor, TensorData, activation},
};
use megaburn_collective::Group;
use megaburn_mesh::ShardSpec;
use megaburn_parallel::{
    BatchContext, CrossAttention, CrossAttentionConfig, EncoderRows, KvCache, Packed,
    ParallelError, PlanBuilder, SelectiveSave, Sharded, TokenBlock, recomputed,
};
use rstest::rstest;

use crate::{
    support::{assert_bits, assert_close, autodiff, cut, fresh_seed, leaf, normal, on_ranks},
    trial::{Setting, Trial, assert_same_under_layout, stream},
};

const HIDDEN: usize = 12;
const HEAD_DIM: usize = 4;

fn config(heads: [usize; 2]) -> CrossAttentionConfig {
    let wide = Initializer::Normal {
        mean: 0.0,
        std: 0.4,
    };
    CrossAttentionConfig::new(HIDDEN, heads[0], HEAD_DIM)
        .with_num_kv_heads(Some(heads[1]))
        .with_initializer(wide.clone())
        .with_output_initializer(wide)
        .with_name("cross")
}

/// The layer with the encoder's output as a parameter, so that its gradient is compared too.
#[derive(Module, Debug)]
struct Crossed {
    cross: CrossAttention,
    memory: Param<Tensor<3>>,
    #[module(skip)]
    spec: ShardSpec,
}

impl Crossed {
    fn new(
        config: &CrossAttentionConfig,
        [s_enc, b]: [usize; 2],
        group: &Group,
    ) -> Result<Self, ParallelError> {
        let shape = [s_enc, b, HIDDEN];
        let end = stream(config.sequence_parallel);
        let spec = end.spec(shape, group.rank(), group.size());
        let memory = cut(&normal(&shape, group.seed(), "memory"), &spec, false);
        Ok(Self {
            cross: config.init(group, &autodiff())?,
            memory: Param::from_data(memory, &autodiff()),
            spec,
        })
    }
}

impl Sharded for Crossed {
    fn shards(&self, plan: &mut PlanBuilder) {
        plan.child("cross", &self.cross);
        plan.param("memory", &self.spec);
    }
}

fn batch(s_enc: usize, held: &[usize]) -> BatchContext {
    let held = (!held.is_empty()).then(|| Arc::from(held));
    BatchContext {
        encoder: Some(EncoderRows::new(s_enc, held)),
        ..BatchContext::default()
    }
}

fn trained(batch: BatchContext) -> BatchContext {
    let block = TokenBlock {
        step: 3,
        global_batch: 5,
        first_sample: 1,
    };
    BatchContext {
        block: Some(block),
        ..batch
    }
}

/// The layer by its definition: keys from position `held` of a row on are not seen.
fn plainly(layer: &Crossed, x: Tensor<3>, heads: [usize; 2], held: &[usize]) -> Tensor<3> {
    let memory = layer.memory.val();
    let [s_q, b, _] = x.dims();
    let [s_k, ..] = memory.dims();
    let [heads, kv_heads] = heads;
    let by_head = |x: Tensor<3>, from: usize, count: usize| {
        let [s, b, _] = x.dims();
        let x = x.narrow(2, from * HEAD_DIM, count * HEAD_DIM);
        let x = x.reshape([s, b, count, 1, HEAD_DIM]);
        let x = x.repeat_dim(3, heads / count);
        x.reshape([s, b, heads, HEAD_DIM]).permute([1, 2, 0, 3])
    };
    let q = x.matmul(layer.cross.q.weight.val().unsqueeze());
    let kv = memory.matmul(layer.cross.kv.weight.val().unsqueeze());
    let q = by_head(q, 0, heads);
    let k = by_head(kv.clone(), 0, kv_heads);
    let v = by_head(kv, kv_heads, kv_heads);
    let hidden = (0..b).flat_map(|row| {
        let held = held.get(row).copied().unwrap_or(s_k);
        (0..s_k).map(move |key| if key < held { 0.0f32 } else { -1e30 })
    });
    let hidden = TensorData::new(hidden.collect::<Vec<_>>(), [b, 1, 1, s_k]);
    let scores = q.matmul(k.swap_dims(2, 3)) / (HEAD_DIM as f64).sqrt();
    let scores = scores + Tensor::from_data(hidden, &autodiff());
    let y = activation::softmax(scores, 3).matmul(v);
    let y = y.permute([2, 0, 1, 3]).reshape([s_q, b, heads * HEAD_DIM]);
    y.matmul(layer.cross.output.weight.val().unsqueeze())
}

#[rstest]
#[case([3, 3], [5, 7, 2], &[])]
#[case([4, 2], [9, 4, 3], &[4, 1, 3])]
#[case([2, 1], [1, 6, 2], &[6, 6])]
fn it_is_its_definition(
    #[case] heads: [usize; 2],
    #[case] lens: [usize; 3],
    #[case] held: &[usize],
) {
    let [s_dec, s_enc, b] = lens;
    let seed = fresh_seed();
    on_ranks(1, seed, |group| {
        let layer = Crossed::new(&config(heads), [s_enc, b], &group).unwrap();
        let shape = [s_dec, b, HIDDEN];
        let x = leaf::<3>(normal(&shape, seed, "input"));
        let weight = Tensor::<3>::from_data(normal(&shape, seed, "weight"), &autodiff());
        let batch = batch(s_enc, held);
        let results = [
            layer.cross.forward(x.clone(), layer.memory.val(), &batch),
            plainly(&layer, x.clone(), heads, held),
        ];
        let [found, expected] = results.map(|y| {
            let grads = (y.clone() * weight.clone()).sum().backward();
            let of = |weight: &Param<Tensor<2>>| weight.val().grad(&grads).unwrap().into_data();
            let memory = layer.memory.val().grad(&grads).unwrap();
            if let Some(held) = held.get(1).filter(|held| **held < s_enc) {
                let padding = memory
                    .clone()
                    .narrow(1, 1, 1)
                    .narrow(0, *held, s_enc - *held);
                let unseen = padding.into_data().iter::<f32>().all(|x| x == 0.0);
                assert!(unseen, "padding has a gradient");
            }
            [
                y.into_data(),
                x.grad(&grads).unwrap().into_data(),
                memory.into_data(),
                of(&layer.cross.q.weight),
                of(&layer.cross.kv.weight),
                of(&layer.cross.output.weight),
            ]
        });
        for (found, expected) in found.iter().zip(&expected) {
            assert_close("cross attention", found, expected, 2e-5);
        }
    });
}

/// A run on all ranks, with a row of the encoder of each length in `held`.
fn run(ranks: usize, config: &CrossAttentionConfig, s_enc: usize, held: &[usize]) -> Trial {
    setting(ranks, config, 8).run(
        |group| Crossed::new(config, [s_enc, 2], group),
        |layer: &Crossed, x| {
            let batch = trained(batch(s_enc, held));
            layer.cross.forward(x, layer.memory.val(), &batch)
        },
    )
}

fn setting(ranks: usize, config: &CrossAttentionConfig, s_dec: usize) -> Setting {
    let end = stream(config.sequence_parallel);
    Setting {
        ranks,
        seed: 7,
        shapes: [[s_dec, 2, HIDDEN]; 2],
        ends: [end.clone(), end],
    }
}

#[rstest]
fn every_layout_is_one_rank(
    #[values((2, [4, 4], [8, 12]), (4, [4, 2], [4, 8]), (3, [6, 6], [9, 3]))]
    (ranks, heads, lens): (usize, [usize; 2], [usize; 2]),
    #[values(false, true)] sp: bool,
    #[values(&[], &[3, 2])] held: &'static [usize],
    #[values((0.0, false), (0.3, true))] (dropout, bias): (f64, bool),
) {
    let [s_dec, s_enc] = lens;
    let config = config(heads)
        .with_sequence_parallel(sp)
        .with_dropout(dropout)
        .with_qkv_bias(bias)
        .with_output_bias(bias);
    assert_same_under_layout(
        &setting(ranks, &config, s_dec),
        |group| Crossed::new(&config, [s_enc, 2], group),
        |layer: &Crossed, x| {
            let batch = trained(batch(s_enc, held));
            layer.cross.forward(x, layer.memory.val(), &batch)
        },
    );
}

fn assert_same_run(a: &Trial, b: &Trial) {
    assert_bits("output", &a.output, &b.output);
    assert_bits("input gradient", &a.input_grad, &b.input_grad);
    for (path, grad) in &b.grads {
        assert_bits(path, &a.grads[path], grad);
    }
}

#[rstest]
fn recompute_changes_no_bit(
    #[values(1, 2)] ranks: usize,
    #[values(&[], &[5, 1])] held: &'static [usize],
) {
    let kept = config([4, 2])
        .with_sequence_parallel(ranks > 1)
        .with_dropout(0.2);
    let recomputed = kept.clone().with_recompute(true);
    let [kept, recomputed] = [kept, recomputed].map(|config| run(ranks, &config, 6, held));
    assert_same_run(&recomputed, &kept);
}

#[rstest]
fn a_recomputed_region_may_save_the_output(#[values(1, 2)] ranks: usize) {
    let config = config([4, 4])
        .with_sequence_parallel(ranks > 1)
        .with_dropout(0.2);
    let held = &[5, 6];
    let kept = run(ranks, &config, 6, held);
    let saved = setting(ranks, &config, 8).run(
        |group| Crossed::new(&config, [6, 2], group),
        |layer: &Crossed, x| {
            let saved = SelectiveSave::default();
            let batch = BatchContext {
                saved_attention: Some(saved.clone()),
                ..trained(batch(6, held))
            };
            let inputs = [x.into(), layer.memory.val().into()];
            let [y] = recomputed(&layer.cross, inputs, move |cross, [x, memory]| {
                [cross.forward(x, memory, &batch)]
            });
            saved.end_forward();
            y
        },
    );
    assert_close("output", &saved.output, &kept.output, 3e-6);
    assert_close("input", &saved.input_grad, &kept.input_grad, 3e-6);
    for (path, grad) in &kept.grads {
        assert_close(path, &saved.grads[path], grad, 3e-6);
    }
}

#[rstest]
fn generation_goes_on_with_each_sequences_memory(#[values(1, 2)] ranks: usize) {
    let seed = fresh_seed();
    let lens = [(5, 7), (3, 2), (6, 4)];
    on_ranks(ranks, seed, |group| {
        let device = Device::flex();
        let sp = config([4, 2]).with_sequence_parallel(ranks > 1);
        let layer = sp.init(&group, &device).unwrap().whole_sequence();
        let input = |len: usize, what: &str| {
            Tensor::<3>::from_data(normal(&[len, 1, HIDDEN], seed, what), &device)
        };
        let mut memory = KvCache::new(3);
        let mut inputs = Vec::new();
        let mut expected = Vec::new();
        for (sequence, (s_dec, s_enc)) in lens.into_iter().enumerate() {
            let of_encoder = input(s_enc, &format!("memory {sequence}"));
            let x = input(s_dec, &format!("input {sequence}"));
            memory.put(sequence, layer.keys_values(of_encoder.clone()));
            expected.push(layer.forward(x.clone(), of_encoder, &BatchContext::default()));
            inputs.push(x);
        }
        // The order of the sequences is arbitrary; the second pass leaves one out.
        let passes: [&[(usize, usize, usize)]; 2] =
            [&[(2, 0, 4), (0, 0, 2), (1, 0, 3)], &[(0, 2, 3), (2, 4, 2)]];
        for pass in passes {
            let packed = Packed::new(pass.iter().copied());
            let part = |of: &[Tensor<3>]| {
                let parts = pass
                    .iter()
                    .map(|&(sequence, start, len)| of[sequence].clone().narrow(0, start, len));
                Tensor::cat(parts.collect(), 0)
            };
            let found = layer.forward_cached(part(&inputs), &packed, &memory);
            let expected = part(&expected).into_data();
            assert_close("output", &found.into_data(), &expected, 1e-5);
        }
    });
}

#[test]
fn a_row_without_tokens_gets_nothing() {
    let group = Group::single(4);
    let layer = Crossed::new(&config([4, 4]), [5, 2], &group).unwrap();
    let x = leaf::<3>(normal(&[3, 2, HIDDEN], 4, "input"));
    let y = layer
        .cross
        .forward(x.clone(), layer.memory.val(), &batch(5, &[0, 5]));
    let grads = y.clone().sum().backward();
    let of_row = |x: Tensor<3>| x.narrow(1, 0, 1).into_data();
    for found in [of_row(y), of_row(x.grad(&grads).unwrap())] {
        assert!(found.iter::<f32>().all(|x| x == 0.0));
    }
}

#[test]
#[should_panic(expected = "an encoder of 6 positions does not fit the 5 keys")]
fn an_encoder_of_another_length_is_refused() {
    let layer = Crossed::new(&config([4, 4]), [5, 2], &Group::single(4)).unwrap();
    let x = Tensor::zeros([3, 2, HIDDEN], &autodiff());
    layer.cross.forward(x, layer.memory.val(), &batch(6, &[]));
}
