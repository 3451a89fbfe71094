use std::borrow::Cow;

use serde_json::Value;

use super::defaults::{KeyDefault, Meaning};
use crate::decoder::{LARGEST, MOST_LAYERS};

/// A `config.json`, read key by key. Where a key is absent or null, the family's defaults say what
/// it means. Sizes that no model has are refused here, before anything is computed from them.
#[derive(Clone, Copy, Debug)]
pub struct HfJson<'a> {
    json: &'a Value,
    defaults: &'a [&'a [KeyDefault]],
}

impl<'a> HfJson<'a> {
    /// The keys of `json`, with the defaults of a family. Of a key with two defaults the first
    /// counts.
    pub fn new(json: &'a Value, defaults: &'a [&'a [KeyDefault]]) -> Self {
        Self { json, defaults }
    }

    /// A value that is there and not null.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.json.get(key).filter(|value| !value.is_null())
    }

    fn default(&self, key: &str) -> Option<&'a KeyDefault> {
        self.defaults
            .iter()
            .copied()
            .flatten()
            .find(|default| default.key == key)
    }

    /// The value of a key, or what its absence or null means; none where that is nothing.
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

    /// A whole number.
    ///
    /// # Errors
    /// It is something else, more than any model has, or absent and without a default.
    pub fn size(&self, key: &str) -> Result<usize, String> {
        self.required(key, self.optional_size(key)?)
    }

    /// A whole number, if it is there or has a default.
    ///
    /// # Errors
    /// It is something else, or more than any model has.
    pub fn optional_size(&self, key: &str) -> Result<Option<usize>, String> {
        self.value_or_default(key)
            .map(|value| as_size(key, &value, LARGEST))
            .transpose()
    }

    /// A number of layers: a model has far fewer of them than features or tokens.
    ///
    /// # Errors
    /// It is no whole number, more than any model has, or absent and without a default.
    pub fn layers(&self, key: &str) -> Result<usize, String> {
        self.required(key, self.optional_layers(key)?)
    }

    /// A number of layers, if it is there or has a default.
    ///
    /// # Errors
    /// It is no whole number, or more than any model has.
    pub fn optional_layers(&self, key: &str) -> Result<Option<usize>, String> {
        self.value_or_default(key)
            .map(|value| as_size(key, &value, MOST_LAYERS))
            .transpose()
    }

    /// Whole numbers; none if the key is absent.
    ///
    /// # Errors
    /// It is something else, or one of them is more than any model has.
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

    /// A number.
    ///
    /// # Errors
    /// It is something else, or absent and without a default.
    pub fn number(&self, key: &str) -> Result<f64, String> {
        self.required(key, self.optional_number(key)?)
    }

    /// A number, if it is there or has a default.
    ///
    /// # Errors
    /// It is something else.
    pub fn optional_number(&self, key: &str) -> Result<Option<f64>, String> {
        let read = |value: Cow<'_, Value>| {
            value
                .as_f64()
                .ok_or_else(|| format!("`{key}` is {value}, expected a number"))
        };
        self.value_or_default(key).map(read).transpose()
    }

    /// True or false.
    ///
    /// # Errors
    /// It is something else, or absent and without a default.
    pub fn flag(&self, key: &str) -> Result<bool, String> {
        self.required(key, self.optional_flag(key)?)
    }

    /// True or false, if it is there or has a default.
    ///
    /// # Errors
    /// It is something else.
    pub fn optional_flag(&self, key: &str) -> Result<Option<bool>, String> {
        let read = |value: Cow<'_, Value>| {
            value
                .as_bool()
                .ok_or_else(|| format!("`{key}` is {value}, expected true or false"))
        };
        self.value_or_default(key).map(read).transpose()
    }

    /// Refuses anything but `value`, which is also meant where the key is absent. Numbers are
    /// compared as numbers: 1 is 1.0.
    ///
    /// # Errors
    /// Another value, which the model would compute something else with.
    pub fn only(&self, key: &str, value: impl Into<Value>) -> Result<(), String> {
        let expected = value.into();
        match self.value_or_default(key) {
            Some(found) if !is_same(&found, &expected) => Err(format!(
                "`{key}` is {found}, and only {expected} is supported"
            )),
            _ => Ok(()),
        }
    }

    /// The text at a key.
    ///
    /// # Errors
    /// It is something else, or absent and without a default.
    pub fn text(&self, key: &str) -> Result<String, String> {
        self.required(key, self.optional_text(key)?)
    }

    /// The text at a key, if it is there or has a default.
    ///
    /// # Errors
    /// It is something else.
    pub fn optional_text(&self, key: &str) -> Result<Option<String>, String> {
        let read = |value: Cow<'_, Value>| {
            let text = value.as_str().map(str::to_string);
            text.ok_or_else(|| format!("`{key}` is {value}, expected a text"))
        };
        self.value_or_default(key).map(read).transpose()
    }

    /// The layers whose `layer_types` is `full_attention`, where the key is there.
    ///
    /// # Errors
    /// An entry that is neither that nor `sliding_attention`, or another number of entries than
    /// `layers`.
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
        return Err(format!("`{key}` is {value}, expected a whole number"));
    };
    let size = usize::try_from(size).ok().filter(|size| *size <= largest);
    size.ok_or_else(|| format!("`{key}` is {value}, which no model has; at most {largest} is read"))
}

/// Whether two values are the same, numbers whatever way they are written.
pub(super) fn is_same(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a == b,
        _ => a == b,
    }
}
