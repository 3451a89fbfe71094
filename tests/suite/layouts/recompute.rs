//! Recomputing activations instead of keeping them changes no bit of a run.

use megaburn::{
    models::Family,
    pipeline::ScheduleKind,
    train::{
        TrainConfig,
        config::{
            CpComm, Dtype, RecomputeConfig,
            RecomputeMethod::{self, Block, Uniform},
            RecomputeModule::{self, Activation, CoreAttention, Mlp, Norm},
        },
    },
};
use rstest::rstest;

use crate::{
    optim::zero::{in_order, losses},
    precision::bf16::{bits, config, saved, train},
};
use megaburn_test_support::{expert_grid::SEED, run::Run, text::write_random_text};

/// Compares four steps of several micro-batches under each setting of `ways` with a run without
/// recompute.
fn assert_same_bits(
    layout: &str,
    dtype: Dtype,
    ways: &[RecomputeConfig],
    change: impl Fn(&mut TrainConfig),
) {
    let trained = |recompute: &RecomputeConfig| {
        let run = Run::new();
        let mut config = config(&run, layout, dtype);
        config.train.global_batch = 12;
        let mut config = in_order(config);
        config.train.micro_batch = 2;
        config.model.layers = 3;
        change(&mut config);
        config.recompute = recompute.clone();
        let steps = train(config, 4);
        (losses(&steps), saved(&run), steps)
    };
    let expected = trained(&RecomputeConfig::default());
    assert!(
        expected.2[3].loss != expected.2[0].loss,
        "nothing was learnt"
    );
    for way in ways {
        let found = trained(way);
        assert_eq!(found.0, expected.0, "losses, {way:?}");
        assert_eq!(
            bits(&found.1),
            bits(&expected.1),
            "parameters and moments, {way:?}"
        );
    }
}

fn modules(modules: &[RecomputeModule]) -> RecomputeConfig {
    RecomputeConfig {
        modules: modules.to_vec(),
        ..RecomputeConfig::default()
    }
}

fn layers(method: RecomputeMethod, num_layers: usize) -> RecomputeConfig {
    RecomputeConfig {
        method,
        num_layers,
        ..RecomputeConfig::default()
    }
}

fn offloaded(of: RecomputeConfig) -> RecomputeConfig {
    RecomputeConfig {
        offload: true,
        ..of
    }
}

fn with_attention_kept(of: RecomputeConfig) -> RecomputeConfig {
    RecomputeConfig {
        keep_attention: true,
        ..of
    }
}

/// Modules one by one and together, and full layers.
fn ways() -> Vec<RecomputeConfig> {
    let all = [Norm, Activation, CoreAttention, Mlp];
    let mut ways: Vec<_> = all.iter().map(|&module| modules(&[module])).collect();
    ways.extend([modules(&[Norm, Activation]), modules(&all)]);
    ways.extend([layers(Uniform, 1), layers(Uniform, 2), layers(Block, 1)]);
    ways.push(RecomputeConfig {
        modules: all.to_vec(),
        ..layers(Block, 2)
    });
    ways.extend([offloaded(layers(Uniform, 1)), offloaded(layers(Block, 2))]);
    ways
}

const LAYOUTS: [&str; 4] = ["tp1", "tp2", "tp2-sp", "tp2-dp3-sp"];
const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];
const FAMILIES: [Family; 2] = [Family::LLAMA, Family::GPT2];

/// Runs each way of [`ways`] with one of the three dtypes, which differs from way to way and from
/// layout to layout, and with one of the two families, which differs from dtype to dtype and from
/// layout to layout. Every pair of values of two of them occurs.
#[rstest]
fn four_steps_are_the_same_to_the_bit(
    #[values(0, 1, 2, 3)] layout: usize,
    #[values(0, 1, 2)] dtype: usize,
) {
    let family = FAMILIES[(layout + dtype) % FAMILIES.len()];
    let is_its_turn = |way: usize| (way + layout) % DTYPES.len() == dtype;
    let ways: Vec<_> = (0..)
        .zip(ways())
        .filter(|(way, _)| is_its_turn(*way))
        .map(|(_, way)| way)
        .collect();
    assert_same_bits_with_dropout(family, LAYOUTS[layout], DTYPES[dtype], &ways);
}

#[test]
#[ignore = "it takes minutes"]
fn four_steps_of_the_whole_product_are_the_same_to_the_bit() {
    for family in FAMILIES {
        for layout in LAYOUTS {
            for dtype in DTYPES {
                assert_same_bits_with_dropout(family, layout, dtype, &ways());
            }
        }
    }
}

fn assert_same_bits_with_dropout(
    family: Family,
    layout: &str,
    dtype: Dtype,
    ways: &[RecomputeConfig],
) {
    assert_same_bits(layout, dtype, ways, |config| {
        config.train.hidden_dropout = 0.2;
        config.train.attention_dropout = 0.3;
        config.model.family = family;
        if family == Family::GPT2 {
            config.model.kv_heads = config.model.heads;
        }
    });
}

/// The ways that run with `dtype`: every other way runs with f32 and the rest with bf16, or vice
/// versa if `offset` is odd. Ways that keep attention run with both. Runs of even and of odd
/// offsets contain every pair of a way and a dtype.
fn of_dtype(dtype: Dtype, offset: usize, ways: Vec<RecomputeConfig>) -> Vec<RecomputeConfig> {
    let is_its_turn = |way: usize| (way + offset) % 2 == usize::from(dtype == Dtype::Bf16);
    (0..)
        .zip(ways)
        .filter(|(index, way)| way.keep_attention || is_its_turn(*index))
        .map(|(_, way)| way)
        .collect()
}

/// Covers sharded parameters, replicated key/value heads, head norms, an untied output matrix, and
/// fused linear cross-entropy.
#[rstest]
#[case::zero_2("dp3", 2, Family::LLAMA, 2, true, false)]
#[case::zero_3("dp3", 3, Family::LLAMA, 2, true, false)]
#[case::zero_3_sp("tp2-dp3-sp", 3, Family::LLAMA, 2, false, true)]
#[case::copied_heads("tp4-sp", 0, Family::LLAMA, 2, true, true)]
#[case::norms_of_heads("tp2-dp2-sp", 1, Family::QWEN3, 2, false, false)]
#[case::biases("tp2-sp", 0, Family::QWEN2, 2, true, true)]
#[case::shared_sequences("cp2", 2, Family::LLAMA, 2, true, false)]
#[case::shared_sequences_sp("tp2-cp2-sp", 3, Family::LLAMA, 2, true, true)]
fn so_are_those_of_other_runs(
    #[case] layout: &str,
    #[case] zero: u8,
    #[case] family: Family,
    #[case] kv_heads: usize,
    #[case] tied: bool,
    #[case] fused_loss: bool,
    #[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype,
) {
    let mut ways = vec![
        modules(&[Norm, Activation]),
        modules(&[CoreAttention, Mlp]),
        layers(Uniform, 2),
    ];
    if layout.contains("cp") {
        ways.push(with_attention_kept(layers(Uniform, 2)));
    }
    let ways = of_dtype(dtype, zero.into(), ways);
    assert_same_bits(layout, dtype, &ways, |config| {
        config.model.family = family;
        config.model.kv_heads = kv_heads;
        config.model.tied = tied;
        config.train.fused_linear_cross_entropy = fused_loss;
        config.parallel.zero = zero;
        config.parallel.bucket_size = Some(5000);
    });
}

#[rstest]
#[case("pp2", ScheduleKind::OneForwardOneBackward, 1, 0)]
#[case("pp2", ScheduleKind::ZbH1, 1, 0)]
#[case("pp2-dp3", ScheduleKind::ZbV, 2, 2)]
#[case("tp2-pp2-sp", ScheduleKind::Interleaved, 2, 0)]
#[case("pp2-dp2", ScheduleKind::GPipe, 1, 3)]
#[case("cp2-pp2", ScheduleKind::ZbH1, 1, 0)]
fn so_are_those_of_pipelines(
    #[case] layout: &str,
    #[case] schedule: ScheduleKind,
    #[case] chunks: usize,
    #[case] zero: u8,
    #[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype,
) {
    let mixed = RecomputeConfig {
        modules: vec![Norm],
        ..layers(Block, 1)
    };
    let layers = [
        layers(Uniform, 1),
        layers(Uniform, 2),
        offloaded(layers(Uniform, 1)),
    ];
    let mut ways = [&[modules(&[Norm, Mlp]), mixed], &layers[..]].concat();
    if layout.contains("cp") {
        ways.extend(layers.map(with_attention_kept));
    }
    let ways = of_dtype(dtype, schedule as usize, ways);
    assert_same_bits(layout, dtype, &ways, |config| {
        config.model.layers = 6;
        config.train.hidden_dropout = 0.1;
        config.parallel.schedule = Some(schedule);
        config.parallel.chunks = Some(chunks);
        config.parallel.zero = zero;
    });
}

/// Tests every way in which ranks exchange keys and values. Every possible pair of values of two
/// columns occurs.
#[rstest]
#[case("cp2", "p2p", false)]
#[case("cp2", "all_gather", true)]
#[case("cp2", "a2a", false)]
#[case("cp4", "p2p", true)]
#[case("cp4", "all_gather", false)]
#[case("cp4", "a2a", true)]
#[case("cp4", "a2a2+p2p", false)]
#[case("cp4", "a2a2+p2p", true)]
#[case("tp2-cp2-sp", "p2p", false)]
#[case("tp2-cp2-sp", "all_gather", true)]
#[case("tp2-cp2-sp", "a2a", false)]
fn attention_that_ranks_share_is_kept_to_the_bit(
    #[case] layout: &str,
    #[case] comm: &str,
    #[case] documents: bool,
) {
    let ways = [
        layers(Uniform, 1),
        offloaded(layers(Uniform, 2)),
        layers(Block, 2),
    ];
    assert_same_bits(
        layout,
        Dtype::Bf16,
        &ways.map(with_attention_kept),
        |config| {
            config.parallel.cp_comm = vec![CpComm::Way(comm.parse().unwrap())];
            config.model.heads = 8;
            config.model.kv_heads = 8;
            config.data.documents = documents;
            config.data.document_multiple = 8;
        },
    );
}

/// If ranks hold full sequences, kept attention is computed in other blocks on CPUs. Every pair of
/// values of two columns occurs.
#[rstest]
#[case(Family::LLAMA, "tp1", false)]
#[case(Family::LLAMA, "tp2-sp", true)]
#[case(Family::LLAMA, "pp2-dp2", false)]
#[case(Family::GPT2, "tp1", true)]
#[case(Family::GPT2, "tp2-sp", false)]
#[case(Family::GPT2, "pp2-dp2", true)]
#[case(Family::DEEPSEEK_V3, "tp1", false)]
#[case(Family::DEEPSEEK_V3, "tp2-sp", true)]
#[case(Family::DEEPSEEK_V3, "pp2-dp2", false)]
fn attention_that_is_kept_changes_numbers_by_rounding(
    #[case] family: Family,
    #[case] layout: &str,
    #[case] documents: bool,
) {
    let trained = |recompute: RecomputeConfig| {
        let run = Run::new();
        // The seed is fixed: if two experts score almost equally, rounding decides between them.
        write_random_text(&run.path("text.txt"), 10_000, SEED);
        let mut config = config(&run, layout, Dtype::F32);
        config.model.family = family;
        config.model.layers = 4;
        config.model.kv_heads = 4;
        config.data.documents = documents;
        if !documents {
            config.train.attention_dropout = 0.3;
        }
        config.optimizer.lr = 1e-3;
        config.optimizer.eps = 1e-5;
        config.recompute = recompute;
        let steps = train(config, 4);
        let numbers = steps.iter().flat_map(|step| [step.loss, step.grad_norm]);
        numbers.collect::<Vec<_>>()
    };
    let expected = trained(RecomputeConfig::default());
    assert!(expected[6] != expected[0], "nothing was learnt");
    for way in [
        layers(Uniform, 1),
        offloaded(layers(Uniform, 2)),
        layers(Block, 1),
    ] {
        let found = trained(with_attention_kept(way.clone()));
        for (found, expected) in found.iter().zip(&expected) {
            let off = (found - expected).abs() / expected;
            assert!(off <= 1e-5, "{way:?}: {found}, not {expected}");
        }
    }
}
