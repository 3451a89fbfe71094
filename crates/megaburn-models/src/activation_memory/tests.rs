use rstest::rstest;

use super::*;
use crate::{decoder::RecomputeBlocks, families::Family};

fn shape(family: Family, [hidden, ffn, heads, kv_heads, head_dim]: [usize; 5]) -> DecoderConfig {
    DecoderConfig {
        hidden,
        ffn,
        heads,
        kv_heads,
        head_dim,
        vocab: 32000,
        ..family.template()
    }
}

fn gpt3() -> DecoderConfig {
    shape(Family::GPT2, [12288, 4 * 12288, 96, 96, 128])
}

fn llama_3_8b() -> DecoderConfig {
    shape(Family::LLAMA, [4096, 14336, 32, 8, 128])
}

fn modules() -> [Recompute; 4] {
    [[false, false], [true, false], [false, true], [true, true]].map(|[norm, activation]| {
        Recompute {
            norm,
            activation,
            ..Recompute::default()
        }
    })
}

/// Checks table 2 of the paper, selective recompute, for the shape of GPT-3.
#[rstest]
#[case(1, false, 34)]
#[case(8, true, 34 / 8)]
#[case(8, false, 10 + 24 / 8)]
fn the_papers_formula_is_the_papers(
    #[case] tp: usize,
    #[case] sequence_parallel: bool,
    #[case] factor: usize,
) {
    let activations = ActivationMemory {
        tp,
        sequence_parallel,
        ..ActivationMemory::new(gpt3(), 2048, 1)
    };
    let sbh = 2048 * 12288;
    let expected = if sequence_parallel {
        34 * sbh / tp
    } else {
        factor * sbh
    };
    assert_eq!(activations.layer_by_paper_formula(), expected);
}

#[rstest]
fn a_block_never_holds_more_than_the_papers(
    #[values(gpt3(), llama_3_8b(), shape(Family::LLAMA, [4096, 11008, 32, 32, 128]),
        shape(Family::QWEN3, [4096, 12288, 32, 8, 128]), shape(Family::QWEN2, [3584, 18944, 28, 4, 128]),
        shape(Family::MISTRAL, [4096, 14336, 32, 8, 128]), shape(Family::GPT2, [768, 3072, 12, 12, 64]))]
    model: DecoderConfig,
    #[values(1, 2, 4)] tp: usize,
    #[values(false, true)] sequence_parallel: bool,
) {
    for recompute in modules() {
        let activations = ActivationMemory {
            tp,
            sequence_parallel,
            recompute,
            ..ActivationMemory::new(model.clone(), 4096, 2)
        };
        let ours = activations.layer(0);
        let papers = activations.layer_by_paper_formula();
        assert!(
            ours <= papers,
            "{recompute:?}: {ours} bytes, the paper's {papers}"
        );
        assert!(
            ours > papers * 3 / 4,
            "{recompute:?}: {ours} bytes, the paper's {papers}"
        );
    }
}

#[test]
fn a_block_of_llama_3_8b_holds_what_was_added_up_by_hand() {
    let n = 8192;
    let of = |recompute| {
        ActivationMemory {
            recompute,
            ..ActivationMemory::new(llama_3_8b(), n, 1)
        }
        .layer(0)
    };
    // Residual stream, statistics, norms, queries to values, attention, its LSE, up, activation.
    let kept = 2 * 2 * 4096 + 2 * 4 + 2 * 6144 + 2 * 4096 + 4 * 32 + 2 * 28672;
    let [nothing, norm, activation, both] = modules();
    assert_eq!(of(nothing), n * (kept + 2 * 2 * 4096 + 2 * 14336));
    assert_eq!(of(norm), n * (kept + 2 * 14336));
    assert_eq!(of(activation), n * (kept + 2 * 2 * 4096));
    assert_eq!(of(both), n * kept);
}

#[test]
fn a_block_of_llama_3_8b_without_attention_and_mlp() {
    let n = 8192;
    let of = |recompute| {
        ActivationMemory {
            recompute,
            ..ActivationMemory::new(llama_3_8b(), n, 1)
        }
        .layer(0)
    };
    let all = of(Recompute::default());
    let without = |core_attention, mlp| {
        all - of(Recompute {
            core_attention,
            mlp,
            ..Recompute::default()
        })
    };
    assert_eq!(without(true, false), n * 4 * 32);
    assert_eq!(without(false, true), n * 2 * (28672 + 14336));
    assert_eq!(
        without(true, true),
        without(true, false) + without(false, true)
    );
}

#[test]
fn of_whole_blocks_a_stream_is_held_for_each_group_and_one_group_beside() {
    let of = |blocks| {
        let recompute = Recompute {
            blocks: Some(blocks),
            norm: true,
            ..Recompute::default()
        };
        ActivationMemory {
            recompute,
            ..ActivationMemory::new(llama_3_8b(), 4096, 1)
        }
    };
    let n = 4096;
    let none = StageEnds {
        first: false,
        last: false,
    };
    let stream = n * (2 * 4096 + 4);
    let block = ActivationMemory::new(llama_3_8b(), 4096, 1).layer(0);
    let uniform = of(RecomputeBlocks::Uniform(2));
    assert_eq!(uniform.stage(3..8, none, 2), 2 * 3 * stream);
    assert_eq!(uniform.again(3..8), 2 * block);
    let first = of(RecomputeBlocks::Block(2));
    assert_eq!(first.stage(3..8, none, 1), 2 * stream + 3 * first.layer(5));
    assert_eq!(first.again(3..8), block);
    assert_eq!(ActivationMemory::new(llama_3_8b(), 4096, 1).again(3..8), 0);
    // Offloaded to host memory, except for the last group and the tensors in flight.
    let mut offloaded = uniform.clone();
    offloaded.recompute.offload = true;
    let tensor = n * 2 * 4096;
    assert_eq!(offloaded.stage(3..8, none, 5), 2 * tensor);
    let last = |of: &ActivationMemory, blocks, in_flight| {
        let ends = StageEnds {
            first: false,
            last: true,
        };
        of.stage(blocks, ends, in_flight) - in_flight * of.last()
    };
    assert_eq!(last(&offloaded, 3..8, 3), (3 * 2 + 2) * tensor);
    assert_eq!(last(&offloaded, 3..5, 3), 3 * 2 * tensor);
    assert_eq!(offloaded.again(3..8), 2 * block + 4 * tensor);
}

#[test]
fn a_stage_holds_its_blocks_for_every_micro_batch_in_flight() {
    let activations = ActivationMemory::new(llama_3_8b(), 4096, 1);
    let stage =
        |first, last, in_flight| activations.stage(0..4, StageEnds { first, last }, in_flight);
    let n = 4096;
    let block = activations.layer(0);
    assert_eq!(stage(false, false, 1), 4 * block);
    assert_eq!(stage(false, false, 3), 12 * block);
    assert_eq!(stage(true, false, 2), 2 * (4 * block + 8 * n));
    // Stream, statistics, norm output, logits, and three numbers and a label of the loss.
    let head = n * (2 * 4096 + 4 + 2 * 4096 + 2 * 32000 + 12 + 8);
    assert_eq!(stage(false, true, 1), 4 * block + head);
    let fused = ActivationMemory {
        fused_loss: true,
        ..activations.clone()
    };
    let ends = StageEnds {
        first: false,
        last: true,
    };
    assert_eq!(fused.stage(0..4, ends, 1), 4 * block + head - n * 2 * 32000);
}

#[test]
fn ranks_that_share_sequences_hold_what_shorter_ones_take() {
    for scores in [Scores::Never, Scores::Kept] {
        let of = |seq_len, cp, shares_heads| {
            let of = ActivationMemory::new(llama_3_8b(), seq_len, 2);
            ActivationMemory {
                scores,
                cp,
                shares_heads,
                ..of
            }
            .layer(0)
        };
        let short = ActivationMemory::new(llama_3_8b(), 2048, 2).layer(0);
        assert_eq!(of(8192, 4, false), short);
        // The output of attention in bf16, for 32 heads of 128 features.
        assert_eq!(of(8192, 4, true), short + 2 * 32 * 128 * 2048 * 2);
    }
}
