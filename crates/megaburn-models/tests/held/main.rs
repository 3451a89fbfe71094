//! Tests that the bytes that forward saves for backward match the formula, counted by the
//! allocator. This is a separate test binary, whose tests run one after the other, so that nothing
//! else allocates.

mod experts;

use std::{
    alloc::System,
    collections::BTreeMap,
    convert::Infallible,
    sync::{Barrier, Mutex, PoisonError},
};

use burn::{
    prelude::{Device, Int},
    tensor::{DType, Tensor, TensorData},
};
use megaburn_collective::{Group, GroupOptions, run_threads};
use megaburn_models::{
    Decoder, DecoderConfig, Family,
    activation_memory::{ActivationMemory, Scores, StageEnds},
    decoder::{Mla, ModelOptions, MtpTargets, Recompute, RecomputeBlocks},
};
use megaburn_parallel::{BatchContext, EncoderRows, load_params, read_params};
use rstest::rstest;
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

static ALONE: Mutex<()> = Mutex::new(());

/// The bytes that are currently allocated.
fn live() -> usize {
    let stats = ALLOCATOR.stats();
    stats.bytes_allocated - stats.bytes_deallocated
}

fn ids(len: usize, samples: usize, factor: usize, device: &Device) -> Tensor<2, Int> {
    let shape = [len, samples];
    let ids = (0..shape[0] * shape[1])
        .map(|i| (i * factor % 251) as i64)
        .collect();
    Tensor::from_data(TensorData::new::<i64, _>(ids, shape), device)
}

fn model(of: &ActivationMemory, group: &Group, device: &Device) -> Decoder {
    let options = ModelOptions {
        sequence_parallel: of.sequence_parallel,
        recompute: of.recompute,
        fused_linear_cross_entropy: of.fused_loss,
        ..ModelOptions::default()
    };
    let model = of.model.init(group, &options, device).unwrap();
    let dtype = match of.element {
        2 => DType::BF16,
        _ => DType::F32,
    };
    let mut params: BTreeMap<_, _> = read_params(&model).into_iter().collect();
    let next = |path: &str, _: &[usize]| {
        Ok::<_, Infallible>(params.remove(path).unwrap().convert_dtype(dtype))
    };
    load_params(model, next).unwrap()
}

/// The bytes that each rank holds after the forward pass of a micro-batch of each size; all ranks
/// hold equally many.
fn held<const N: usize>(of: &ActivationMemory, micro_batches: [usize; N]) -> [usize; N] {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let barrier = Barrier::new(of.tp);
    let ranks = run_threads(of.tp, GroupOptions::default(), |group| {
        let device = Device::flex().autodiff();
        let model = model(of, &group, &device);
        let has_encoder = of.model.is_encoder_decoder();
        let [all, predicted] = if has_encoder {
            [of.seq_len + of.decoder_seq_len, of.decoder_seq_len]
        } else {
            [of.seq_len; 2]
        };
        let step = |samples: usize| {
            let tokens = ids(all, samples, 7, &device);
            let ids = |factor| ids(predicted, samples, factor, &device);
            let ahead = (0..of.model.mtp_layers).map(|depth| MtpTargets {
                tokens: ids(13 + depth),
                labels: ids(17 + depth),
                counted: None,
            });
            let ahead = ahead.collect::<Vec<_>>();
            let batch = BatchContext {
                encoder: has_encoder.then(|| EncoderRows::new(of.seq_len, None)),
                ..BatchContext::default()
            };
            let x = model.embed(tokens, &batch);
            let x = model.forward_stage(0, x, &batch);
            model.losses(x, ids(11), &ahead, &batch).total(0.1, 0.0)
        };
        let held = micro_batches.map(|samples| {
            // Parameters, tables and buffers of matrix products are allocated at their first use.
            drop(step(samples).backward());
            barrier.wait();
            let before = live();
            barrier.wait();
            let loss = step(samples);
            barrier.wait();
            let held = live() - before;
            barrier.wait();
            drop(loss);
            held
        });
        Ok::<_, Infallible>(held)
    });
    let ranks: Vec<_> = ranks.into_iter().map(Result::unwrap).collect();
    ranks[0].map(|held| held / of.tp)
}

/// The bytes of the whole model by the formula.
fn formula(of: &ActivationMemory) -> usize {
    let ends = StageEnds {
        first: true,
        last: true,
    };
    of.stage(0..of.model.layers, ends, 1)
}

fn assert_held(of: &ActivationMemory) {
    let expected = formula(of);
    let [found] = held(of, [of.micro_batch]);
    let off = found as f64 / expected as f64 - 1.0;
    assert!(
        off.abs() < 0.1,
        "{found} bytes held, {expected} by the formula ({off:+.3}): {of:#?}"
    );
}

fn activations(family: Family) -> ActivationMemory {
    let parts = family.template();
    let shares = family != Family::GPT2 && parts.latent.is_none();
    let sizes = DecoderConfig {
        vocab: 256,
        hidden: 128,
        ffn: 320,
        layers: 3,
        heads: 8,
        kv_heads: if shares && !parts.is_encoder_decoder() {
            4
        } else {
            8
        },
        head_dim: if parts.latent.is_some() {
            parts.head_dim
        } else {
            16
        },
        ..parts
    };
    ActivationMemory {
        element: 4,
        scores: Scores::Kept,
        ..ActivationMemory::new(sizes, 64, 4)
    }
}

/// Recomputes the outputs of norms and activations, so that forward does not save them.
const ALL: Recompute = Recompute {
    norm: true,
    activation: true,
    core_attention: false,
    mlp: false,
    blocks: None,
    offload: false,
    keep_attention: false,
};

#[rstest]
fn a_model_holds_what_the_formula_says(
    #[values(Family::LLAMA, Family::GPT2, Family::QWEN3, Family::BERT)] family: Family,
    #[values((2, 1, false), (4, 1, false), (4, 2, false), (2, 2, true))]
    (element, tp, sequence_parallel): (usize, usize, bool),
) {
    let of = ActivationMemory {
        element,
        tp,
        sequence_parallel,
        ..activations(family)
    };
    for recompute in [Recompute::default(), ALL] {
        assert_held(&ActivationMemory {
            recompute,
            ..of.clone()
        });
    }
}

/// Compares the bytes that twice the tokens add. In so small a model, the graph and copies of
/// modules are a tenth of the bytes, but they do not depend on the number of tokens and cancel out.
fn assert_held_of_more_tokens(of: &ActivationMemory, tolerance: f64) {
    let twice = ActivationMemory {
        micro_batch: 2 * of.micro_batch,
        ..of.clone()
    };
    let [once, doubled] = held(of, [of.micro_batch, twice.micro_batch]);
    let found = doubled - once;
    let expected = formula(&twice) - formula(of);
    let off = found as f64 / expected as f64 - 1.0;
    assert!(
        off.abs() < tolerance,
        "{found} bytes more, {expected} by the formula ({off:+.3}): {of:#?}"
    );
}

#[rstest]
fn what_parts_and_whole_blocks_hold_is_what_the_formula_says(
    #[values(Family::LLAMA, Family::GPT2, Family::BERT)] family: Family,
    #[values((2, 1, false), (4, 2, true))] (element, tp, sequence_parallel): (usize, usize, bool),
) {
    let of = ActivationMemory {
        element,
        tp,
        sequence_parallel,
        ..activations(family)
    };
    let mlp = Recompute {
        mlp: true,
        ..Recompute::default()
    };
    let core_attention = Recompute {
        core_attention: true,
        ..Recompute::default()
    };
    let both = Recompute {
        core_attention: true,
        mlp: true,
        ..ALL
    };
    let blocks = [
        RecomputeBlocks::Uniform(1),
        RecomputeBlocks::Uniform(2),
        RecomputeBlocks::Block(1),
    ];
    let blocks = blocks.map(|blocks| Recompute {
        blocks: Some(blocks),
        ..ALL
    });
    let kept = blocks.map(|blocks| Recompute {
        keep_attention: true,
        ..blocks
    });
    for recompute in [mlp, core_attention, both]
        .into_iter()
        .chain(blocks)
        .chain(kept)
    {
        assert_held_of_more_tokens(
            &ActivationMemory {
                recompute,
                ..of.clone()
            },
            0.02,
        );
    }
}

/// An encoder of two blocks and a decoder of one, which read as many tokens each or not.
#[rstest]
fn an_encoder_and_a_decoder_hold_what_the_formula_says(
    #[values((2, 1, false), (4, 2, true))] (element, tp, sequence_parallel): (usize, usize, bool),
    #[values(64, 32)] decoder_seq_len: usize,
) {
    let of = ActivationMemory {
        element,
        tp,
        sequence_parallel,
        decoder_seq_len,
        ..activations(Family::T5)
    };
    let uniform = Recompute {
        blocks: Some(RecomputeBlocks::Uniform(2)),
        ..ALL
    };
    for recompute in [Recompute::default(), ALL, uniform] {
        assert_held_of_more_tokens(
            &ActivationMemory {
                recompute,
                ..of.clone()
            },
            0.02,
        );
    }
}

/// The ranks of the tensor-parallel group do not split experts here: each rank has all of them.
#[rstest]
fn a_model_with_experts_holds_what_the_formula_says(
    #[values(
        Family::MIXTRAL,
        Family::QWEN2_MOE,
        Family::QWEN3_MOE,
        Family::DEEPSEEK_V2,
        Family::DEEPSEEK_V3
    )]
    family: Family,
    #[values((2, 1, false), (4, 2, true))] (element, tp, sequence_parallel): (usize, usize, bool),
) {
    let mut of = ActivationMemory {
        element,
        tp,
        sequence_parallel,
        ..activations(family)
    };
    of.model.latent = of.model.latent.map(|latent| Mla {
        q_lora_rank: (family == Family::DEEPSEEK_V3).then_some(48),
        ..latent
    });
    let mlp = Recompute {
        mlp: true,
        ..Recompute::default()
    };
    for recompute in [
        Recompute::default(),
        ALL,
        mlp,
        Recompute { mlp: true, ..ALL },
    ] {
        assert_held_of_more_tokens(
            &ActivationMemory {
                recompute,
                ..of.clone()
            },
            0.02,
        );
    }
}

#[rstest]
fn blocks_that_predict_further_tokens_hold_what_the_formula_says(
    #[values(Family::LLAMA, Family::GPT2, Family::DEEPSEEK_V3)] family: Family,
    #[values((1, false), (2, true))] (tp, sequence_parallel): (usize, bool),
    #[values(false, true)] fused_loss: bool,
) {
    let mut of = ActivationMemory {
        tp,
        sequence_parallel,
        fused_loss,
        ..activations(family)
    };
    of.model.mtp_layers = 2;
    let uniform = Recompute {
        blocks: Some(RecomputeBlocks::Uniform(1)),
        ..Recompute::default()
    };
    let block = Recompute {
        blocks: Some(RecomputeBlocks::Block(4)),
        ..ALL
    };
    let kept = Recompute {
        keep_attention: true,
        ..uniform
    };
    for recompute in [Recompute::default(), ALL, uniform, kept, block] {
        assert_held_of_more_tokens(
            &ActivationMemory {
                recompute,
                ..of.clone()
            },
            0.02,
        );
    }
}

#[test]
fn losses_without_logits_windows_and_copied_heads_are_counted() {
    let llama = activations(Family::LLAMA);
    assert_held(&ActivationMemory {
        fused_loss: true,
        ..llama.clone()
    });
    assert_held(&ActivationMemory {
        fused_loss: true,
        recompute: ALL,
        ..llama.clone()
    });
    let mut windows = llama.clone();
    windows.model.window = Some(8);
    windows.model.full_layers = vec![1];
    windows.seq_len = 128;
    windows.model.max_seq_len = 128;
    assert_held(&windows);
    let mut copied = ActivationMemory {
        tp: 4,
        sequence_parallel: true,
        ..llama
    };
    copied.model.kv_heads = 2;
    assert_held(&copied);
}

/// Recomputed tensors are not saved: the bytes shrink by exactly their size.
#[test]
fn what_is_computed_again_is_not_held() {
    let of = activations(Family::LLAMA);
    let held = |recompute| {
        let of = ActivationMemory {
            recompute,
            ..of.clone()
        };
        held(&of, [of.micro_batch])[0]
    };
    let kept = held(of.recompute);
    let less = |recompute| kept - held(recompute);
    let n = of.seq_len * of.micro_batch;
    let e = of.element;
    let model = &of.model;
    let near = |found: usize, expected: usize| {
        assert!(
            found.abs_diff(expected) < expected / 20,
            "{found} bytes less, not {expected}"
        );
    };
    let norms = (2 * model.layers + 1) * e * model.hidden * n;
    let activations = model.layers * e * model.ffn * n;
    near(
        less(Recompute {
            activation: false,
            ..ALL
        }),
        norms,
    );
    near(less(Recompute { norm: false, ..ALL }), activations);
    near(less(ALL), norms + activations);
}
