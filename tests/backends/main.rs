//! What runs on which of Burn's backends: trains small models on each that is built in, and compares with
//! one rank on Flex. The table of `docs/backends.md` must be what is found.
//!
//! ```sh
//! cargo test -p megaburn-tests --test backends --features ndarray
//! cargo test -p megaburn-tests --test backends --features ndarray,wgpu
//! ```

use std::{fs, path::Path, process::ExitCode, sync::Arc};

use burn::prelude::Device;
use megaburn::{
    collective::{Group, GroupOptions, ProcessGroups, run_threads},
    mesh::Layout,
    train::{ConfigLayers, RunData, TrainConfig, TrainError, Trainer},
};

/// The table that must be found.
const TABLE: &str = "docs/backends.md";

/// The most by which a loss or gradient norm may differ from Flex's, relative to it.
const TOLERANCE: f64 = 2e-4;

/// What is trained: its row in the table, its layout, and its settings.
const TRAINED: &[(&str, &str, &[&str])] = &[
    ("Llama, tensor and sequence parallel", "tp2-sp", &[]),
    (
        "Llama, data parallel with ZeRO-1",
        "dp2",
        &["parallel.zero=1"],
    ),
    (
        "Llama, data parallel with ZeRO-3",
        "dp2",
        &["parallel.zero=3"],
    ),
    ("Llama, pipeline parallel", "pp2", &[]),
    ("Llama, context parallel", "cp2", &[]),
    (
        "Llama with Muon, recomputed layers",
        "tp2",
        &["optimizer.name=muon", "parallel.recompute=full"],
    ),
    (
        "GPT-2 with dropout",
        "tp2",
        &[
            "model.family=gpt2",
            "model.hidden_dropout=0.1",
            "model.attention_dropout=0.1",
        ],
    ),
    ("Qwen3", "tp2-sp", &["model.family=qwen3"]),
    ("Gemma 2", "tp2", &["model.family=gemma2"]),
    (
        "Mixtral, expert parallel",
        "dp2-ep2",
        &[
            "model.family=mixtral",
            "model.experts.num=4",
            "model.experts.top_k=2",
        ],
    ),
    ("bf16", "tp2", &["train.dtype=bf16"]),
    (
        "FP8, one scale per matrix",
        "tp2",
        &["precision.recipe=tensorwise"],
    ),
];

/// A backend: its name in the table, and its device, if it is built in and works here.
struct Backend {
    name: &'static str,
    device: Option<Device>,
}

fn backends() -> Vec<Backend> {
    #[cfg(feature = "ndarray")]
    let ndarray = Some(Device::ndarray());
    #[cfg(not(feature = "ndarray"))]
    let ndarray = None;
    #[cfg(feature = "wgpu")]
    let wgpu = Some(Device::wgpu(burn::tensor::DeviceKind::DefaultDevice));
    #[cfg(not(feature = "wgpu"))]
    let wgpu = None;
    [
        ("Flex", Some(Device::flex())),
        ("NdArray", ndarray),
        ("wgpu", wgpu),
    ]
    .into_iter()
    .map(|(name, device)| Backend { name, device })
    .collect()
}

fn config(data: &str, sets: &[&str]) -> Result<TrainConfig, TrainError> {
    let text = "[model]\nhidden = 32\nffn = 48\nlayers = 2\nheads = 4\nkv_heads = 2\n\
        [data]\nseq_len = 16\n[train]\nglobal_batch = 4\nmicro_batch = 2\n\
        [optimizer]\nwarmup_steps = 0";
    let mut layers = ConfigLayers::new()
        .with_text("backends", text)?
        .with_data(data)?;
    for set in sets {
        layers = layers.with_set(set)?;
    }
    layers.load()
}

/// The loss and gradient norm of three steps on each rank.
fn trained(config: TrainConfig, layout: Layout, device: &Device) -> Result<Vec<Vec<f64>>, String> {
    let config = Arc::new(config);
    let data = RunData::load(&config).map_err(|error| error.to_string())?;
    let data = Arc::new(data);
    let rank = |world: Group| {
        let groups = ProcessGroups::new(&world, layout)?;
        let device = device.clone().autodiff();
        let mut trainer = Trainer::new(config.clone(), groups, device, data.clone())?;
        let mut numbers = Vec::new();
        for _ in 0..3 {
            let step = trainer.step()?;
            numbers.extend([step.loss, step.grad_norm]);
        }
        Ok::<_, TrainError>(numbers)
    };
    let ranks = run_threads(layout.world_size(), GroupOptions::default(), rank);
    ranks
        .into_iter()
        .map(|rank| rank.map_err(|failure| failure.to_string()))
        .collect()
}

/// What a cell of the table says: `yes`, or why not.
fn cell(data: &str, layout: &str, sets: &[&str], device: &Device) -> Result<(), String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let layout: Layout = layout.parse().map_err(|error| text(&error))?;
    let config = |sets: &[&str]| config(data, sets).map_err(|error| text(&error));
    let expected = trained(config(sets)?, Layout::SINGLE, &Device::flex())?.remove(0);
    for found in trained(config(sets)?, layout, device)? {
        let is_near = |(a, b): (&f64, &f64)| (a - b).abs() <= TOLERANCE * b.abs();
        if !found.iter().zip(&expected).all(is_near) {
            return Err(format!("{found:?} instead of {expected:?}"));
        }
    }
    Ok(())
}

/// The rows of the committed table: cells by the row's name.
fn committed(text: &str, row: &str) -> Option<Vec<String>> {
    let line = text
        .lines()
        .find(|line| line.starts_with(&format!("| {row} |")))?;
    let cells = line.trim_matches('|').split('|').skip(1);
    Some(cells.map(|cell| cell.trim().to_owned()).collect())
}

fn main() -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("it is a folder of the workspace");
    let table = fs::read_to_string(root.join(TABLE)).unwrap_or_default();
    let folder = std::env::temp_dir().join(format!("megaburn-backends-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("the temporary folder can be written");
    let path = folder.join("text.txt");
    fs::write(
        &path,
        "It was the best of times, it was the worst of times. ".repeat(60),
    )
    .expect("the temporary folder can be written");
    let data = path.display().to_string();

    let backends = backends();
    let names: Vec<&str> = backends.iter().map(|backend| backend.name).collect();
    println!("| trained | {} |", names.join(" | "));
    println!("|---|{}", "---|".repeat(names.len()));
    let mut num_different = 0;
    for (row, layout, sets) in TRAINED {
        let expected = committed(&table, row).unwrap_or_default();
        let mut cells = Vec::new();
        for (at, backend) in backends.iter().enumerate() {
            let Some(device) = &backend.device else {
                cells.push("not built".to_owned());
                continue;
            };
            let found = cell(&data, layout, sets, device);
            let is_yes = found.is_ok();
            if let Err(why) = found {
                eprintln!("{row} on {}: {why}", backend.name);
            }
            let said = if is_yes { "yes" } else { "no" };
            if expected.get(at).map(String::as_str) != Some(said) {
                num_different += 1;
            }
            cells.push(said.to_owned());
        }
        println!("| {row} | {} |", cells.join(" | "));
    }
    fs::remove_dir_all(&folder).ok();
    if num_different > 0 {
        println!("{num_different} cells differ from {TABLE}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
