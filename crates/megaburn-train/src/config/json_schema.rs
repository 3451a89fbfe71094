//! The JSON schema of a configuration: the keys, types, defaults and ranges of all sections.

use schemars::{Schema, SchemaGenerator, generate::SchemaSettings, json_schema as schema_of};
use serde_json::{Map, Value, json};

use super::TrainConfig;

/// The JSON schema (draft 7, which editors of TOML read) of a configuration file.
///
/// Descriptions are the doc comments of the fields of [`TrainConfig`] and its sections. The values
/// of a choice are explained in `x-taplo.docs.enumValues`, where the editor extension looks.
pub fn json_schema() -> Value {
    fn remove_rules(schema: &mut Value) {
        if let Some(schema) = schema.as_object_mut() {
            schema.shift_remove(RULE);
            schema.shift_remove(REFUSED);
        }
        let keys = schema.get_mut("properties").and_then(Value::as_object_mut);
        keys.into_iter()
            .flatten()
            .for_each(|(_, key)| remove_rules(key));
    }
    let mut schema = schema_with_rules();
    remove_rules(&mut schema);
    schema
}

/// A keyword that JSON schemas do not have: what a value must be, completing "it must be ..". It is
/// `false` if the section compares a number with other keys; without it, the text follows from the
/// limits.
pub(super) const RULE: &str = "x-rule";

/// A keyword that JSON schemas do not have: names that the type of a key has but the key refuses.
pub(super) const REFUSED: &str = "x-refused";

/// The schema with the keywords [`RULE`] and [`REFUSED`].
pub(super) fn schema_with_rules() -> Value {
    let settings = SchemaSettings::draft07().with(|settings| settings.inline_subschemas = true);
    let generator = settings.into_generator();
    let mut schema = generator.into_root_schema_for::<TrainConfig>().to_value();
    simplify(&mut schema);
    schema["title"] = json!("Configuration of a megaburn run");
    schema
}

/// Removes names from a choice, with their meanings.
fn remove_names(choice: &mut Map<String, Value>, refused: &[Value]) {
    let names = choice["enum"].as_array().expect("a list of names").clone();
    let stays = |name: &Value| !refused.contains(name);
    if let Some(Value::Array(meanings)) = choice
        .get_mut("x-taplo")
        .and_then(|extension| extension.pointer_mut("/docs/enumValues"))
    {
        let mut names = names.iter();
        meanings.retain(|_| names.next().is_some_and(stays));
    }
    let names: Vec<Value> = names.into_iter().filter(stays).collect();
    choice.insert("enum".into(), names.into());
}

/// The schema of `parallel.cp_comm`: one name for all layers, or a list of them.
pub(super) fn cp_comm(_: &mut SchemaGenerator) -> Schema {
    let name = r"^(auto|p2p|all_gather|a2a|a2a[1-9][0-9]*\+p2p)$";
    schema_of!({
        "type": ["string", "array"],
        "pattern": name,
        "items": { "type": "string", "pattern": name },
    })
}

/// Brings what schemars derives into the form that editors explain best: choices as lists of names,
/// no `null`, which TOML does not have, and descriptions in one line.
fn simplify(schema: &mut Value) {
    let Value::Object(object) = schema else {
        return;
    };
    object.shift_remove("format");
    let is_section = object.contains_key("properties");
    if object.get("default").is_some_and(Value::is_null) || is_section {
        object.shift_remove("default");
    }
    if let Some(Value::String(text)) = object.get_mut("description") {
        *text = plain(text);
    }
    if let Some(Value::Array(names)) = object.get_mut("enum") {
        names.retain(|name| !name.is_null());
    }
    if let Some(Value::Array(types)) = object.get_mut("type") {
        types.retain(|name| name != "null");
        if let [name] = types.as_slice() {
            let name = name.clone();
            object.insert("type".into(), name);
        }
    }
    for keyword in ["anyOf", "oneOf"] {
        let Some(Value::Array(mut choices)) = object.remove(keyword) else {
            continue;
        };
        choices.retain(|choice| choice["type"] != "null");
        let only = match choices.as_mut_slice() {
            [only] => only.take(),
            _ => names(&choices),
        };
        let Value::Object(mut only) = only else {
            unreachable!("a schema is an object");
        };
        // What is said of the key goes before what is said of its type.
        only.extend(std::mem::take(object));
        *object = only;
        return simplify(schema);
    }
    if let Some(Value::Object(properties)) = object.get_mut("properties") {
        for key in properties.values_mut() {
            let schema = key.as_object_mut();
            let extra =
                schema.map(|schema| [RULE, REFUSED].map(|name| schema.shift_remove_entry(name)));
            simplify(key);
            let (Some(schema), Some(extra)) = (key.as_object_mut(), extra) else {
                continue;
            };
            schema.extend(extra.into_iter().flatten());
            if let Some(Value::Array(refused)) = schema.get(REFUSED).cloned() {
                remove_names(schema, &refused);
            }
        }
    }
    if let Some(items) = object.get_mut("items") {
        simplify(items);
    }
}

/// The schema of a choice between names, each of which has a description.
fn names(choices: &[Value]) -> Value {
    let values: Vec<&Value> = choices.iter().map(|choice| &choice["const"]).collect();
    let meanings: Vec<String> = choices
        .iter()
        .map(|choice| plain(choice["description"].as_str().unwrap_or_default()))
        .collect();
    json!({
        "type": "string",
        "enum": values,
        "x-taplo": { "docs": { "enumValues": meanings } },
    })
}

/// A doc comment as text: each paragraph in one line, and links of rustdoc as code.
fn plain(text: &str) -> String {
    let paragraphs = text.split("\n\n").map(|paragraph| {
        let words: Vec<&str> = paragraph.split_whitespace().collect();
        words.join(" ")
    });
    let text = paragraphs.collect::<Vec<_>>().join("\n\n");
    let mut parts = text.split("[`");
    let mut plain = parts.next().unwrap_or_default().to_string();
    for part in parts {
        plain.push('`');
        let (name, rest) = part.split_once("`]").unwrap_or((part, ""));
        plain.push_str(name);
        plain.push('`');
        let target = rest.starts_with('(').then(|| rest.find(')')).flatten();
        plain.push_str(target.map_or(rest, |end| &rest[end + 1..]));
    }
    plain
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[test]
    fn defaults_are_those_of_the_program() {
        fn defaults(schema: &Value) -> Value {
            let mut found = Map::new();
            for (name, key) in schema["properties"].as_object().unwrap() {
                let is_optional = [
                    "experts",
                    "latent",
                    "parts",
                    "rope_scaling",
                    "batch_ramp",
                    "fim",
                    "masking",
                ];
                if key["properties"].is_object() {
                    if !is_optional.contains(&name.as_str()) {
                        found.insert(name.clone(), defaults(key));
                    }
                } else if let Some(default) = key.get("default") {
                    found.insert(name.clone(), default.clone());
                }
            }
            found.into()
        }
        let expected = serde_json::to_value(TrainConfig::default()).unwrap();
        assert_eq!(defaults(&json_schema()), expected);
    }

    #[test]
    fn every_key_is_described_and_of_a_known_type() {
        fn walk(schema: &Value, path: &str) {
            for (name, key) in schema["properties"].as_object().into_iter().flatten() {
                let path = format!("{path}.{name}");
                assert!(key["description"].is_string(), "{path} has no doc comment");
                let list = [key["type"].clone()];
                let types = key["type"].as_array().map_or(&list[..], Vec::as_slice);
                let known = ["object", "array", "string", "boolean", "integer", "number"];
                let is_known = |name: &Value| known.iter().any(|known| name == known);
                assert!(types.iter().all(is_known), "{path}: {key}");
                let is_section = key["properties"].is_object();
                assert_eq!(is_section, key["additionalProperties"] == false, "{path}");
                walk(key, &path);
            }
        }
        let schema = json_schema();
        assert_eq!(schema["additionalProperties"], false);
        walk(&schema, "");
    }

    #[rstest]
    #[case("/run/device", &["auto", "cpu", "cuda"])]
    #[case("/model/family", &["gpt2", "llama", "mistral", "qwen2", "mixtral", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gemma2", "gemma3_text", "phi3", "olmo2", "olmoe", "granite", "starcoder2", "nemotron", "gpt_neox", "qwen2_moe", "falcon", "bert", "megatron-bert", "t5", "mt5", "gpt_oss"])]
    #[case("/model/parts/activation", &["swiglu", "geglu", "geglu_tanh", "clamped_swiglu", "gelu", "gelu_tanh", "relu", "squared_relu"])]
    #[case("/model/parts/norm_placement", &["pre", "output", "sandwich", "post"])]
    #[case("/parallel/schedule", &["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])]
    #[case("/train/dtype", &["f32", "bf16", "f16", "float32", "bfloat16", "float16"])]
    #[case("/optimizer/momentum_dtype", &["f32", "bf16", "fp8", "float32", "bfloat16"])]
    #[case("/optimizer/muon/scale_mode", &["spectral", "unit_rms_norm", "shape_scaling"])]
    #[case("/recompute/modules/items", &["norm", "activation", "core_attention", "mlp"])]
    fn the_names_of_a_choice_are_listed(#[case] key: &str, #[case] names: &[&str]) {
        let path = key.replace('/', "/properties/");
        let path = path.replace("/properties/items", "/items");
        let schema = json_schema();
        assert_eq!(schema.pointer(&path).unwrap()["enum"], json!(names));
    }

    #[test]
    fn doc_comments_become_text() {
        assert_eq!(plain("One\ntwo.\n\nThree."), "One two.\n\nThree.");
        assert_eq!(
            plain("As [`auto`](Self::auto) and [`A::b`] say."),
            "As `auto` and `A::b` say."
        );
    }
}
