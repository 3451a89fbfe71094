//! The check of a layer against the schema: which keys there are, and what type each value has.

use std::sync::LazyLock;

use serde_json::Value as Schema;
use toml::{Table, Value};

use super::{json_schema, nearest::nearest_key, removed::why_removed};
use crate::TrainError;

static SCHEMA: LazyLock<Schema> = LazyLock::new(json_schema);

/// Every key, including sections, as a dotted path.
pub(super) fn keys() -> Vec<String> {
    fn walk(schema: &Schema, prefix: &str, keys: &mut Vec<String>) {
        for (name, inner) in schema["properties"].as_object().into_iter().flatten() {
            let key = join(prefix, name);
            walk(inner, &key, keys);
            keys.push(key);
        }
    }
    let mut keys = Vec::new();
    walk(&SCHEMA, "", &mut keys);
    keys
}

/// Whether a key is a section.
pub(super) fn is_section(key: &str) -> bool {
    keys().iter().any(|other| {
        other
            .strip_prefix(key)
            .is_some_and(|rest| rest.starts_with('.'))
    })
}

/// Refuses a key that does not exist or was removed, and a value of another type. `origin` says
/// where the layer came from.
pub(super) fn check(layer: &Table, origin: &str) -> Result<(), TrainError> {
    check_table(layer, &SCHEMA, "", origin)
}

fn check_table(
    given: &Table,
    schema: &Schema,
    prefix: &str,
    origin: &str,
) -> Result<(), TrainError> {
    for (name, found) in given {
        let key = join(prefix, name);
        let origin = origin.to_string();
        let Some(expected) = schema["properties"].get(name) else {
            if let Some(why) = why_removed(&key) {
                return Err(TrainError::RemovedKey { key, origin, why });
            }
            let nearest = nearest_key(&key);
            return Err(TrainError::UnknownKey {
                key,
                origin,
                nearest,
            });
        };
        let is = |name: &str| match &expected["type"] {
            Schema::Array(types) => types.iter().any(|other| other == name),
            other => other == name,
        };
        match found {
            Value::Table(given) if is("object") => check_table(given, expected, &key, &origin)?,
            Value::Integer(number) if is("integer") && *number >= 0 => {}
            Value::Integer(_) | Value::Float(_) if is("number") => {}
            Value::String(_) if is("string") => {}
            Value::Boolean(_) if is("boolean") => {}
            Value::Array(_) if is("array") => {}
            _ => {
                let expected = match expected["type"].as_str() {
                    Some("object") => "a table",
                    Some("integer") => "a whole number of 0 or more",
                    Some("number") => "a number",
                    Some("boolean") => "true or false",
                    Some("string") => "a string in quotes",
                    // With or without a single string in its place.
                    _ => "a list in brackets",
                };
                return Err(TrainError::WrongType {
                    key,
                    origin,
                    expected,
                    found: describe(found),
                });
            }
        }
    }
    Ok(())
}

fn describe(value: &Value) -> String {
    match value {
        Value::Array(_) => "an array".into(),
        Value::Table(_) => "a table".into(),
        _ => format!("the {} {value}", value.type_str()),
    }
}

/// The path of a key in the section at the path `prefix`.
pub(super) fn join(prefix: &str, name: &str) -> String {
    if prefix.is_empty() {
        name.to_string()
    } else {
        format!("{prefix}.{name}")
    }
}

#[cfg(test)]
mod tests {
    use serde::de::DeserializeOwned;

    use super::*;

    // serde's error for an unknown field lists the actual fields of a section.
    fn fields<T: DeserializeOwned + std::fmt::Debug>() -> Vec<String> {
        let text = toml::from_str::<T>("no_such_field = 1")
            .unwrap_err()
            .to_string();
        let list = text
            .split("expected one of")
            .nth(1)
            .or(text.split("expected").nth(1))
            .unwrap();
        list.split('`')
            .skip(1)
            .step_by(2)
            .map(str::to_string)
            .collect()
    }

    #[test]
    fn the_schema_holds_every_field_of_every_section() {
        use megaburn_optim::{LionConfig, MuonConfig, SgdConfig};

        use crate::config::*;
        let sections = [
            ("", fields::<TrainConfig>()),
            ("run", fields::<RunConfig>()),
            ("model", fields::<ModelConfig>()),
            ("model.experts", fields::<ExpertsConfig>()),
            ("model.latent", fields::<MlaConfig>()),
            ("model.rope_scaling", fields::<RopeScalingConfig>()),
            ("parallel", fields::<ParallelConfig>()),
            ("data", fields::<DataConfig>()),
            ("train", fields::<TrainingConfig>()),
            ("train.batch_ramp", fields::<BatchRampConfig>()),
            ("optimizer", fields::<OptimizerConfig>()),
            ("optimizer.sgd", fields::<SgdConfig>()),
            ("optimizer.lion", fields::<LionConfig>()),
            ("optimizer.muon", fields::<MuonConfig>()),
            ("moe", fields::<MoeTrainingConfig>()),
            ("recompute", fields::<RecomputeConfig>()),
            ("generate", fields::<GenerateConfig>()),
        ];
        let mut real: Vec<String> = sections
            .into_iter()
            .flat_map(|(prefix, names)| names.into_iter().map(move |name| join(prefix, &name)))
            .collect();
        let mut known = keys();
        real.sort();
        known.sort();
        assert_eq!(known, real);
    }
}
