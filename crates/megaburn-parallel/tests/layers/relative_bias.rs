//! Self-attention with the relative bias of T5.

use std::sync::Arc;

use burn::{
    module::Module,
    nn::Initializer,
    prelude::Device,
    tensor::{Tensor, TensorData, activation},
};
use megaburn_collective::Group;
use megaburn_parallel::{
    Attention, BatchContext, EncoderRows, KvCache, Packed, ParallelError, PlanBuilder,
    PositionTables, RelativeBias, RelativeBiasConfig, SelectiveSave, SelfAttentionConfig, Sharded,
    TokenBlock, recomputed,
};
use rstest::rstest;

use crate::{
    support::{assert_bits, assert_close, autodiff, fresh_seed, leaf, normal, on_ranks},
    trial::{Setting, Trial, assert_same_under_layout, stream},
};

const HIDDEN: usize = 12;
const HEAD_DIM: usize = 4;

/// An encoder's or a decoder's attention with its bias.
#[derive(Module, Debug)]
struct Biased {
    bias: RelativeBias,
    attention: Attention,
}

impl Sharded for Biased {
    fn shards(&self, plan: &mut PlanBuilder) {
        plan.child("bias", &self.bias);
        plan.child("attention", &self.attention);
    }
}

#[derive(Clone, Copy, Debug)]
struct Kind {
    heads: [usize; 2],
    is_encoder: bool,
    sp: bool,
    dropout: f64,
    recompute: bool,
}

impl Kind {
    fn new(heads: [usize; 2], is_encoder: bool) -> Self {
        Self {
            heads,
            is_encoder,
            sp: false,
            dropout: 0.0,
            recompute: false,
        }
    }

    fn build(&self, group: &Group, device: &Device) -> Result<Biased, ParallelError> {
        let wide = |std: f64| Initializer::Normal { mean: 0.0, std };
        let [heads, kv_heads] = self.heads;
        let bias = RelativeBiasConfig::new(32, 128, heads)
            .with_bidirectional(self.is_encoder)
            .with_initializer(wide(1.0))
            .with_name("bias");
        let attention = SelfAttentionConfig::new(HIDDEN, heads, kv_heads, HEAD_DIM)
            .with_causal(!self.is_encoder)
            .with_relative_bias(true)
            .with_softmax_scale(Some(1.0))
            .with_dropout(self.dropout)
            .with_recompute(self.recompute)
            .with_sequence_parallel(self.sp)
            .with_initializer(wide(0.4))
            .with_output_initializer(wide(0.4))
            .with_name("attention");
        Ok(Biased {
            bias: bias.init(group, device)?,
            attention: attention.init(group, device)?,
        })
    }

    fn setting(&self, ranks: usize, s: usize) -> Setting {
        let end = stream(self.sp);
        Setting {
            ranks,
            seed: 5,
            shapes: [[s, 2, HIDDEN]; 2],
            ends: [end.clone(), end],
        }
    }

    fn run(&self, ranks: usize, s: usize, batch: &BatchContext) -> Trial {
        self.setting(ranks, s).run(
            |group| self.build(group, &autodiff()),
            |layer: &Biased, x| layer.forward(x, s, batch),
        )
    }
}

fn tables(line: &Tensor<3>) -> PositionTables<'_> {
    PositionTables {
        relative: Some(line),
        ..PositionTables::default()
    }
}

impl Biased {
    fn forward(&self, x: Tensor<3>, s: usize, batch: &BatchContext) -> Tensor<3> {
        self.attention
            .forward_in(x, tables(&self.bias.forward(s)), batch)
    }
}

/// A batch in training whose rows hold these tokens of the encoder.
fn batch(s: usize, held: &[usize]) -> BatchContext {
    let held = (!held.is_empty()).then(|| Arc::from(held));
    let block = TokenBlock {
        step: 3,
        global_batch: 5,
        first_sample: 1,
    };
    BatchContext {
        block: Some(block),
        documents: EncoderRows::new(s, held).documents(),
        ..BatchContext::default()
    }
}

/// The layer by its definition, for fewer than eight positions, whose distances have a bucket each.
fn plainly(layer: &Biased, x: Tensor<3>, kind: Kind) -> Tensor<3> {
    let [s, b, _] = x.dims();
    let [heads, kv_heads] = kind.heads;
    let qkv = layer.attention.qkv.as_ref().unwrap().weight.val();
    let qkv = x.matmul(qkv.unsqueeze());
    let by_head = |from: usize, count: usize| {
        let x = qkv.clone().narrow(2, from * HEAD_DIM, count * HEAD_DIM);
        let x = x.reshape([s, b, count, 1, HEAD_DIM]);
        let x = x.repeat_dim(3, heads / count);
        x.reshape([s, b, heads, HEAD_DIM]).permute([1, 2, 0, 3])
    };
    let q = by_head(0, heads);
    let k = by_head(heads, kv_heads);
    let v = by_head(heads + kv_heads, kv_heads);
    let table = layer.bias.weight.val();
    let rows = (0..s * s).map(|at| {
        let [query, key] = [at / s, at % s];
        let bucket = match query.cmp(&key) {
            std::cmp::Ordering::Less if kind.is_encoder => 16 + key - query,
            std::cmp::Ordering::Less => 0,
            _ => query - key,
        };
        table.clone().narrow(0, bucket, 1)
    });
    let bias = Tensor::cat(rows.collect(), 0).reshape([s, s, heads]);
    let hidden = (0..s * s).map(|at| {
        let is_future = at % s > at / s && !kind.is_encoder;
        if is_future { -1e30f32 } else { 0.0 }
    });
    let hidden = TensorData::new(hidden.collect::<Vec<_>>(), [1, 1, s, s]);
    let scores = q.matmul(k.swap_dims(2, 3)) + bias.permute([2, 0, 1]).unsqueeze_dim::<4>(0);
    let scores = scores + Tensor::from_data(hidden, &autodiff());
    let y = activation::softmax(scores, 3).matmul(v);
    let y = y.permute([2, 0, 1, 3]).reshape([s, b, heads * HEAD_DIM]);
    y.matmul(layer.attention.output.weight.val().unsqueeze())
}

#[rstest]
fn it_is_its_definition(
    #[values([4, 4], [3, 3], [6, 2])] heads: [usize; 2],
    #[values([5, 2], [7, 1], [1, 3])] tokens: [usize; 2],
    #[values(false, true)] is_encoder: bool,
) {
    let [s, b] = tokens;
    let kind = Kind::new(heads, is_encoder);
    let seed = fresh_seed();
    on_ranks(1, seed, |group| {
        let layer = kind.build(&group, &autodiff()).unwrap();
        let x = leaf::<3>(normal(&[s, b, HIDDEN], seed, "input"));
        let weight = normal(&[s, b, HIDDEN], seed, "weight");
        let weight = Tensor::<3>::from_data(weight, &autodiff());
        let results = [
            layer.forward(x.clone(), s, &BatchContext::default()),
            plainly(&layer, x.clone(), kind),
        ];
        let [found, expected] = results.map(|y| {
            let grads = (y.clone() * weight.clone()).sum().backward();
            let table = layer.bias.weight.val();
            let qkv = layer.attention.qkv.as_ref().unwrap().weight.val();
            [
                y.into_data(),
                x.grad(&grads).unwrap().into_data(),
                table.grad(&grads).unwrap().into_data(),
                qkv.grad(&grads).unwrap().into_data(),
            ]
        });
        // With one position the scores have no influence.
        let compared = if s == 1 { 2 } else { 4 };
        for (found, expected) in found.iter().zip(&expected).take(compared) {
            assert_close("relative bias", found, expected, 2e-5);
        }
    });
}

#[rstest]
fn every_layout_is_one_rank(
    #[values((2, [4, 4], 12), (4, [4, 4], 8), (4, [8, 2], 40), (3, [6, 3], 9))] (ranks, heads, s): (
        usize,
        [usize; 2],
        usize,
    ),
    #[values(false, true)] sp: bool,
    #[values(false, true)] is_encoder: bool,
    #[values(0.0, 0.3)] dropout: f64,
) {
    let kind = Kind {
        sp,
        dropout,
        ..Kind::new(heads, is_encoder)
    };
    // An encoder's rows have padding.
    let held: &[usize] = if is_encoder { &[5, 7] } else { &[] };
    let batch = batch(s, held);
    assert_same_under_layout(
        &kind.setting(ranks, s),
        |group| kind.build(group, &autodiff()),
        |layer: &Biased, x| layer.forward(x, s, &batch),
    );
}

#[rstest]
fn recompute_changes_no_bit(#[values(1, 2)] ranks: usize, #[values(false, true)] is_encoder: bool) {
    let kept = Kind {
        sp: ranks > 1,
        dropout: 0.2,
        ..Kind::new([4, 2], is_encoder)
    };
    let again = Kind {
        recompute: true,
        ..kept
    };
    let [kept, again] = [kept, again].map(|kind| kind.run(ranks, 10, &batch(10, &[])));
    assert_bits("output", &again.output, &kept.output);
    assert_bits("input gradient", &again.input_grad, &kept.input_grad);
    for (path, grad) in &kept.grads {
        assert_bits(path, &again.grads[path], grad);
    }
}

#[rstest]
fn a_recomputed_region_may_save_the_output(
    #[values(1, 2)] ranks: usize,
    #[values(&[], &[5, 9])] held: &'static [usize],
) {
    let kind = Kind {
        dropout: 0.2,
        ..Kind::new([4, 4], !held.is_empty())
    };
    let kept = kind.run(ranks, 10, &batch(10, held));
    let saved = kind.setting(ranks, 10).run(
        |group| kind.build(group, &autodiff()),
        |layer: &Biased, x| {
            let saved = SelectiveSave::default();
            let batch = BatchContext {
                saved_attention: Some(saved.clone()),
                ..batch(10, held)
            };
            let inputs = [x.into(), layer.bias.forward(10).into()];
            let [y] = recomputed(&layer.attention, inputs, move |layer, [x, line]| {
                [layer.forward_in(x, tables(&line), &batch)]
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

#[test]
fn padding_of_an_encoder_is_not_seen() {
    let kind = Kind::new([4, 4], true);
    let layer = kind.build(&Group::single(6), &autodiff()).unwrap();
    let x = Tensor::<3>::from_data(normal(&[9, 2, HIDDEN], 6, "input"), &autodiff());
    let whole = layer.forward(x.clone(), 9, &batch(9, &[6, 9]));
    for (row, held) in [6, 9].into_iter().enumerate() {
        let alone = x.clone().narrow(1, row, 1).narrow(0, 0, held);
        let alone = layer.forward(alone, held, &BatchContext::default());
        let found = whole.clone().narrow(1, row, 1).narrow(0, 0, held);
        assert_close("output", &found.into_data(), &alone.into_data(), 1e-5);
    }
}

#[rstest]
fn a_cache_goes_on_at_the_position_of_each_sequence(#[values(1, 2)] ranks: usize) {
    let seed = fresh_seed();
    let kind = Kind {
        sp: ranks > 1,
        ..Kind::new([4, 2], false)
    };
    on_ranks(ranks, seed, |group| {
        let device = Device::flex();
        let layer = kind.build(&group, &device).unwrap();
        let attention = layer.attention.clone().whole_sequence();
        let inputs = [9, 6].map(|len| {
            let x = normal(&[len, 1, HIDDEN], seed, &format!("input {len}"));
            Tensor::<3>::from_data(x, &device)
        });
        let expected = inputs.each_ref().map(|x| {
            let line = layer.bias.forward(x.dims()[0]);
            attention.forward(x.clone(), tables(&line))
        });
        let mut cache = KvCache::new(2);
        let passes: [&[(usize, usize, usize)]; 4] = [
            &[(0, 0, 4), (1, 0, 1)],
            &[(1, 1, 3), (0, 4, 1)],
            &[(0, 5, 3)],
            &[(0, 8, 1), (1, 4, 2)],
        ];
        for pass in passes {
            let packed = Packed::new(pass.iter().copied());
            let part = |of: &[Tensor<3>; 2]| {
                let parts = pass
                    .iter()
                    .map(|&(sequence, start, len)| of[sequence].clone().narrow(0, start, len));
                Tensor::cat(parts.collect(), 0)
            };
            // The line of the pass covers its longest sequence.
            let longest = packed.lens().into_iter().max().unwrap();
            let line = layer.bias.forward(longest);
            let found = attention.forward_cached(part(&inputs), tables(&line), &packed, &mut cache);
            assert_close(
                "output",
                &found.into_data(),
                &part(&expected).into_data(),
                1e-5,
            );
        }
    });
}

#[test]
#[should_panic(expected = "a layer with a relative bias is given its line")]
fn a_layer_without_its_line_is_refused() {
    let kind = Kind::new([4, 4], true);
    let layer = kind.build(&Group::single(6), &autodiff()).unwrap();
    let x = Tensor::zeros([3, 1, HIDDEN], &autodiff());
    layer.attention.forward(x, PositionTables::default());
}
