//! A family is written as its `model_type`, and read from it.

use std::{borrow::Cow, str::FromStr};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer};

use super::Family;
use crate::error::ModelError;

impl Family {
    /// The family of this program with this `model_type`.
    fn named(name: &str) -> Result<Self, String> {
        let all = Self::all();
        if let Some(family) = all.iter().find(|family| family.0.model_type() == name) {
            return Ok(*family);
        }
        let known: Vec<String> = all.iter().map(|family| format!("`{family}`")).collect();
        Err(format!(
            "unknown family `{name}`, expected one of {}; a family of another crate needs the \
            program that registers it (Cli::with_family)",
            known.join(", ")
        ))
    }
}

impl FromStr for Family {
    type Err = ModelError;

    fn from_str(text: &str) -> Result<Self, ModelError> {
        Self::named(text).map_err(ModelError::Config)
    }
}

impl<'de> Deserialize<'de> for Family {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let name = Cow::<'de, str>::deserialize(from)?;
        Self::named(&name).map_err(serde::de::Error::custom)
    }
}

/// A choice between the families of this program.
impl JsonSchema for Family {
    fn schema_name() -> Cow<'static, str> {
        "Family".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let choice = |family: Self| {
            json_schema!({
                "type": "string",
                "const": family.0.model_type(),
                "description": family.0.description(),
            })
        };
        let choices: Vec<Schema> = Self::all().into_iter().map(choice).collect();
        json_schema!({ "oneOf": choices })
    }
}
