use std::borrow::Cow;

use serde_json::Value;

use super::defaults::{KeyDefault, Meaning};
use crate::decoder::{LARGEST, MOST_LAYERS};

/// A `config.json` that is read key by key. If a key is absent or null, the family's defaults give
/// its meaning. Sizes that no model has are refused here, before anything is computed from them.
#[derive(Clone, Copy, Debug)]
pub struct HfJson<'a> {
    json: &'a Value,
    defaults: &'a [&'a [KeyDefault]],
}

impl<'a> HfJson<'a> {
    /// The keys of `json`, with the defaults of a family. If a key has two defaults, the first one
    /// applies.
    pub fn new(json: &'a Value, defaults: &'a [&'a [KeyDefault]]) -> Self {
        Self { json, defaults }
    }

    /// The value of a key, if it is present and not null.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.json.get(key).filter(|value| !value.is_null())
    }

    /// Whether the file names this architecture.
    pub fn has_architecture(&self, name: &str) -> bool {
        let named = self.json["architectures"].as_array();
        named.is_some_and(|all| all.iter().any(|of| of == name))
    }

    fn default(&self, key: &str) -> Option<&'a KeyDefault> {
        self.defaults
            .iter()
            .copied()
            .flatten()
            .find(|default| default.key == key)
    }

    /// The value of a key, or the default if it is absent or null; `None` if there is no default.
    fn value_or_default(&self, key: &str) -> Option<Cow<'a, Value>> {
        if let Some(value) = self.get(key) {
            return Some(Cow::Borrowed(value));
        }
        let default = self.default(key)?;
        let is_null = self.json.get(key).is_some();
        let meaning = if is_null {
            default.null
        } else {
            default.absent
        };
        (meaning != Meaning::Nothing).then(|| Cow::Owned(meaning.to_json()))
    }

    fn required<T>(&self, key: &str, found: Option<T>) -> Result<T, String> {
        let has_default = || {
            self.default(key)
                .is_some_and(|of| of.absent != Meaning::Nothing)
        };
        found.ok_or_else(|| {
            if has_default() {
                format!("`{key}` is null, which the family's model cannot use: write its value")
            } else {
                format!("`{key}` is missing")
            }
        })
    }

    /// The integer at a key.
    ///
    /// # Errors
    /// The value is not an integer, is larger than any model has, or is absent without a default.
    pub fn size(&self, key: &str) -> Result<usize, String> {
        self.required(key, self.optional_size(key)?)
    }

    /// The integer at a key, if it is present or has a default.
    ///
    /// # Errors
    /// The value is not an integer, or is larger than any model has.
    pub fn optional_size(&self, key: &str) -> Result<Option<usize>, String> {
        self.value_or_default(key)
            .map(|value| as_size(key, &value, LARGEST))
            .transpose()
    }

    /// The number of layers at a key. Its limit is lower than that of other sizes.
    ///
    /// # Errors
    /// The value is not an integer, is larger than any model has, or is absent without a default.
    pub fn layers(&self, key: &str) -> Result<usize, String> {
        self.required(key, self.optional_layers(key)?)
    }

    /// The number of layers at a key, if it is present or has a default.
    ///
    /// # Errors
    /// The value is not an integer, or is larger than any model has.
    pub fn optional_layers(&self, key: &str) -> Result<Option<usize>, String> {
        self.value_or_default(key)
            .map(|value| as_size(key, &value, MOST_LAYERS))
            .transpose()
    }

    /// The list of integers at a key; empty if the key is absent.
    ///
    /// # Errors
    /// The value is not a list of integers, or one of them is larger than any model has.
    pub fn sizes(&self, key: &str) -> Result<Vec<usize>, String> {
        let Some(value) = self.get(key) else {
            return Ok(Vec::new());
        };
        let all = value.as_array();
        let all = all.ok_or_else(|| format!("`{key}` is {value}, expected a list of numbers"))?;
        all.iter()
            .map(|value| as_size(key, value, LARGEST))
            .collect()
    }

    /// The number at a key.
    ///
    /// # Errors
    /// The value is not a number, or is absent without a default.
    pub fn number(&self, key: &str) -> Result<f64, String> {
        self.required(key, self.optional_number(key)?)
    }

    /// The number at a key, if it is present or has a default.
    ///
    /// # Errors
    /// The value is not a number.
    pub fn optional_number(&self, key: &str) -> Result<Option<f64>, String> {
        let read = |value: Cow<'_, Value>| {
            value
                .as_f64()
                .ok_or_else(|| format!("`{key}` is {value}, expected a number"))
        };
        self.value_or_default(key).map(read).transpose()
    }

    /// The boolean at a key.
    ///
    /// # Errors
    /// The value is not a boolean, or is absent without a default.
    pub fn flag(&self, key: &str) -> Result<bool, String> {
        self.required(key, self.optional_flag(key)?)
    }

    /// The boolean at a key, if it is present or has a default.
    ///
    /// # Errors
    /// The value is not a boolean.
    pub fn optional_flag(&self, key: &str) -> Result<Option<bool>, String> {
        let read = |value: Cow<'_, Value>| {
            value
                .as_bool()
                .ok_or_else(|| format!("`{key}` is {value}, expected true or false"))
        };
        self.value_or_default(key).map(read).transpose()
    }

    /// Refuses any value but `value`. A key that is absent without a default is accepted. Numbers
    /// are compared by value: 1 equals 1.0.
    ///
    /// # Errors
    /// The key has another value, with which the model would compute something else.
    pub fn only(&self, key: &str, value: impl Into<Value>) -> Result<(), String> {
        let expected = value.into();
        match self.value_or_default(key) {
            Some(found) if !is_same(&found, &expected) => Err(format!(
                "`{key}` is {found}, but only {expected} is supported"
            )),
            _ => Ok(()),
        }
    }

    /// The string at a key.
    ///
    /// # Errors
    /// The value is not a string, or is absent without a default.
    pub fn text(&self, key: &str) -> Result<String, String> {
        self.required(key, self.optional_text(key)?)
    }

    /// The string at a key, if it is present or has a default.
    ///
    /// # Errors
    /// The value is not a string.
    pub fn optional_text(&self, key: &str) -> Result<Option<String>, String> {
        let read = |value: Cow<'_, Value>| {
            let text = value.as_str().map(str::to_string);
            text.ok_or_else(|| format!("`{key}` is {value}, expected a string"))
        };
        self.value_or_default(key).map(read).transpose()
    }

    /// The layers whose `layer_types` is `full_attention`; `None` if the key is absent.
    ///
    /// # Errors
    /// An element is neither `full_attention` nor `sliding_attention`, or the number of elements
    /// differs from `layers`.
    pub fn full_layers(&self, layers: usize) -> Result<Option<Vec<usize>>, String> {
        let Some(types) = self.get("layer_types") else {
            return Ok(None);
        };
        let types = types.as_array().map(Vec::as_slice).unwrap_or_default();
        if types.len() != layers {
            return Err(format!(
                "`layer_types` has {} entries for {layers} layers",
                types.len()
            ));
        }
        let mut full = Vec::new();
        for (layer, kind) in types.iter().enumerate() {
            match kind.as_str() {
                Some("full_attention") => full.push(layer),
                Some("sliding_attention") => {}
                _ => {
                    return Err(format!(
                        "`layer_types` has {kind}; full_attention and sliding_attention are \
                         supported"
                    ));
                }
            }
        }
        Ok(Some(full))
    }
}

fn as_size(key: &str, value: &Value, largest: usize) -> Result<usize, String> {
    let Some(size) = value.as_u64() else {
        return Err(format!("`{key}` is {value}, expected an integer"));
    };
    let size = usize::try_from(size).ok().filter(|size| *size <= largest);
    size.ok_or_else(|| format!("`{key}` is {value}, which is too large; the maximum is {largest}"))
}

/// Whether two values are equal; numbers are compared by value, not by spelling.
pub(super) fn is_same(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a == b,
        _ => a == b,
    }
}
