//! What backward computes once more instead of keeping it changes no bit of a run.

use megaburn::{
    models::Family,
    pipeline::ScheduleKind,
    train::{
        TrainConfig,
        config::{
            Dtype, RecomputeConfig,
            RecomputeMethod::{self, Block, Uniform},
            RecomputeModule::{self, Activation, CoreAttention, Mlp, Norm},
        },
    },
};
use rstest::rstest;

use crate::{
    bf16::{bits, config, saved, train},
    run::Run,
    zero::{in_order, losses},
};

/// Four steps of several micro-batches, with what each of `ways` computes again, and with nothing.
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
        (config.train.micro_batch, config.model.layers) = (2, 3);
        change(&mut config);
        config.recompute = recompute.clone();
        let steps = train(config, 4);
        (losses(&steps), saved(&run), steps)
    };
    let expected = trained(&RecomputeConfig::default());
    assert!(expected.2[3].loss != expected.2[0].loss, "nothing was learnt");
    for way in ways {
        let found = trained(way);
        assert_eq!(found.0, expected.0, "losses, {way:?}");
        assert_eq!(bits(&found.1), bits(&expected.1), "parameters and moments, {way:?}");
    }
}

fn modules(modules: &[RecomputeModule]) -> RecomputeConfig {
    RecomputeConfig { modules: modules.to_vec(), ..RecomputeConfig::default() }
}

fn layers(method: RecomputeMethod, num_layers: usize) -> RecomputeConfig {
    RecomputeConfig { method, num_layers, ..RecomputeConfig::default() }
}

fn offloaded(of: RecomputeConfig) -> RecomputeConfig {
    RecomputeConfig { offload: true, ..of }
}

/// Modules one by one and together, and whole layers.
fn ways() -> Vec<RecomputeConfig> {
    let all = [Norm, Activation, CoreAttention, Mlp];
    let mut ways: Vec<_> = all.iter().map(|&module| modules(&[module])).collect();
    ways.extend([modules(&[Norm, Activation]), modules(&all)]);
    ways.extend([layers(Uniform, 1), layers(Uniform, 2), layers(Block, 1)]);
    ways.push(RecomputeConfig { modules: all.to_vec(), ..layers(Block, 2) });
    ways.extend([offloaded(layers(Uniform, 1)), offloaded(layers(Block, 2))]);
    ways
}

#[rstest]
fn four_steps_are_the_same_to_the_bit(
    #[values(Family::Llama, Family::Gpt2)] family: Family,
    #[values("tp1", "tp2", "tp2-sp", "tp2-dp3-sp")] layout: &str,
    #[values(Dtype::F32, Dtype::Bf16, Dtype::F16)] dtype: Dtype,
) {
    assert_same_bits(layout, dtype, &ways(), |config| {
        (config.train.hidden_dropout, config.train.attention_dropout) = (0.2, 0.3);
        config.model.family = family;
        if family == Family::Gpt2 {
            config.model.kv_heads = config.model.heads;
        }
    });
}

/// Parameters shared out, copies of key/value heads, norms of heads, two matrices for tokens, a loss without
/// all logits.
#[rstest]
#[case::zero_2("dp3", 2, Family::Llama, 2, true, false)]
#[case::zero_3("dp3", 3, Family::Llama, 2, true, false)]
#[case::zero_3_sp("tp2-dp3-sp", 3, Family::Llama, 2, false, true)]
#[case::copied_heads("tp4-sp", 0, Family::Llama, 2, true, true)]
#[case::norms_of_heads("tp2-dp2-sp", 1, Family::Qwen3, 2, false, false)]
#[case::biases("tp2-sp", 0, Family::Qwen2, 2, true, true)]
#[case::shared_sequences("cp2", 2, Family::Llama, 2, true, false)]
#[case::shared_sequences_sp("tp2-cp2-sp", 3, Family::Llama, 2, true, true)]
fn so_are_those_of_other_runs(
    #[case] layout: &str,
    #[case] zero: u8,
    #[case] family: Family,
    #[case] kv_heads: usize,
    #[case] tied: bool,
    #[case] fused_loss: bool,
    #[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype,
) {
    let ways = [modules(&[Norm, Activation]), modules(&[CoreAttention, Mlp]), layers(Uniform, 2)];
    assert_same_bits(layout, dtype, &ways, |config| {
        (config.model.family, config.model.kv_heads, config.model.tied) = (family, kv_heads, tied);
        config.train.fused_linear_cross_entropy = fused_loss;
        (config.parallel.zero, config.parallel.bucket_size) = (zero, Some(5000));
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
    let mixed = RecomputeConfig { modules: vec![Norm], ..layers(Block, 1) };
    let layers = [layers(Uniform, 1), layers(Uniform, 2), offloaded(layers(Uniform, 1))];
    let ways = [&[modules(&[Norm, Mlp]), mixed], &layers[..]].concat();
    assert_same_bits(layout, dtype, &ways, |config| {
        config.model.layers = 6;
        config.train.hidden_dropout = 0.1;
        (config.parallel.schedule, config.parallel.chunks) = (Some(schedule), Some(chunks));
        config.parallel.zero = zero;
    });
}
