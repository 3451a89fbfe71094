//! What backward computes once more instead of keeping it changes no bit of a run.

use megaburn::{
    models::Family,
    train::{
        TrainConfig,
        config::{Dtype, RecomputeModule},
    },
};
use rstest::rstest;

use crate::{
    bf16::{bits, config, saved, train},
    run::Run,
    zero::{in_order, losses},
};

/// Four steps of several micro-batches: with these modules computed again, and with none.
fn assert_same_bits(
    layout: &str,
    dtype: Dtype,
    modules: &[RecomputeModule],
    change: impl Fn(&mut TrainConfig),
) {
    let [with, without] = [modules, &[]].map(|modules| {
        let run = Run::new();
        let mut config = config(&run, layout, dtype);
        config.train.global_batch = 12;
        let mut config = in_order(config);
        config.train.micro_batch = 2;
        change(&mut config);
        config.recompute.modules = modules.to_vec();
        let steps = train(config, 4);
        (losses(&steps), saved(&run), steps)
    });
    assert_eq!(with.0, without.0, "losses");
    assert_eq!(bits(&with.1), bits(&without.1), "parameters and moments");
    assert!(without.2[3].loss != without.2[0].loss, "nothing was learnt");
}

const NORM: &[RecomputeModule] = &[RecomputeModule::Norm];
const ACTIVATION: &[RecomputeModule] = &[RecomputeModule::Activation];
const BOTH: &[RecomputeModule] = &[RecomputeModule::Norm, RecomputeModule::Activation];

#[rstest]
fn four_steps_are_the_same_to_the_bit(
    #[values(Family::Llama, Family::Gpt2)] family: Family,
    #[values("tp1", "tp2", "tp2-sp", "tp2-dp3-sp")] layout: &str,
    #[values(Dtype::F32, Dtype::Bf16, Dtype::F16)] dtype: Dtype,
    #[values(NORM, ACTIVATION, BOTH)] modules: &[RecomputeModule],
) {
    assert_same_bits(layout, dtype, modules, |config| {
        config.model.family = family;
        if family == Family::Gpt2 {
            config.model.kv_heads = config.model.heads;
        }
    });
}

/// Parameters shared out, copies of key/value heads, norms of heads, two matrices for tokens, a loss without
/// all logits.
#[rstest]
#[case::zero_3("dp3", 3, Family::Llama, 2, true, false)]
#[case::zero_3_sp("tp2-dp3-sp", 3, Family::Llama, 2, false, true)]
#[case::copied_heads("tp4-sp", 0, Family::Llama, 2, true, true)]
#[case::norms_of_heads("tp2-dp2-sp", 1, Family::Qwen3, 2, false, false)]
#[case::biases("tp2-sp", 0, Family::Qwen2, 2, true, true)]
fn so_are_those_of_other_runs(
    #[case] layout: &str,
    #[case] zero: u8,
    #[case] family: Family,
    #[case] kv_heads: usize,
    #[case] tied: bool,
    #[case] fused_loss: bool,
    #[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype,
) {
    assert_same_bits(layout, dtype, BOTH, |config| {
        (config.model.family, config.model.kv_heads, config.model.tied) = (family, kv_heads, tied);
        config.train.fused_linear_cross_entropy = fused_loss;
        (config.parallel.zero, config.parallel.bucket_size) = (zero, Some(5000));
    });
}
