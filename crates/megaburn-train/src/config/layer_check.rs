//! The check of a layer against the schema: which keys there are, and what type each value has.

use serde_json::Value as Schema;
use toml::{Table, Value};

use super::{
    nearest::nearest_key,
    removed::why_removed,
    schema::{SCHEMA, join},
};
use crate::error::TrainError;

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
