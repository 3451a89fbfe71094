//! Reads and writes the rotary positions of a `config.json`, whose keys are the same in all
//! families.

use megaburn_kernels::{LongRopeScaling, RopeScaling, YarnScaling};
use serde_json::{Map, Value, json};

use super::HfJson;
use crate::decoder::{DecoderConfig, Positions, Rotary};

impl HfJson<'_> {
    /// Reads rotary positions from today's `rope_parameters`, or from `rope_theta` and
    /// `rope_scaling`. `rope_scaling` takes precedence over `rope_parameters`.
    ///
    /// Numbers inside these objects take precedence over those at the top level, except for
    /// `original_max_position_embeddings`, where the top level takes precedence.
    ///
    /// # Errors
    /// The kind of scaling is not supported, or its numbers are missing.
    pub fn rotary(&self) -> Result<Rotary, String> {
        let rotary = self.partial_rotary(1.0)?;
        if rotary.percent == 1.0 {
            return Ok(rotary);
        }
        let percent = rotary.percent;
        Err(format!(
            "`partial_rotary_factor` is {percent}, but only 1.0 is supported"
        ))
    }

    /// Reads rotary positions of a part of each head, `partial_rotary_factor`, which is `percent` if
    /// absent. Otherwise as [`rotary`](Self::rotary).
    ///
    /// # Errors
    /// As [`rotary`](Self::rotary).
    pub fn partial_rotary(&self, percent: f64) -> Result<Rotary, String> {
        self.rotary_named("rope_theta", "partial_rotary_factor", percent)
    }

    /// As [`partial_rotary`](Self::partial_rotary), for a family whose keys outside of
    /// `rope_parameters` are named `base` and `part`.
    ///
    /// # Errors
    /// As [`rotary`](Self::rotary).
    pub(super) fn rotary_named(
        &self,
        base: &str,
        part: &str,
        percent: f64,
    ) -> Result<Rotary, String> {
        let absent = Value::Object(Map::new());
        let found = ["rope_scaling", "rope_parameters"]
            .into_iter()
            .find_map(|key| {
                self.get(key)
                    .filter(|value| **value != absent)
                    .map(|value| (key, value))
            });
        let (key, rope) = found.unwrap_or(("rope_parameters", &absent));
        if !rope.is_object() {
            return Err(format!("`{key}` is {rope}, expected an object"));
        }
        let inner = HfJson::new(rope, &[]);
        let percent = match inner.optional_number("partial_rotary_factor")? {
            Some(inside) => inside,
            None => self.optional_number(part)?.unwrap_or(percent),
        };
        let theta = match inner.optional_number("rope_theta")? {
            Some(theta) => theta,
            None => self.number(base)?,
        };
        let scaling = self.rope_scaling(inner)?;
        Ok(Rotary {
            percent,
            ..Rotary::new(theta).with_scaling(scaling)
        })
    }

    fn rope_scaling(&self, rope: HfJson<'_>) -> Result<RopeScaling, String> {
        let kind = match rope.optional_text("rope_type")? {
            Some(kind) => kind,
            None => rope
                .optional_text("type")?
                .unwrap_or_else(|| "default".into()),
        };
        // Earlier names of longrope in Phi-3.
        let is_long = kind == "su" || (kind == "yarn" && rope.get("short_factor").is_some());
        let kind = if is_long { "longrope".into() } else { kind };
        let number = |key: &str| {
            let found = rope.optional_number(key)?;
            found.ok_or_else(|| format!("rope scaling `{kind}` needs a number `{key}`"))
        };
        match kind.as_str() {
            "default" => Ok(RopeScaling::None),
            "linear" => Ok(RopeScaling::Linear {
                factor: number("factor")?,
            }),
            "llama3" => Ok(RopeScaling::Llama3 {
                factor: number("factor")?,
                low_freq_factor: number("low_freq_factor")?,
                high_freq_factor: number("high_freq_factor")?,
                original_max_position: self.original_length(rope)?,
            }),
            "yarn" => self.yarn(rope).map(RopeScaling::Yarn),
            "longrope" => self.longrope(rope).map(RopeScaling::Long),
            "dynamic" => Ok(RopeScaling::Dynamic {
                factor: number("factor")?,
                original_max_position: self.size("max_position_embeddings")?,
            }),
            _ => Err(format!(
                "rope scaling `{kind}` is not supported; `default`, `linear`, `llama3`, `yarn`, \
                `longrope` and `dynamic` are"
            )),
        }
    }

    /// Reads YaRN as Transformers does: a missing factor is the ratio of the model's sequence
    /// length to the original one, and a beta of 0 counts as absent.
    fn yarn(&self, rope: HfJson<'_>) -> Result<YarnScaling, String> {
        let original = self.original_length(rope)?;
        let factor = match rope.optional_number("factor")? {
            Some(factor) => factor,
            None => self.size("max_position_embeddings")? as f64 / original as f64,
        };
        let beta = |key: &str, default: f64| {
            let found = rope.optional_number(key)?.filter(|beta| *beta != 0.0);
            Ok::<_, String>(found.unwrap_or(default))
        };
        Ok(YarnScaling::new(factor, original)
            .with_beta_fast(beta("beta_fast", 32.0)?)
            .with_beta_slow(beta("beta_slow", 1.0)?)
            .with_mscale(rope.optional_number("mscale")?)
            .with_mscale_all_dim(rope.optional_number("mscale_all_dim")?)
            .with_attention_factor(rope.optional_number("attention_factor")?)
            .with_truncate(rope.optional_flag("truncate")?.unwrap_or(true)))
    }

    /// Reads longrope as Transformers does: a missing factor is the ratio of the model's sequence
    /// length to the original one.
    fn longrope(&self, rope: HfJson<'_>) -> Result<LongRopeScaling, String> {
        let original = self.original_length(rope)?;
        let factor = match rope.optional_number("factor")? {
            Some(factor) => factor,
            None => self.size("max_position_embeddings")? as f64 / original as f64,
        };
        let factors = |key: &str| {
            let all = rope.get(key).and_then(Value::as_array);
            let all = all.map(|all| all.iter().map(Value::as_f64).collect::<Option<Vec<_>>>());
            all.flatten()
                .ok_or_else(|| format!("rope scaling `longrope` needs a list of numbers `{key}`"))
        };
        let scaling = LongRopeScaling::new(
            factors("short_factor")?,
            factors("long_factor")?,
            original,
            factor,
        );
        Ok(scaling.with_attention_factor(rope.optional_number("attention_factor")?))
    }

    /// The context length, in tokens, for which the unscaled frequencies were trained.
    fn original_length(&self, rope: HfJson<'_>) -> Result<usize, String> {
        let key = "original_max_position_embeddings";
        match (self.optional_size(key)?, rope.optional_size(key)?) {
            (Some(outside), _) => Ok(outside),
            (None, Some(inside)) => Ok(inside),
            (None, None) => self.size("max_position_embeddings"),
        }
    }
}

/// The rotary positions of an object `rope` inside `rope_parameters`, whose base is `theta` if
/// absent.
pub(super) fn with_scaling(json: &HfJson<'_>, rope: &Value, theta: f64) -> Result<Rotary, String> {
    let inner = HfJson::new(rope, &[]);
    let rotary = Rotary::new(inner.optional_number("rope_theta")?.unwrap_or(theta));
    Ok(rotary.with_scaling(json.rope_scaling(inner)?))
}

/// Adds the fraction of a head that is rotated to the `rope_parameters` of `json`.
pub fn write_percent(positions: &Positions, json: &mut Value) {
    if let Some(rotary) = positions.rotary() {
        json["rope_parameters"]["partial_rotary_factor"] = rotary.percent.into();
    }
}

/// The longest sequence of a model whose `max_position_embeddings` is `len`. With dynamic scaling,
/// that is the original length.
pub(super) fn longest(positions: &Positions, len: usize) -> usize {
    match positions.rotary().map(|rotary| &rotary.scaling) {
        Some(RopeScaling::Dynamic { factor, .. }) => (len as f64 * factor) as usize,
        _ => len,
    }
}

/// The `max_position_embeddings` of a model.
pub(super) fn max_position_embeddings(config: &DecoderConfig) -> usize {
    match config.positions.rotary().map(|rotary| &rotary.scaling) {
        Some(RopeScaling::Dynamic {
            original_max_position,
            ..
        }) => *original_max_position,
        _ => config.max_seq_len,
    }
}

/// `rope_parameters` in the form that Transformers writes.
pub(super) fn rope_parameters(positions: &Positions) -> Value {
    let Some(rotary) = positions.rotary() else {
        return Value::Null;
    };
    let mut rope = match &rotary.scaling {
        RopeScaling::None => json!({"rope_type": "default"}),
        RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position,
        } => {
            json!({
                "rope_type": "llama3", "factor": factor, "low_freq_factor": low_freq_factor,
                "high_freq_factor": high_freq_factor,
                "original_max_position_embeddings": original_max_position,
            })
        }
        RopeScaling::Yarn(yarn) => json!({
            "rope_type": "yarn", "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_max_position,
            "beta_fast": yarn.beta_fast, "beta_slow": yarn.beta_slow, "mscale": yarn.mscale,
            "mscale_all_dim": yarn.mscale_all_dim, "attention_factor": yarn.attention_factor,
            "truncate": yarn.truncate,
        }),
        RopeScaling::Long(long) => json!({
            "rope_type": "longrope", "short_factor": long.short_factor,
            "long_factor": long.long_factor, "factor": long.factor,
            "original_max_position_embeddings": long.original_max_position,
            "attention_factor": long.attention_factor,
        }),
        RopeScaling::Dynamic { factor, .. } => json!({"rope_type": "dynamic", "factor": factor}),
    };
    rope["rope_theta"] = rotary.theta.into();
    if let Some(keys) = rope.as_object_mut() {
        keys.retain(|_, value| !value.is_null());
    }
    rope
}
