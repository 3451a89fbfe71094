//! Checks memory figures and smallest layouts in recipes and documents by computing them anew.

use std::{fs, path::Path};

use megaburn::train::{
    ConfigLayers, TrainConfig,
    estimate::{MemoryEstimate, Scores},
};
use rstest::rstest;

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

fn recipe(name: &str) -> ConfigLayers {
    ConfigLayers::new()
        .with_file(root().join(format!("configs/{name}.toml")))
        .unwrap()
}

/// The largest memory estimate of a rank. On GPUs attention is fused in bf16, so scores are never
/// stored.
fn largest(config: &TrainConfig) -> MemoryEstimate {
    MemoryEstimate::largest(config, &config.layout(None).unwrap(), Scores::Never).unwrap()
}

#[rstest]
fn a_recipe_says_what_memory_it_takes(
    #[values("gpt2", "llama-3-8b", "llama-3-70b", "mistral-7b", "qwen3-8b")] name: &str,
) {
    let config = recipe(name).load().unwrap();
    assert_eq!(config.train.dtype.to_string(), "bf16");
    let found = largest(&config);
    let line = format!("# {found}");
    let text = fs::read_to_string(root().join(format!("configs/{name}.toml"))).unwrap();
    assert!(
        text.lines().any(|of| of == line),
        "configs/{name}.toml must say:\n{line}"
    );
    assert!(found.total() < ROOM, "{found}");
}

/// The memory of an 80 GB GPU that may be planned with.
const ROOM: usize = 72_000_000_000;

/// Ways to split training, the simplest first.
const WAYS: [(&str, &[&str]); 9] = [
    ("", &["parallel.zero=1"]),
    ("", &["parallel.zero=2"]),
    ("", &["parallel.zero=2", AGAIN]),
    ("tp2-sp", &["parallel.zero=1"]),
    ("tp4-sp", &["parallel.zero=1"]),
    ("tp8-sp", &["parallel.zero=1"]),
    ("tp8-pp2-sp", &["parallel.zero=1"]),
    ("tp8-pp4-sp", &["parallel.zero=1"]),
    ("tp8-pp8-sp", &["parallel.zero=1"]),
];
const AGAIN: &str = "recompute.modules=[\"norm\", \"activation\"]";

/// The first of [`WAYS`] that fits on `gpus` GPUs, as a row of the table.
fn row(name: &str, gpus: usize) -> String {
    for (split, sets) in WAYS {
        let parts: usize = split
            .split('-')
            .filter_map(|part| {
                part.get(2..)
                    .and_then(|degree| degree.parse::<usize>().ok())
            })
            .product();
        if !gpus.is_multiple_of(parts) {
            continue;
        }
        let dp = format!("dp{}", gpus / parts);
        let layout = [split, &dp]
            .map(str::to_string)
            .into_iter()
            .filter(|part| !part.is_empty());
        let layout = layout.collect::<Vec<_>>().join("-");
        let layers = recipe(name).with_set("recompute.modules=[]").unwrap();
        let layers = layers
            .with_set("train.fused_linear_cross_entropy=true")
            .unwrap();
        let layers = layers.with_layout(&layout).unwrap();
        let set = |layers: ConfigLayers, set: &&str| layers.with_set(set);
        let config = sets.iter().try_fold(layers, set).unwrap().load().unwrap();
        let Ok(layout) = config.layout(None) else {
            continue;
        };
        let found = MemoryEstimate::largest(&config, &layout, Scores::Never).unwrap();
        if found.total() <= ROOM {
            let sets: Vec<_> = sets.iter().map(|set| format!("`{set}`")).collect();
            let gb = found.total() as f64 / 1e9;
            return format!(
                "| {name} | {gpus} | `{layout}` | {} | {gb:.1} |",
                sets.join(", ")
            );
        }
    }
    format!("| {name} | {gpus} | does not fit | | |")
}

#[rstest]
fn the_table_of_first_layouts_is_what_the_formula_says(
    #[values("llama-3-8b", "llama-3-70b", "qwen3-8b")] name: &str,
) {
    let page = fs::read_to_string(root().join("docs/layouts.md")).unwrap();
    let rows: Vec<_> = [8, 16, 32, 64].map(|gpus| row(name, gpus)).into();
    let found: Vec<_> = page
        .lines()
        .filter(|line| line.starts_with(&format!("| {name} |")))
        .collect();
    assert_eq!(
        found,
        rows,
        "docs/layouts.md must say:\n{}",
        rows.join("\n")
    );
}
