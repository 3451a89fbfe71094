//! Recompute in backward changes no bit compared with saving.

use std::collections::BTreeMap;

use burn::{
    module::Module,
    tensor::{DType, Tensor},
};
use megaburn_collective::Group;
use megaburn_kernels::RopeConfig;
use megaburn_mesh::Zigzag;
use megaburn_parallel::{
    Activation, Attention, AttentionGroups, BatchContext, ContextComm, ContextParallel, Mlp,
    MlpConfig, Norm, NormConfig, NormKind, ParallelDropout, ParallelDropoutConfig, ParallelError,
    ParallelLinear, ParallelLinearConfig, PlanBuilder, Residual, SelectiveSave,
    SelfAttentionConfig, Sharded, TokenBlock, VocabParallelEmbedding, VocabParallelEmbeddingConfig,
    load_params, read_params, recomputed,
};
use rstest::rstest;

use crate::{
    support::{assert_bits, autodiff, fresh_seed, leaf, normal, on_ranks, param_grads},
    trial::{Setting, assert_same_under_layout, stream},
};

/// A block and a head, with a norm before each layer.
#[derive(Module, Debug)]
struct Block {
    norms: Vec<Norm>,
    attention: Attention,
    mlp: Mlp,
    head: VocabParallelEmbedding,
}

/// Sizes: `[hidden, ffn, heads, kv_heads, vocab]`.
struct Shape {
    sizes: [usize; 5],
    norm: NormKind,
    activation: Activation,
    bias: bool,
    sequence_parallel: bool,
}

impl Block {
    /// A block that recomputes the outputs of norms, and of activations.
    fn new(
        shape: &Shape,
        [of_norms, of_activations]: [bool; 2],
        group: &Group,
    ) -> Result<Self, ParallelError> {
        let Shape {
            sizes: [hidden, ffn, heads, kv_heads, vocab],
            norm,
            activation,
            bias,
            ..
        } = *shape;
        let sp = shape.sequence_parallel;
        let device = autodiff();
        let norm = NormConfig::new(hidden, norm)
            .with_sequence_parallel(sp)
            .with_recompute(of_norms);
        let attention = SelfAttentionConfig::new(hidden, heads, kv_heads, 4)
            .with_qkv_bias(bias)
            .with_output_bias(bias)
            .with_sequence_parallel(sp)
            .with_name("attention");
        let mlp = MlpConfig::new(hidden, ffn)
            .with_activation(activation)
            .with_bias(bias)
            .with_sequence_parallel(sp)
            .with_recompute(of_activations)
            .with_name("mlp");
        let head = VocabParallelEmbeddingConfig::new(vocab, hidden)
            .with_pad_multiple(1)
            .with_sequence_parallel(sp)
            .with_name("head");
        Ok(Self {
            norms: (0..3).map(|_| norm.init(group, &device)).collect(),
            attention: attention.init(group, &device)?,
            mlp: mlp.init(group, &device)?,
            head: head.init(group, &device)?,
        })
    }

    fn forward(&self, x: Tensor<3>, seq: usize) -> Tensor<3> {
        let rope = RopeConfig::new(4).init(0..seq, &autodiff()).unwrap();
        let mut x = Residual::from(x);
        x += self
            .attention
            .forward(x.normed(&self.norms[0]), Some(&rope));
        x += self.mlp.forward(x.normed(&self.norms[1]));
        self.head.logits(x.normed(&self.norms[2]))
    }
}

/// Casts a module to another dtype.
fn cast<M: Module>(module: M, dtype: DType) -> M {
    let params: BTreeMap<_, _> = read_params(&module).into_iter().collect();
    let next = |path: &str, _: &[usize]| {
        Ok::<_, std::convert::Infallible>(params[path].clone().convert_dtype(dtype))
    };
    load_params(module, next).unwrap()
}

#[rstest]
#[case(NormKind::Rms, Activation::SwiGlu, false)]
#[case(NormKind::Layer, Activation::GeluTanh, true)]
#[case(NormKind::Layer, Activation::Gelu, false)]
#[case(NormKind::Rms, Activation::Relu, true)]
fn values_and_gradients_are_those_of_keeping_everything(
    #[case] norm: NormKind,
    #[case] activation: Activation,
    #[case] bias: bool,
    #[values((1, false), (2, false), (2, true), (4, true))] (ranks, sp): (usize, bool),
    #[values(DType::F32, DType::BF16, DType::F16)] dtype: DType,
) {
    let seed = fresh_seed();
    for [per_rank, batch, hidden, ffn, kv_heads] in [[2, 2, 16, 24, 4], [3, 1, 7, 20, 1]] {
        let sizes = [hidden, ffn, 4, kv_heads, 12];
        let shape = Shape {
            sizes,
            norm,
            activation,
            bias,
            sequence_parallel: sp,
        };
        let seq = per_rank * ranks;
        let run = |of_norms: bool, of_activations: bool| {
            on_ranks(ranks, seed, |group| {
                let block = Block::new(&shape, [of_norms, of_activations], &group).unwrap();
                let block = cast(block, dtype);
                let own = if sp { per_rank } else { seq };
                let x = normal(&[own, batch, hidden], seed, &format!("x{}", group.rank()));
                let typed = (&autodiff(), dtype);
                let x = Tensor::<3>::from_data(x.convert_dtype(dtype), typed).require_grad();
                let y = block.forward(x.clone(), seq);
                let weight = normal(&y.dims(), seed, &format!("y{}", group.rank()));
                let weight = Tensor::from_data(weight.convert_dtype(dtype), typed);
                let grads = (y.clone() * weight).sum().backward();
                let mut found = param_grads(&block, &grads);
                found.push(("x".into(), x.grad(&grads).unwrap().into_data()));
                found.push(("y".into(), y.into_data()));
                found
            })
        };
        let expected = run(false, false);
        for (of_norms, of_activations) in [(true, false), (false, true), (true, true)] {
            for (found, expected) in run(of_norms, of_activations).iter().zip(&expected) {
                for ((path, found), (_, expected)) in found.iter().zip(expected) {
                    assert_bits(path, found, expected);
                }
            }
        }
    }
}

/// An MLP after a norm, where both recompute their outputs, compared with one rank. Sequence shards
/// are gathered.
#[derive(Module, Debug)]
struct NormedMlp {
    norm: Norm,
    mlp: Mlp,
}

impl Sharded for NormedMlp {
    fn shards(&self, plan: &mut PlanBuilder) {
        plan.child("norm", &self.norm);
        plan.child("mlp", &self.mlp);
    }
}

#[rstest]
fn what_is_computed_again_is_split_like_the_rest(
    #[values(1, 2, 3, 4, 8)] ranks: usize,
    #[values(true, false)] sequence_parallel: bool,
    #[values(NormKind::Rms, NormKind::Layer)] kind: NormKind,
) {
    let shape = [2 * ranks, 3, 7];
    let end = stream(sequence_parallel);
    let setting = Setting {
        ranks,
        seed: fresh_seed(),
        shapes: [shape; 2],
        ends: [end.clone(), end],
    };
    let norm = NormConfig::new(7, kind)
        .with_sequence_parallel(sequence_parallel)
        .with_recompute(true);
    let mlp = MlpConfig::gated(7, 24)
        .with_sequence_parallel(sequence_parallel)
        .with_recompute(true)
        .with_name("mlp");
    let build = |group: &Group| {
        Ok(NormedMlp {
            norm: norm.init(group, &autodiff()),
            mlp: mlp.init(group, &autodiff())?,
        })
    };
    assert_same_under_layout(&setting, build, |layer: &NormedMlp, x: Tensor<3>| {
        let mut stream = Residual::from(x.clone());
        stream += x.tanh();
        stream += layer.mlp.forward(stream.normed(&layer.norm));
        stream.sum()
    });
}

/// A frozen weight has no gradient for which its input must be gathered.
#[test]
fn a_frozen_column_gathers_nothing_again() {
    let seed = fresh_seed();
    let calls = on_ranks(2, seed, |group| {
        let config = ParallelLinearConfig::column(6, 8).with_sequence_parallel(true);
        let layer = config.with_name("up").init(&group, &autodiff()).unwrap();
        let x = leaf::<3>(normal(&[2, 1, 6], seed, "x"));
        let calls = |layer: &ParallelLinear| {
            let before = group.flight_records().len();
            drop(layer.forward(x.clone()).sum().backward());
            group.flight_records().len() - before
        };
        [calls(&layer), calls(&layer.clone().no_grad())]
    });
    // One gather forward, one for the weight's gradient, and the reduction of the input's gradient.
    assert_eq!(calls, [[3, 2]; 2]);
}

/// A part with dropout, one of whose parameters is frozen.
#[derive(Module, Debug)]
struct Dropped {
    mlp: Mlp,
    dropout: ParallelDropout,
}

#[rstest]
fn a_part_with_dropout_has_the_gradients_of_one_that_is_kept(
    #[values((1, false), (2, false), (2, true))] (ranks, sequence_parallel): (usize, bool),
    #[values(DType::F32, DType::BF16)] dtype: DType,
    #[values(true, false)] input_learns: bool,
) {
    let seed = fresh_seed();
    let run = |again: bool| {
        on_ranks(ranks, seed, |group| {
            let device = autodiff();
            let sp = |config: MlpConfig| config.with_sequence_parallel(sequence_parallel);
            let mlp = sp(MlpConfig::new(6, 20).with_name("mlp"))
                .init(&group, &device)
                .unwrap();
            let dropout = ParallelDropoutConfig::new(0.4, "dropped".into())
                .with_sequence_parallel(sequence_parallel);
            let part = Dropped {
                mlp,
                dropout: dropout.init(&group, Zigzag::WHOLE).unwrap(),
            };
            let mut part = cast(part, dtype);
            part.mlp.down.weight = part.mlp.down.weight.no_grad();
            let typed = (&device, dtype);
            let x = normal(&[3, 2, 6], seed, &format!("x{}", group.rank()));
            let x = Tensor::<3>::from_data(x.convert_dtype(dtype), typed);
            let x = if input_learns { x.require_grad() } else { x };
            let forward = |part: &Dropped, x: Tensor<3>| {
                let block = TokenBlock::new(3, 2, 0);
                part.dropout.forward(part.mlp.forward(x), Some(block))
            };
            let y = if again {
                let of = [x.clone().into()];
                let [y] = recomputed(&part, of, move |part, [x]| [forward(part, x)]);
                y
            } else {
                forward(&part, x.clone())
            };
            let grads = (y.clone() * y.clone()).sum().backward();
            let Mlp { up, down, .. } = &part.mlp;
            assert!(
                down.weight.grad(&grads).is_none(),
                "a gradient of what does not learn"
            );
            let bias = |layer: &ParallelLinear| layer.bias.as_ref().unwrap().grad(&grads);
            let all = [
                ("up.weight", up.weight.grad(&grads).map(Tensor::into_data)),
                ("up.bias", bias(up).map(Tensor::into_data)),
                ("down.bias", bias(down).map(Tensor::into_data)),
                ("x", x.grad(&grads).map(Tensor::into_data)),
                ("y", Some(y.into_data())),
            ];
            all.map(|(name, found)| found.map(|found| (name, found)))
        })
    };
    let kept = run(false);
    let again = run(true);
    for (found, expected) in again.iter().flatten().zip(kept.iter().flatten()) {
        let name = expected.as_ref().map_or("x", |(name, _)| name);
        assert_eq!(expected.is_some(), name != "x" || input_learns, "{name}");
        assert_eq!(found.is_some(), expected.is_some(), "{name}");
        if let (Some((_, found)), Some((_, expected))) = (found, expected) {
            assert_bits(name, found, expected);
        }
    }
}

/// A second result that depends on nothing trainable, and one that is never used.
#[test]
fn a_result_that_needs_no_gradient_is_none_to_go_backward_from() {
    let seed = fresh_seed();
    let group = Group::single(seed);
    let mlp = MlpConfig::gated(6, 8)
        .with_name("mlp")
        .init(&group, &autodiff())
        .unwrap();
    let x = leaf::<3>(normal(&[2, 1, 6], seed, "x"));
    let both = || {
        let of = [x.clone().into()];
        recomputed(&mlp, of, |mlp, [x]| [mlp.forward(x.clone()), x.ones_like()])
    };
    let [y, ones] = both();
    let found = (y * ones.clone()).sum().backward();
    let expected = mlp.forward(x.clone()).sum().backward();
    let bits = |grads| x.grad(grads).unwrap().into_data();
    assert_bits("x", &bits(&found), &bits(&expected));
    // Backward from nothing but the result that depends on nothing trainable.
    let [_, ones] = both();
    let grads = ones.sum().backward();
    assert_eq!(
        x.grad(&grads).unwrap().into_data(),
        x.clone().inner().zeros_like().into_data()
    );
    assert!(mlp.up.weight.grad(&grads).is_none());
}

/// With saved attention, keys and values go around the ring once forward and once backward,
/// followed by their gradients, and not a third time for the recompute.
#[test]
fn attention_that_is_kept_is_not_computed_again() {
    let seed = fresh_seed();
    let run = |is_kept: bool| {
        on_ranks(3, seed, move |group| {
            let parallel = ContextParallel::new(&group, ContextComm::P2p).unwrap();
            let config = SelfAttentionConfig::new(12, 2, 2, 4).with_name("attention");
            let groups = AttentionGroups {
                tp: Group::single(seed),
                cp: parallel,
            };
            let layer = config.init(groups, &autodiff()).unwrap();
            let x = leaf::<3>(normal(&[4, 2, 12], seed, &format!("x{}", group.rank())));
            let before = group.flight_records().len();
            let saved = is_kept.then(SelectiveSave::default);
            let batch = BatchContext {
                saved_attention: saved.clone(),
                ..BatchContext::default()
            };
            let of = [x.clone().into()];
            let [y] = recomputed(&layer, of, move |layer, [x]| {
                [layer.forward_in(x, None, &batch)]
            });
            saved.iter().for_each(SelectiveSave::end_forward);
            let grads = (y.clone() * y).sum().backward();
            let sent = group.flight_records().len() - before;
            (sent, x.grad(&grads).unwrap().into_data())
        })
    };
    let again = run(false);
    let kept = run(true);
    // Each step moves two tensors, and each of them is sent and received.
    let forward = 2 * 2 * 2;
    let backward = 2 * (2 * 2 + 3 * 2);
    for ((sent_again, again), (sent_kept, kept)) in again.iter().zip(&kept) {
        assert_eq!(
            (*sent_again, *sent_kept),
            (2 * forward + backward, forward + backward)
        );
        assert_bits("x", kept, again);
    }
}
