//! No document, recipe or description says that an existing feature is missing.

use std::{
    fs,
    path::{Path, PathBuf},
};

use megaburn::train::ConfigLayers;

/// Phrases that say that something is missing.
const MISSING: [&str; 9] = [
    "not yet",
    "not built",
    "not implemented",
    "unimplemented",
    "not available",
    "coming soon",
    "is planned",
    "will be added",
    "this will be ",
];

/// Features by the words that name them, each with a setting that proves that it exists.
const FEATURES: [(&str, &str); 24] = [
    ("tensor", "parallel.tp=2"),
    ("sequence parallel", "parallel.sp=true"),
    ("pipeline", "parallel.pp=2"),
    ("interleav", "parallel.schedule=interleaved"),
    ("zero-bubble", "parallel.schedule=zb-v"),
    ("context", "parallel.cp=2"),
    ("expert", "parallel.ep=2"),
    ("zero", "parallel.zero=3"),
    ("sharded optimizer", "parallel.zero=1"),
    ("recompute", "recompute.method=uniform"),
    ("recomputation", "recompute.method=uniform"),
    ("checkpointing", "recompute.method=uniform"),
    ("offload", "optimizer.cpu_offload_fraction=1.0"),
    (
        "fused linear cross",
        "train.fused_linear_cross_entropy=true",
    ),
    ("bf16", "train.dtype=bf16"),
    ("f16", "train.dtype=f16"),
    ("loss scaling", "optimizer.loss_scale=8.0"),
    ("dropout", "train.hidden_dropout=0.1"),
    ("muon", "optimizer.name=muon"),
    ("batch ramp", "train.batch_ramp.start=4"),
    ("multi-token", "model.mtp_layers=1"),
    ("sliding window", "model.window=8"),
    ("asynchronous", "train.async_save=true"),
    ("object store", "train.checkpoint_store=s3://bucket/run"),
];

/// The only place where a list of missing features is allowed.
const LIST: (&str, &str) = ("README.md", "## What works today");

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap()
        .to_path_buf()
}

/// README, documents, recipes, and the descriptions of all crates.
fn texts() -> Vec<(String, String)> {
    let mut paths = vec![
        root().join("README.md"),
        root().join("cubecl-kernels/Cargo.toml"),
    ];
    for folder in ["docs", "docs/clusters", "configs", "configs/recipes"] {
        let entries = fs::read_dir(root().join(folder)).unwrap();
        paths.extend(
            entries
                .map(|entry| entry.unwrap().path())
                .filter(|path| path.is_file()),
        );
    }
    for entry in fs::read_dir(root().join("crates")).unwrap() {
        paths.push(entry.unwrap().path().join("Cargo.toml"));
    }
    let read = |path: PathBuf| {
        let name = path.strip_prefix(root()).unwrap().display().to_string();
        (name, fs::read_to_string(path).unwrap())
    };
    paths.into_iter().map(read).collect()
}

/// A text without the section that starts with `heading`, and that section.
fn without<'a>(text: &'a str, heading: &str) -> (String, &'a str) {
    let (before, rest) = text
        .split_once(heading)
        .unwrap_or_else(|| panic!("no {heading}"));
    let end = rest.find("\n## ").unwrap_or(rest.len());
    (format!("{before}{}", &rest[end..]), &rest[..end])
}

#[test]
fn only_the_list_of_what_works_says_what_is_missing() {
    let texts = texts();
    assert!(texts.len() > 25, "only {} texts were read", texts.len());
    for (name, text) in texts {
        let text = if name == LIST.0 {
            without(&text, LIST.1).0
        } else {
            text
        };
        let said = text
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ")
            .to_lowercase();
        for phrase in MISSING {
            let found = said
                .find(phrase)
                .map(|at| said[at..].chars().take(80).collect::<String>());
            assert_eq!(
                found, None,
                "{name} says that something is missing; say it in {LIST:?}"
            );
        }
    }
}

#[test]
fn nothing_in_that_list_exists() {
    let readme = fs::read_to_string(root().join(LIST.0)).unwrap();
    let (_, section) = without(&readme, LIST.1);
    let cells = section.lines().filter(|line| line.starts_with('|')).skip(2);
    let cells: Vec<&str> = cells
        .map(|line| line.trim_matches('|').rsplit('|').next().unwrap())
        .collect();
    assert!(cells.len() > 8, "{cells:?}");
    for (feature, setting) in FEATURES {
        if let Err(error) = ConfigLayers::new().with_set(setting) {
            panic!("{feature} is said to exist: {error}");
        }
        let missing = cells
            .iter()
            .find(|cell| cell.to_lowercase().contains(feature));
        assert_eq!(missing, None, "{feature} exists: --set {setting}");
    }
}
