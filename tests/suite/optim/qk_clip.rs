//! Clipping of queries and keys under every layout, and when it must change nothing.

use std::fs;

use megaburn::train::{
    ConfigLayers, TrainConfig,
    config::{Dtype, ParamGroupConfig},
};
use rstest::rstest;

use crate::{
    layouts::grid::{Trained, compare_within, train as train_on_grid},
    optim::zero::{assert_resumes, in_order, losses},
    precision::bf16::{bits, config, saved, train},
};
use megaburn_test_support::{
    layout_grid::{EPSILON, STEPS},
    run::Run,
    text::{fresh_seed, write_random_text},
};

/// The configuration of a run with several buckets, and with a threshold if it clips.
fn clipped(run: &Run, layout: &str, dtype: Dtype, zero: u8, threshold: Option<f64>) -> TrainConfig {
    let mut config = config(run, layout, dtype);
    config.parallel.zero = zero;
    config.parallel.bucket_size = Some(5000);
    config.optimizer.qk_clip = threshold.is_some();
    config.optimizer.qk_clip_threshold = threshold.unwrap_or(100.0);
    config
}

/// A threshold below the logits of the first step.
const LOW: f64 = 0.004;

#[rstest]
#[case("tp1", 0, Dtype::F32)]
#[case("tp2-dp2-sp", 3, Dtype::Bf16)]
fn a_threshold_that_no_logit_reaches_changes_nothing(
    #[case] layout: &str,
    #[case] zero: u8,
    #[case] dtype: Dtype,
) {
    let [found, expected] = [Some(1e9), None].map(|threshold| {
        let run = Run::new();
        let mut config = clipped(&run, layout, dtype, zero, threshold);
        config.optimizer.clip_grad = 0.5;
        let steps = train(config, 5);
        let logits: Vec<_> = steps.iter().map(|step| step.max_attention_logit).collect();
        assert!(
            logits
                .iter()
                .all(|logit| logit.is_some() == threshold.is_some())
        );
        (losses(&steps), saved(&run))
    });
    assert_eq!(found.0, expected.0);
    assert_eq!(bits(&found.1), bits(&expected.1));
}

/// All samples are equal, and the learning rate is almost zero, so that only clipping changes the
/// logits.
#[rstest]
#[case("tp1", 0, Dtype::F32, 1e-4)]
#[case("tp4-sp", 0, Dtype::F32, 1e-4)]
#[case("cp2-dp2", 1, Dtype::F32, 1e-4)]
#[case("pp2-dp2", 3, Dtype::F32, 1e-4)]
#[case("dp2", 2, Dtype::Bf16, 2e-2)]
fn the_next_largest_logit_is_the_threshold(
    #[case] layout: &str,
    #[case] zero: u8,
    #[case] dtype: Dtype,
    #[case] tolerance: f64,
) {
    let run = Run::new();
    fs::write(run.path("text.txt"), "a".repeat(10_000)).unwrap();
    let mut config = clipped(&run, layout, dtype, zero, Some(LOW));
    config.model.parts.get_or_insert_default().qkv_bias = Some(true);
    config.optimizer.lr = 1e-12;
    config.optimizer.min_lr = 0.0;
    config.optimizer.qk_clip_alpha = 0.25;
    let steps = train(config, 3);
    let logits: Vec<f64> = steps
        .iter()
        .map(|step| step.max_attention_logit.unwrap())
        .collect();
    assert!(logits[0] > 1.5 * LOW, "{logits:?}");
    for logit in &logits[1..] {
        assert!((logit / LOW - 1.0).abs() < tolerance, "{logits:?}");
    }
}

#[rstest]
#[case("dp2", 1, Dtype::F32)]
#[case("dp2", 2, Dtype::Bf16)]
#[case("dp4", 3, Dtype::Bf16)]
#[case("tp2-dp2-sp", 3, Dtype::F32)]
#[case("tp2-dp2-sp", 1, Dtype::Bf16)]
fn clipped_steps_shared_out_are_the_same_to_the_bit(
    #[case] layout: &str,
    #[case] zero: u8,
    #[case] dtype: Dtype,
) {
    let [found, expected] = [zero, 0].map(|zero| {
        let run = Run::new();
        let steps = train(in_order(clipped(&run, layout, dtype, zero, Some(LOW))), 5);
        let logits: Vec<_> = steps.iter().map(|step| step.max_attention_logit).collect();
        (losses(&steps), logits, saved(&run))
    });
    assert!(expected.1[0].unwrap() > LOW);
    assert_eq!((found.0, found.1), (expected.0, expected.1));
    assert_eq!(bits(&found.2), bits(&expected.2));
}

#[rstest]
#[case(("dp2", 1), ("dp4", 2), Dtype::Bf16)]
#[case(("tp2-dp2-sp", 3), ("tp1", 0), Dtype::F32)]
fn a_clipped_run_resumes_bit_for_bit(
    #[case] run: (&str, u8),
    #[case] other: (&str, u8),
    #[case] dtype: Dtype,
) {
    let config = |run: &Run, layout: &str, zero| clipped(run, layout, dtype, zero, Some(LOW));
    assert_resumes(config, run, other);
}

/// Latents, whose rotated features are scaled in the queries alone, and key heads that are held by
/// two ranks.
#[rstest]
#[case::latents(
    "family = \"deepseek_v3\"\nheads = 4\nkv_heads = 4\nlatent.q_lora_rank = 12
    latent.kv_lora_rank = 8\nlatent.qk_nope_head_dim = 4\nlatent.qk_rope_head_dim = 4
    latent.v_head_dim = 6\nexperts.num = 4\nexperts.ffn = 8\nexperts.groups = [2, 1, 1]"
)]
#[case::copied_keys("heads = 8\nkv_heads = 2\nhead_dim = 4\nparts.qkv_bias = true")]
fn every_layout_clips_as_one_rank_does(
    #[case] model: &str,
    #[values(
        "tp4-sp",
        "cp2",
        "pp2-dp2 zero=1",
        "tp2-cp2-sp",
        "cp2 cp_comm=a2a",
        "dp2 zero=3"
    )]
    layout: &str,
    #[values(false, true)] recompute: bool,
) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("text.txt");
    write_random_text(&path, 4_000, fresh_seed());
    let of = |layout: Option<&str>| {
        let micro_batch = if layout.is_some() { 1 } else { 4 };
        let text = format!(
            "[model]\nhidden = 16\nffn = 24\nlayers = 2\ntied = false\n{model}
            [data]\npath = {path:?}\nseq_len = 16
            [train]\nsteps = {STEPS}\nglobal_batch = 4\nmicro_batch = {micro_batch}
            [optimizer]\nlr = 1e-3\neps = {EPSILON}\nwarmup_steps = 0
            qk_clip = true\nqk_clip_threshold = 0.001\nqk_clip_alpha = 0.3"
        );
        let mut layers = ConfigLayers::new().with_text("clip", &text).unwrap();
        let mut words = layout.unwrap_or("tp1").split(' ');
        let layout = words.next().unwrap();
        layers = layers.with_layout(layout).unwrap();
        for set in words {
            layers = layers.with_set(&format!("parallel.{set}")).unwrap();
        }
        if recompute && layout != "tp1" {
            for set in ["recompute.method=uniform", "recompute.num_layers=1"] {
                layers = layers.with_set(set).unwrap();
            }
        }
        train_on_grid(layers.load().unwrap(), layout.parse().unwrap())
    };
    let [found, expected] = [Some(layout), None].map(of);
    let logits = |run: &Trained| {
        run.steps
            .iter()
            .map(|step| step.max_attention_logit.unwrap())
            .collect::<Vec<_>>()
    };
    let [mine, theirs] = [&found, &expected].map(logits);
    assert!(theirs[0] > 0.002, "{theirs:?}");
    for (mine, theirs) in mine.iter().zip(&theirs) {
        assert!((mine / theirs - 1.0).abs() < 1e-3, "{mine} is not {theirs}");
    }
    compare_within(&found, &expected, layout, 1e-3);
}

#[test]
fn a_skipped_step_clips_nothing() {
    let run = Run::new();
    let mut config = clipped(&run, "dp2", Dtype::Bf16, 1, Some(LOW));
    train(config.clone(), 0);
    let before = saved(&run);
    config.optimizer.grad_norm_skip_threshold = 1e-9;
    let steps = train(config, 2);
    assert!(steps.iter().all(|step| step.skipped));
    assert!(steps[0].max_attention_logit.unwrap() > LOW);
    let after = saved(&run);
    for (name, values) in before.iter().filter(|(name, _)| name.starts_with("model.")) {
        assert_eq!(values, &after[name], "{name}");
    }
}

/// A group with the learning rate 0 is not clipped either. The logits of the other layer are.
#[rstest]
#[case("tp1", 0)]
#[case("tp2-dp2-sp", 3)]
fn a_frozen_parameter_is_not_clipped(#[case] layout: &str, #[case] zero: u8) {
    let run = Run::new();
    let mut config = clipped(&run, layout, Dtype::F32, zero, Some(LOW));
    config.optimizer.groups = vec![ParamGroupConfig {
        pattern: "blocks.0.attention.*".into(),
        lr: Some(0.0),
        weight_decay: None,
    }];
    train(config.clone(), 0);
    let before = saved(&run);
    let steps = train(config, 2);
    assert!(steps[0].max_attention_logit.unwrap() > LOW);
    let after = saved(&run);
    let name = |layer: usize| format!("model.blocks.{layer}.attention.qkv.weight");
    assert_eq!(before[&name(0)], after[&name(0)]);
    let norm = |values: &[f32]| values.iter().map(|value| value.powi(2)).sum::<f32>();
    assert!(norm(&after[&name(1)]) < 0.9 * norm(&before[&name(1)]));
}

/// The norm of the parameters is that of what a step leaves, which clipping makes smaller.
#[test]
fn the_logged_norm_is_that_of_the_clipped_parameters() {
    let run = Run::new();
    let mut config = clipped(&run, "tp1", Dtype::F32, 0, Some(LOW));
    config.train.log_params_norm = true;
    let steps = train(config, 1);
    assert!(steps[0].max_attention_logit.unwrap() > LOW);
    let saved = saved(&run);
    let of_model = saved.iter().filter(|(name, _)| name.starts_with("model."));
    let squares =
        of_model.flat_map(|(_, values)| values.iter().map(|value| f64::from(*value).powi(2)));
    let norm = squares.sum::<f64>().sqrt();
    let logged = steps[0].params_norm.unwrap();
    assert!((logged / norm - 1.0).abs() < 1e-5, "{logged}, not {norm}");
}

#[rstest]
#[case(&["model.family=qwen3"], "`optimizer.qk_clip` is true: it must be false for this model")]
#[case(&["model.parts.qk_norm=l2"], "`optimizer.qk_clip` is true: it must be false for this model")]
#[case(&["optimizer.qk_clip_alpha=1"], "`optimizer.qk_clip_alpha` is 1: it must be")]
#[case(&["optimizer.qk_clip_threshold=0"], "`optimizer.qk_clip_threshold` is 0: it must be")]
fn what_cannot_be_clipped_is_refused(#[case] sets: &[&str], #[case] message: &str) {
    let sets = ["optimizer.qk_clip=true"]
        .into_iter()
        .chain(sets.iter().copied());
    let layers = sets
        .into_iter()
        .try_fold(ConfigLayers::new(), ConfigLayers::with_set);
    let config = layers.and_then(ConfigLayers::load);
    let checked = config.and_then(|config| config.layout(None).map(drop));
    let error = checked.unwrap_err().to_string();
    assert!(error.contains(message), "{error}");
}
