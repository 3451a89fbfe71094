use megaburn_kernels::RopeScaling;
use serde_json::{Value, json};

use crate::decoder::Positions;

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

    fn get(&self, key: &str) -> Option<&'a Value> {
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
        self.get(key).map_or(Ok(default), |value| {
            value.as_f64().ok_or_else(|| format!("`{key}` is {value}, expected a number"))
        })
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

    /// Rotary positions: of today's `rope_parameters`, or of `rope_theta` and `rope_scaling`, which
    /// goes before where both are there. Numbers that stand outside count where they do not stand
    /// inside, but for the original length, for which it is the other way round.
    ///
    /// # Errors
    /// A kind of scaling that is not supported, or one whose numbers are missing.
    pub fn rotary(&self) -> Result<Positions, String> {
        let absent = Value::Object(serde_json::Map::new());
        let found = ["rope_scaling", "rope_parameters"].into_iter().find_map(|key| {
            self.get(key).filter(|value| **value != absent).map(|value| (key, value))
        });
        let (key, rope) = found.unwrap_or(("rope_parameters", &absent));
        if !rope.is_object() {
            return Err(format!("`{key}` is {rope}, expected an object"));
        }
        let inner = HfJson::new(rope);
        let theta = inner.number("rope_theta", self.number("rope_theta", 10_000.0)?)?;
        for json in [*self, inner] {
            json.only("partial_rotary_factor", 1.0)?;
        }
        Ok(Positions::Rotary { theta, scaling: self.rope_scaling(inner)? })
    }

    fn rope_scaling(&self, rope: HfJson<'_>) -> Result<RopeScaling, String> {
        let kind = match rope.text("rope_type")? {
            Some(kind) => kind,
            None => rope.text("type")?.unwrap_or("default"),
        };
        let number = |key: &str| {
            let found = rope.number(key, f64::NAN)?;
            match found.is_nan() {
                true => Err(format!("rope scaling `{kind}` has no number `{key}`")),
                false => Ok(found),
            }
        };
        match kind {
            "default" => Ok(RopeScaling::None),
            "linear" => Ok(RopeScaling::Linear { factor: number("factor")? }),
            "llama3" => {
                let key = "original_max_position_embeddings";
                let original = match (self.optional_size(key)?, rope.optional_size(key)?) {
                    (Some(outside), _) => outside,
                    (None, Some(inside)) => inside,
                    (None, None) => self.size("max_position_embeddings")?,
                };
                Ok(RopeScaling::Llama3 {
                    factor: number("factor")?,
                    low_freq_factor: number("low_freq_factor")?,
                    high_freq_factor: number("high_freq_factor")?,
                    original_max_position: original,
                })
            }
            _ => Err(format!(
                "rope scaling `{kind}` is not supported; `default`, `linear` and `llama3` are"
            )),
        }
    }
}

/// `rope_parameters` as Transformers writes them.
pub(super) fn rope_parameters(positions: &Positions) -> Value {
    match positions {
        Positions::Learned => Value::Null,
        Positions::Rotary { theta, scaling: RopeScaling::None } => {
            json!({"rope_theta": theta, "rope_type": "default"})
        }
        Positions::Rotary { theta, scaling: RopeScaling::Linear { factor } } => {
            json!({"rope_theta": theta, "rope_type": "linear", "factor": factor})
        }
        Positions::Rotary {
            theta,
            scaling:
                RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position },
        } => json!({
            "rope_theta": theta, "rope_type": "llama3", "factor": factor,
            "low_freq_factor": low_freq_factor, "high_freq_factor": high_freq_factor,
            "original_max_position_embeddings": original_max_position,
        }),
        Positions::Rotary { theta, scaling: RopeScaling::Yarn(yarn) } => json!({
            "rope_theta": theta, "rope_type": "yarn", "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_max_position,
            "beta_fast": yarn.beta_fast, "beta_slow": yarn.beta_slow, "mscale": yarn.mscale,
            "mscale_all_dim": yarn.mscale_all_dim, "attention_factor": yarn.attention_factor,
            "truncate": yarn.truncate,
        }),
    }
}
