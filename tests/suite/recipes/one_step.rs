//! One step of each family at 1/64 of its width, on rank threads.

use std::fmt::Display;

use megaburn::{
    mesh::Layout,
    report::metrics::StepMetrics,
    train::{ConfigLayers, TrainConfig},
};
use megaburn_test_support::text::{fresh_seed, write_random_text};
use rstest::rstest;

use super::table::{RECIPES, Recipe};
use crate::{encoders::corpus::Sentences, fp8::support::on_trainers};

/// The part of the width that is left.
const PART: usize = 64;
const SEQ_LEN: usize = 32;

/// The degree of an axis that is split: all collectives of the axis occur with two ranks.
fn two(degree: usize) -> usize {
    degree.min(2)
}

/// The layout with the same axes, each split once.
fn small_layout(of: Layout) -> Layout {
    Layout {
        tp: two(of.tp),
        cp: two(of.cp),
        pp: two(of.pp),
        dp: two(of.dp),
        ep: two(of.ep),
        etp: two(of.etp),
        sp: of.sp,
    }
}

/// The settings that make a recipe small.
fn small_sizes(config: &TrainConfig, layout: Layout) -> Vec<String> {
    let model = &config.model;
    let parallel = &config.parallel;
    let mut sets = Vec::new();
    let mut set = |key: &str, value: &dyn Display| sets.push(format!("{key}={value}"));
    let part = |size: usize| size.div_ceil(PART).max(8).next_multiple_of(8);
    let heads = 4;
    set("model.hidden", &part(model.hidden).max(32));
    set("model.ffn", &part(model.ffn));
    set("model.vocab", &part(model.vocab.unwrap()).max(272));
    set("model.heads", &heads);
    let shares_heads = model.kv_heads < model.heads;
    set("model.kv_heads", &if shares_heads { 2 } else { heads });
    if model.head_dim.is_some() {
        set("model.head_dim", &16);
    }
    // One layer in each stage; two where the first and the last stage have fewer.
    let stages = layout.pp * parallel.chunks.unwrap_or(1);
    let mut layers = if layout.pp == 1 { 2 } else { stages };
    if parallel.count_embedding {
        layers = 2 * stages - 2;
    }
    if model.encoder_layers.is_some() {
        layers = 4;
        set("model.encoder_layers", &2);
    }
    if parallel.pipeline_layout.is_some() {
        layers = 4;
        set("parallel.pipeline_layout", &"\"Ettt|tL\"");
    }
    set("model.layers", &layers);
    if let Some(experts) = &model.experts {
        set("model.experts.num", &8);
        set("model.experts.top_k", &2);
        for (key, width) in [("ffn", experts.ffn), ("shared_ffn", experts.shared_ffn)] {
            if let Some(width) = width {
                set(&format!("model.experts.{key}"), &part(width));
            }
        }
        if experts.groups.is_some() {
            set("model.experts.groups", &"[4, 2, 2]");
            let pattern = format!("([0]*1+[1]*{})", layers - 1);
            set("model.experts.layer_freq", &pattern);
        }
    }
    if model.latent.is_some() {
        let widths = [
            ("q_lora_rank", 24),
            ("kv_lora_rank", 8),
            ("qk_nope_head_dim", 8),
            ("qk_rope_head_dim", 8),
            ("v_head_dim", 8),
        ];
        for (key, width) in widths {
            set(&format!("model.latent.{key}"), &width);
        }
    }
    let micro_batch = two(config.train.micro_batch);
    set("train.micro_batch", &micro_batch);
    set(
        "train.global_batch",
        &(micro_batch * layout.dp * 2 * layout.pp),
    );
    set("train.steps", &1);
    set("data.seq_len", &SEQ_LEN);
    sets
}

/// The small run of a recipe, on data in a folder.
fn small(recipe: &Recipe, sets: &[String]) -> TrainConfig {
    let layout = small_layout(recipe.config.layout(None).unwrap());
    let layers = ConfigLayers::new()
        .with_text("recipe", &recipe.text)
        .unwrap();
    let sizes = small_sizes(&recipe.config, layout);
    let all = sizes.iter().chain(sets);
    let layers = all.fold(layers, |layers, set| layers.with_set(set).unwrap());
    let layers = layers.with_layout(&layout.to_string()).unwrap();
    layers
        .load()
        .unwrap_or_else(|error| panic!("{}: {error}", recipe.row.name()))
}

/// The step of every rank.
fn step(config: &TrainConfig) -> Vec<StepMetrics> {
    on_trainers(config, |mut trainer| trainer.step())
}

#[rstest]
#[case::llama("llama-3-70b-64xh100-fp8", &["tp", "sp", "pp", "dp"])]
#[case::llama_context("llama-3.1-405b-256xh100", &["tp", "sp", "cp", "pp"])]
#[case::qwen2("qwen2.5-72b-64xh100", &["tp", "sp", "pp", "dp"])]
#[case::qwen3("qwen3-32b-64xh100", &["tp", "sp", "pp", "dp"])]
#[case::qwen3_moe("qwen3-235b-a22b-256xh100", &["tp", "sp", "pp", "dp", "ep"])]
#[case::mixtral("mixtral-8x7b-64xh100", &["pp", "dp", "ep"])]
#[case::deepseek_v3("deepseek-v3-256xh200", &["tp", "sp", "pp", "dp", "ep"])]
#[case::gpt2("gpt-3-175b-128xh100", &["tp", "sp", "pp", "dp"])]
#[case::bert("bert-large-8xh100", &["dp"])]
#[case::t5("t5-large-8xh100", &["dp"])]
fn a_step_at_a_64th_of_its_width_trains(#[case] name: &str, #[case] axes: &[&str]) {
    let recipe = RECIPES.iter().find(|recipe| recipe.row.name() == name);
    let recipe = recipe.unwrap_or_else(|| panic!("no recipe {name}"));
    let seed = fresh_seed();
    let dir = tempfile::tempdir().unwrap();
    let sentences;
    let mut sets = vec![format!("run.dir={}", dir.path().join("run").display())];
    if recipe.model.data.contains_key("dataset") {
        sentences = Sentences::new(60, seed);
        sets.extend(
            sentences
                .settings()
                .into_iter()
                .filter(|set| set.starts_with("data.")),
        );
        sets.push("data.split=9,1".into());
        if recipe.config.model.encoder_layers.is_some() {
            sets.push(format!("data.decoder_seq_len={}", SEQ_LEN / 2));
        }
    } else {
        let text = dir.path().join("text.txt");
        write_random_text(&text, 20_000, seed);
        sets.push(format!("data.path={}", text.display()));
        sets.push("data.tokenizer=byte".into());
        sets.push("data.validation_fraction=0".into());
    }
    let config = small(recipe, &sets);
    let layout = config.layout(None).unwrap().to_string();
    let split = axes
        .iter()
        .all(|axis| layout.split('-').any(|part| part.starts_with(axis)));
    assert!(split, "{name} has {layout}, not {axes:?}");
    let ranks = step(&config);
    let vocab = config.model.vocab.unwrap() as f64;
    for metrics in &ranks {
        assert!(
            metrics.grad_norm > 0.0 && metrics.grad_norm.is_finite(),
            "{metrics:?}"
        );
        // Fresh weights guess.
        assert!((metrics.loss - vocab.ln()).abs() < 1.0, "{metrics:?}");
        assert_eq!(metrics.loss, ranks[0].loss);
    }
}
