use serde_json::Value;

/// A `config.json`, read key by key; absent and null are the same.
#[derive(Clone, Copy, Debug)]
pub struct HfJson<'a> {
    json: &'a Value,
}

impl<'a> HfJson<'a> {
    /// The keys of `json`.
    pub fn new(json: &'a Value) -> Self {
        Self { json }
    }

    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.json.get(key).filter(|value| !value.is_null())
    }

    /// A whole number.
    ///
    /// # Errors
    /// It is absent or something else.
    pub fn size(&self, key: &str) -> Result<usize, String> {
        self.optional_size(key)?.ok_or_else(|| format!("`{key}` is missing"))
    }

    /// A whole number, if it is there.
    ///
    /// # Errors
    /// It is something else.
    pub fn optional_size(&self, key: &str) -> Result<Option<usize>, String> {
        let read = |value: &Value| {
            let size = value.as_u64().and_then(|size| usize::try_from(size).ok());
            size.ok_or_else(|| format!("`{key}` is {value}, expected a whole number"))
        };
        self.get(key).map(read).transpose()
    }

    /// A whole number, `absent` if it is not there.
    ///
    /// # Errors
    /// It is something else.
    pub fn size_or(&self, key: &str, absent: usize) -> Result<usize, String> {
        Ok(self.optional_size(key)?.unwrap_or(absent))
    }

    /// A whole number, where an absent key and null mean different things: `absent` is meant by the
    /// one, nothing by the other.
    ///
    /// # Errors
    /// It is something else.
    pub fn size_or_null(&self, key: &str, absent: usize) -> Result<Option<usize>, String> {
        match self.json.get(key) {
            None => Ok(Some(absent)),
            Some(_) => self.optional_size(key),
        }
    }

    /// Whole numbers; none if the key is absent.
    ///
    /// # Errors
    /// It is something else.
    pub fn sizes(&self, key: &str) -> Result<Vec<usize>, String> {
        let Some(value) = self.get(key) else { return Ok(Vec::new()) };
        let sizes = value.as_array().and_then(|all| {
            let size = |value: &Value| usize::try_from(value.as_u64()?).ok();
            all.iter().map(size).collect::<Option<_>>()
        });
        sizes.ok_or_else(|| format!("`{key}` is {value}, expected a list of whole numbers"))
    }

    /// A number; `default` if it is absent.
    ///
    /// # Errors
    /// It is something else.
    pub fn number(&self, key: &str, default: f64) -> Result<f64, String> {
        Ok(self.optional_number(key)?.unwrap_or(default))
    }

    /// A number, if it is there.
    ///
    /// # Errors
    /// It is something else.
    pub fn optional_number(&self, key: &str) -> Result<Option<f64>, String> {
        let read = |value: &Value| {
            value.as_f64().ok_or_else(|| format!("`{key}` is {value}, expected a number"))
        };
        self.get(key).map(read).transpose()
    }

    /// True or false; `default` if it is absent.
    ///
    /// # Errors
    /// It is something else.
    pub fn flag(&self, key: &str, default: bool) -> Result<bool, String> {
        self.get(key).map_or(Ok(default), |value| {
            value.as_bool().ok_or_else(|| format!("`{key}` is {value}, expected true or false"))
        })
    }

    /// Refuses anything but `value`, which is also meant where the key is absent.
    ///
    /// # Errors
    /// Another value, which the model would compute something else with.
    pub fn only(&self, key: &str, value: impl Into<Value>) -> Result<(), String> {
        let expected = value.into();
        match self.get(key) {
            Some(found) if *found != expected => {
                Err(format!("`{key}` is {found}, and only {expected} is supported"))
            }
            _ => Ok(()),
        }
    }

    /// The text at a key, if it is there.
    ///
    /// # Errors
    /// It is something else.
    pub fn text(&self, key: &str) -> Result<Option<&'a str>, String> {
        let read = |value: &'a Value| {
            value.as_str().ok_or_else(|| format!("`{key}` is {value}, expected a text"))
        };
        self.get(key).map(read).transpose()
    }

    /// The layers whose `layer_types` is `full_attention`, where the key is there.
    ///
    /// # Errors
    /// An entry that is neither that nor `sliding_attention`, or another number of entries than
    /// `layers`.
    pub fn full_layers(&self, layers: usize) -> Result<Option<Vec<usize>>, String> {
        let Some(types) = self.get("layer_types") else { return Ok(None) };
        let types = types.as_array().map(Vec::as_slice).unwrap_or_default();
        if types.len() != layers {
            return Err(format!("`layer_types` has {} entries for {layers} layers", types.len()));
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
