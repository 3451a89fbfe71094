//! JSON as a list of keys and values.

use std::collections::BTreeMap;

use serde_json::Value;

/// All values of a JSON value by dotted keys, such as `progress.step`. Arrays of plain values are
/// values; elements of other arrays have their numbers as keys.
pub(super) fn by_key(prefix: &str, value: &Value) -> BTreeMap<String, Value> {
    let mut found = BTreeMap::new();
    add(prefix.to_string(), value, &mut found);
    found
}

fn add(key: String, value: &Value, found: &mut BTreeMap<String, Value>) {
    let below = |name: &str| match key.as_str() {
        "" => name.to_string(),
        key => format!("{key}.{name}"),
    };
    let is_nested = |value: &Value| value.is_object() || value.is_array();
    match value {
        Value::Object(entries) if !entries.is_empty() => {
            for (name, value) in entries {
                add(below(name), value, found);
            }
        }
        Value::Array(elements) if elements.iter().any(is_nested) => {
            for (number, value) in elements.iter().enumerate() {
                add(below(&number.to_string()), value, found);
            }
        }
        value => {
            found.insert(key, value.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_value_has_a_key() {
        let value = json!({"b": [1, 2], "a": {"c": null, "d": {}}, "e": [{"f": 3}, [4]]});
        let found: Vec<_> = by_key("x", &value).into_iter().collect();
        let expected = [
            ("x.a.c", json!(null)),
            ("x.a.d", json!({})),
            ("x.b", json!([1, 2])),
            ("x.e.0.f", json!(3)),
            ("x.e.1", json!([4])),
        ];
        assert_eq!(found, expected.map(|(key, value)| (key.to_string(), value)));
        assert_eq!(by_key("", &json!(1)).len(), 1);
    }
}
