//! Every block of TOML has keys that exist: of a run, of a sweep, or of a manifest.

use std::{fs, sync::OnceLock};

use megaburn::train::ConfigLayers;
use rstest::rstest;
use serde_json::Value as Json;
use toml::{Table, Value};

use super::pages;
use crate::house::rules::root;

fn schema() -> &'static Json {
    static SCHEMA: OnceLock<Json> = OnceLock::new();
    SCHEMA.get_or_init(|| {
        let text = fs::read_to_string(root().join("configs/schema.json")).unwrap();
        serde_json::from_str(&text).unwrap()
    })
}

/// The sections of a configuration.
pub(super) fn sections() -> Vec<String> {
    schema()["properties"]
        .as_object()
        .unwrap()
        .keys()
        .cloned()
        .collect()
}

/// Whether a configuration has this key or section, like `parallel.tp` or `optimizer.sgd`.
pub(super) fn is_known(key: &str) -> bool {
    let mut place = schema();
    for part in key.split('.') {
        // The keys of the entries of a list.
        if place["items"].is_object() {
            place = &place["items"];
        }
        place = &place["properties"][part];
    }
    !place.is_null()
}

/// What is wrong with a block, if anything.
fn check(text: &str) -> Result<(), String> {
    let table: Table = text.parse().map_err(|e: toml::de::Error| e.to_string())?;
    let has = |name: &str| table.contains_key(name);
    if has("grid") || table.get("run").is_some_and(Value::is_array) {
        return sweep(table);
    }
    let of_manifests = ["dependencies", "patch", "megaburn"];
    if of_manifests.into_iter().any(has) {
        return manifest(&table);
    }
    let layers = ConfigLayers::new().with_text("the block", text);
    layers.map(|_| ()).map_err(|e| e.to_string())
}

/// A sweep: settings of all runs, lists of values, and further runs.
fn sweep(mut table: Table) -> Result<(), String> {
    let mut settings = Vec::new();
    for (name, value) in &mut table {
        match (name.as_str(), value) {
            ("dir" | "config" | "jobs" | "gpus" | "metric" | "fit", _) => {}
            ("set", value) => settings.push(value.clone()),
            ("grid", value) => {
                first_values(value)?;
                settings.push(value.clone());
            }
            ("run", Value::Array(runs)) => {
                for run in runs {
                    run.as_table_mut().unwrap().remove("name");
                    settings.push(run.clone());
                }
            }
            (name, _) => return Err(format!("a sweep has no key {name}")),
        }
    }
    for table in settings {
        let text = toml::to_string(&table).unwrap();
        let layers = ConfigLayers::new().with_text("the block", &text);
        layers.map_err(|e| e.to_string())?;
    }
    Ok(())
}

/// Replaces each list of a grid by its first value.
fn first_values(value: &mut Value) -> Result<(), String> {
    match value {
        Value::Table(table) => table
            .iter_mut()
            .try_for_each(|(_, value)| first_values(value)),
        Value::Array(values) if !values.is_empty() => {
            let first = values[0].clone();
            *value = first;
            Ok(())
        }
        other => Err(format!("a grid needs lists, and has {other}")),
    }
}

/// A part of a manifest: what it names of megaburn exists.
fn manifest(table: &Table) -> Result<(), String> {
    let crates = table
        .get("dependencies")
        .and_then(Value::as_table)
        .unwrap_or(table);
    let Some(megaburn) = crates.get("megaburn") else {
        return Ok(());
    };
    let path = megaburn.get("path").and_then(Value::as_str);
    if path != Some("../megaburn/crates/megaburn") {
        return Err(format!("megaburn is not in {path:?}"));
    }
    let text = fs::read_to_string(root().join("crates/megaburn/Cargo.toml")).unwrap();
    let features = text.parse::<Table>().unwrap()["features"].clone();
    let named = megaburn.get("features").and_then(Value::as_array);
    for feature in named.into_iter().flatten() {
        let feature = feature.as_str().unwrap();
        if features.get(feature).is_none() {
            return Err(format!("megaburn has no feature {feature}"));
        }
    }
    Ok(())
}

#[test]
fn every_block_of_toml_has_keys_that_exist() {
    let mut looked_at = 0;
    for page in pages() {
        for block in page.blocks() {
            if block.language == "toml" {
                looked_at += 1;
                let result = check(&block.text);
                assert_eq!(result, Ok(()), "{}:{}", page.name, block.line);
            }
        }
    }
    assert!(looked_at > 15, "only {looked_at} blocks");
}

#[rstest]
#[case("[train]\nstesp = 3", "unknown key `train.stesp`")]
#[case(
    "[data]\npath = \"x\"\n[train]\nstesp = 3",
    "unknown key `train.stesp`"
)]
#[case("[train]\nsteps = \"many\"", "expected a whole number")]
#[case("[train\n", "TOML parse error")]
#[case("[grid]\noptimizer.lrate = [1, 2]", "unknown key `optimizer.lrate`")]
#[case("[grid]\noptimizer.lr = 1", "a grid needs lists")]
#[case("[set]\ntrain.stesp = 1\n[grid]", "unknown key `train.stesp`")]
#[case(
    "[[run]]\nname = \"a\"\nmodel.hiddens = 1",
    "unknown key `model.hiddens`"
)]
#[case("job = 2\n[grid]", "a sweep has no key job")]
#[case(
    "megaburn = { path = \"../megaburn/crates/megaburn\", features = [\"x\"] }",
    "no feature x"
)]
#[case("megaburn = { path = \"../megaburn\" }", "megaburn is not in")]
fn a_wrong_block_is_found(#[case] block: &str, #[case] message: &str) {
    let error = check(block).expect_err("it was accepted");
    assert!(error.contains(message), "{error}");
}

#[test]
fn keys_and_sections_are_known() {
    for key in [
        "parallel.tp",
        "optimizer.sgd",
        "data.train.weight",
        "optimizer.groups",
    ] {
        assert!(is_known(key), "{key}");
    }
    for key in [
        "parallel.tpp",
        "parallel.tp.x",
        "optimiser.lr",
        "data.train.wait",
    ] {
        assert!(!is_known(key), "{key}");
    }
}
