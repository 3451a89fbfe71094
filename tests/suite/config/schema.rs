//! `configs/schema.json` and `docs/config.md` are what the program prints, and recipes are valid.

use std::{fs, path::Path, process::Command};

use rstest::rstest;
use serde_json::{Value, json};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

fn schema() -> Value {
    let text = fs::read_to_string(root().join("configs/schema.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

#[rstest]
#[case("schema", "configs/schema.json")]
#[case("reference", "docs/config.md")]
fn a_generated_file_is_up_to_date(#[case] command: &str, #[case] path: &str) {
    let program = env!("CARGO_BIN_EXE_megaburn-under-test");
    let printed = Command::new(program)
        .args(["config", command])
        .output()
        .unwrap();
    assert!(printed.status.success(), "{printed:?}");
    let committed = fs::read(root().join(path)).unwrap_or_default();
    assert!(
        committed == printed.stdout,
        "{path} is out of date; run `cargo run --bin megaburn -- config {command} > {path}`"
    );
}

/// What is wrong with a value, by its path. Covers the keywords that the schema has, but for
/// patterns.
fn errors(schema: &Value, value: &Value, path: &str) -> Vec<String> {
    const KEYWORDS: &str = "$schema title description default type enum properties items pattern \
                            additionalProperties minItems maxItems minimum maximum exclusiveMinimum \
                            exclusiveMaximum x-taplo";
    for keyword in schema.as_object().unwrap().keys() {
        let is_known = KEYWORDS.split(' ').any(|known| known == keyword);
        assert!(is_known, "{keyword} of {path} is not validated here");
    }
    let is = |name: &Value| match name.as_str().unwrap() {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        other => panic!("type {other} of {path}"),
    };
    let types = schema["type"].as_array();
    if !types.map_or_else(|| is(&schema["type"]), |types| types.iter().any(is)) {
        return vec![format!("{path}: {value} is no {}", schema["type"])];
    }
    let mut found = Vec::new();
    if let Some(names) = schema["enum"].as_array()
        && !names.contains(value)
    {
        found.push(format!("{path}: {value} is none of {names:?}"));
    }
    if let Some(number) = value.as_f64() {
        let breaks = |keyword: &str, is_outside: fn(f64, f64) -> bool| {
            let limit = schema[keyword].as_f64();
            limit.is_some_and(|limit| is_outside(number, limit))
        };
        if breaks("minimum", |number, limit| number < limit)
            || breaks("maximum", |number, limit| number > limit)
            || breaks("exclusiveMinimum", |number, limit| number <= limit)
            || breaks("exclusiveMaximum", |number, limit| number >= limit)
        {
            found.push(format!("{path}: {value} is out of range"));
        }
    }
    for item in value.as_array().into_iter().flatten() {
        found.extend(errors(&schema["items"], item, path));
    }
    for (name, value) in value.as_object().into_iter().flatten() {
        let path = format!("{path}.{name}");
        match schema["properties"].get(name) {
            Some(key) => found.extend(errors(key, value, &path)),
            None if schema["additionalProperties"] == false => {
                found.push(format!("{path}: unknown key"));
            }
            None => {}
        }
    }
    found
}

fn errors_of(text: &str) -> Vec<String> {
    let table: toml::Table = text.parse().unwrap();
    errors(&schema(), &json!(table), "")
}

#[test]
fn every_recipe_is_valid_and_names_the_schema() {
    let schema = schema();
    let mut recipes = 0;
    for (folder, named) in [
        ("configs", "./schema.json"),
        ("configs/recipes", "../schema.json"),
    ] {
        for entry in fs::read_dir(root().join(folder)).unwrap() {
            let path = entry.unwrap().path();
            let is_toml = path.extension().is_some_and(|ending| ending == "toml");
            // The table from which `configs/recipes` is generated is no configuration.
            if !is_toml || path.ends_with("configs/recipes.toml") {
                continue;
            }
            let text = fs::read_to_string(&path).unwrap();
            let table: toml::Table = text.parse().unwrap();
            let errors = errors(&schema, &json!(table), "");
            assert_eq!(errors, [""; 0], "{}", path.display());
            let first = format!("#:schema {named}\n");
            assert!(text.starts_with(&first), "{}", path.display());
            recipes += 1;
        }
    }
    assert!(recipes >= 50, "only {recipes} recipes");
}

#[rstest]
#[case("[train]\nstesp = 3", ".train.stesp: unknown key")]
#[case("[trian]\nsteps = 3", ".trian: unknown key")]
#[case("[train]\nsteps = 0", ".train.steps: 0 is out of range")]
#[case("[train]\nsteps = 1.5", ".train.steps: 1.5 is no \"integer\"")]
#[case("[optimizer.sgd]\nmomentum = 1", "momentum: 1 is out of range")]
#[case("[model]\nfamily = \"gpt3\"", ".model.family: \"gpt3\" is none of")]
#[case(
    "[recompute]\nmodules = [\"all\"]",
    ".recompute.modules: \"all\" is none of"
)]
#[case("model = 3", ".model: 3 is no \"object\"")]
fn a_wrong_file_is_invalid(#[case] text: &str, #[case] message: &str) {
    let errors = errors_of(text);
    assert!(
        matches!(errors.as_slice(), [error] if error.contains(message)),
        "{errors:?}"
    );
}
