//! Ranges of numbers, and names that a key refuses although its type has them.
//!
//! A field states them once, as an attribute: `#[schemars(extend("minimum" = 1))]`. The JSON schema,
//! the page of all keys and the check below have them from there.

use std::sync::LazyLock;

use serde::Serialize;
use serde_json::Value as Schema;
use toml::{Table, Value};

use super::{
    json_schema::{REFUSED, RULE, schema_with_rules},
    require::require,
    schema::join,
    value::value_at,
};
use crate::error::TrainError;

/// The values that a key may have.
struct Range {
    key: String,
    refused: Vec<Schema>,
    minimum: Option<f64>,
    above: Option<f64>,
    maximum: Option<f64>,
    below: Option<f64>,
    rule: String,
}

/// All ranges except those that sections check themselves, because they depend on other keys.
static RANGES: LazyLock<Vec<Range>> = LazyLock::new(|| {
    fn collect(schema: &Schema, prefix: &str, ranges: &mut Vec<Range>) {
        for (name, schema) in schema["properties"].as_object().into_iter().flatten() {
            let key = join(prefix, name);
            collect(schema, &key, ranges);
            if schema[RULE] != false {
                ranges.extend(Range::new(key, schema));
            }
        }
    }
    let mut ranges = Vec::new();
    collect(&schema_with_rules(), "", &mut ranges);
    ranges
});

impl Range {
    /// The range of a key with this schema; `None` if it has none.
    fn new(key: String, schema: &Schema) -> Option<Self> {
        let limit = |keyword: &str| schema[keyword].as_f64();
        let minimum = limit("minimum");
        let above = limit("exclusiveMinimum");
        let maximum = limit("maximum");
        let below = limit("exclusiveMaximum");
        let derived = match (minimum, above, maximum, below) {
            (Some(minimum), _, Some(maximum), _) => format!("from {minimum} to {maximum}"),
            (Some(minimum), _, _, Some(below)) => {
                format!("at least {minimum} and less than {below}")
            }
            (Some(minimum), ..) if schema["type"] == "integer" => format!("at least {minimum}"),
            (Some(minimum), ..) => format!("{minimum} or more and finite"),
            (None, Some(above), ..) => format!("more than {above} and finite"),
            _ if schema[REFUSED].is_array() => "another name".to_string(),
            _ => return None,
        };
        Some(Self {
            key,
            refused: schema[REFUSED].as_array().cloned().unwrap_or_default(),
            minimum,
            above,
            maximum,
            below,
            rule: schema[RULE].as_str().map_or(derived, str::to_string),
        })
    }

    fn holds(&self, number: f64) -> bool {
        number.is_finite()
            && self.minimum.is_none_or(|minimum| number >= minimum)
            && self.above.is_none_or(|above| number > above)
            && self.maximum.is_none_or(|maximum| number <= maximum)
            && self.below.is_none_or(|below| number < below)
    }
}

/// Refuses the first value of the section `name` outside its range.
///
/// # Errors
/// The value, with its key and range; an integer that TOML cannot hold.
pub(super) fn check(name: &str, section: &impl Serialize) -> Result<(), TrainError> {
    let values = Table::try_from(section).map_err(|source| TrainError::Value {
        place: format!("`[{name}]`"),
        why: source.to_string(),
    })?;
    for range in RANGES.iter() {
        let path = range.key.strip_prefix(name);
        let path = path.and_then(|path| path.strip_prefix('.'));
        let value = path.and_then(|path| value_at(&values, path));
        let (ok, text) = match value {
            Some(Value::Float(number)) => (range.holds(*number), number.to_string()),
            Some(Value::Integer(number)) => (range.holds(*number as f64), number.to_string()),
            Some(Value::String(name)) => {
                let is_refused = range.refused.iter().any(|refused| refused == name);
                (!is_refused, name.clone())
            }
            _ => continue,
        };
        require(ok, &range.key, text, range.rule.as_str())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{ConfigLayers, TrainConfig, schema};

    #[test]
    fn a_number_outside_its_range_is_refused_by_its_key() {
        let schema = schema_with_rules();
        for key in schema::keys() {
            let path = format!("/properties/{}", key.replace('.', "/properties/"));
            let schema = schema.pointer(&path).unwrap();
            let is_integer = schema["type"] == "integer";
            let step = if is_integer { 1.0 } else { 1e-3 };
            let outside = [
                ("minimum", -step),
                ("exclusiveMinimum", 0.0),
                ("maximum", step),
                ("exclusiveMaximum", 0.0),
            ];
            for (keyword, offset) in outside {
                let Some(limit) = schema[keyword].as_f64() else {
                    continue;
                };
                let outside = limit + offset;
                if is_integer && outside < 0.0 {
                    // Refused by its type.
                    continue;
                }
                let layers = ConfigLayers::new().with_set(&format!("{key}={outside}"));
                let refused = layers
                    .and_then(|layers| match key.split('.').nth(1) {
                        // A family that has both.
                        Some("experts" | "latent") => layers.with_set("model.family=deepseek_v3"),
                        _ => Ok(layers),
                    })
                    .and_then(ConfigLayers::load);
                let error = refused.expect_err(&format!("{key}={outside}")).to_string();
                assert!(error.contains(&format!("`{key}`")), "{key}: {error}");
            }
        }
    }

    #[test]
    fn a_name_that_is_not_listed_is_refused_by_its_key() {
        let refused: Vec<&Range> = RANGES.iter().filter(|it| !it.refused.is_empty()).collect();
        assert_eq!(refused.len(), 4);
        for Range { key, refused, .. } in refused {
            for name in refused {
                let layers = ConfigLayers::new().with_set(&format!("{key}={name}"));
                let error = layers.unwrap().load().unwrap_err().to_string();
                assert!(error.contains(&format!("`{key}`")), "{key}: {error}");
            }
        }
    }

    #[test]
    fn a_section_is_checked_by_itself_too() {
        let mut config = TrainConfig::default();
        check("parallel", &config.parallel).unwrap();
        config.parallel.pp = 0;
        let error = check("parallel", &config.parallel).unwrap_err().to_string();
        assert_eq!(error, config.validate().unwrap_err().to_string());
        assert!(
            error.contains("`parallel.pp` is 0: it must be from 1 to 65535"),
            "{error}"
        );
    }

    #[test]
    fn each_key_with_a_range_is_in_a_section_that_is_checked() {
        let sections = [
            "run",
            "model",
            "parallel",
            "data",
            "train",
            "optimizer",
            "moe",
            "recompute",
            "precision",
            "generate",
            "log",
            "alerts",
            "profile",
        ];
        for Range { key, .. } in RANGES.iter() {
            let section = key.split('.').next().unwrap();
            assert!(sections.contains(&section), "{key}");
        }
    }
}
