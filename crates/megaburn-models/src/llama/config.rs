use std::{fs, path::Path};

use megaburn_kernels::{RopeConfig, RopeScaling};
use megaburn_mesh::{Layout, ModelShape};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{ModelError, flops::FlopShape};

/// The sizes of a Llama.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LlamaConfig {
    /// Tokens of the vocabulary, without padding.
    pub vocab: usize,
    /// Features of the residual stream.
    pub hidden: usize,
    /// Features inside the MLP.
    pub ffn: usize,
    /// Transformer blocks.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Features of a head.
    pub head_dim: usize,
    /// Longest sequence, in tokens.
    pub max_seq_len: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Stretching of the rotary frequencies.
    pub rope_scaling: RopeScaling,
    /// Added to the mean square in the norms.
    pub norm_eps: f64,
    /// Whether the output projection is the embedding.
    pub tied: bool,
}

impl LlamaConfig {
    /// Reads a Hugging Face `config.json` of architecture `LlamaForCausalLM`: of today
    /// (`rope_parameters`) and as published with Llama 2 and 3 (`rope_theta`, `rope_scaling`).
    ///
    /// # Errors
    /// A file that cannot be read, another architecture, a missing or unsupported value.
    pub fn from_hf(path: &Path) -> Result<Self, ModelError> {
        let fail = |why: String| ModelError::File { path: path.to_path_buf(), why };
        let text = fs::read_to_string(path).map_err(|error| fail(error.to_string()))?;
        let json: Value = serde_json::from_str(&text).map_err(|error| fail(error.to_string()))?;
        Self::from_hf_json(&json).map_err(fail)
    }

    fn from_hf_json(json: &Value) -> Result<Self, String> {
        let architecture = json["architectures"][0].as_str().unwrap_or("none");
        if architecture != "LlamaForCausalLM" {
            return Err(format!("architecture is {architecture}; this reads LlamaForCausalLM"));
        }
        for (key, supported) in [("attention_bias", false), ("mlp_bias", false)] {
            if json[key].as_bool().unwrap_or(supported) != supported {
                return Err(format!("`{key}` is not supported for Llama"));
            }
        }
        let act = json["hidden_act"].as_str().unwrap_or("silu");
        if act != "silu" {
            return Err(format!("`hidden_act` is {act}; Llama's is silu"));
        }
        let size = |key: &str| {
            let value =
                json[key].as_u64().ok_or_else(|| format!("`{key}` is missing or no size"))?;
            Ok::<_, String>(value as usize)
        };
        let (hidden, heads) = (size("hidden_size")?, size("num_attention_heads")?);
        let today = &json["rope_parameters"];
        let rope = if today.is_object() { today } else { &json["rope_scaling"] };
        let theta = [&today["rope_theta"], &json["rope_theta"]];
        let config = Self {
            vocab: size("vocab_size")?,
            hidden,
            ffn: size("intermediate_size")?,
            layers: size("num_hidden_layers")?,
            heads,
            kv_heads: size("num_key_value_heads").unwrap_or(heads),
            head_dim: size("head_dim").unwrap_or(hidden / heads.max(1)),
            max_seq_len: size("max_position_embeddings")?,
            rope_theta: theta.iter().find_map(|value| value.as_f64()).unwrap_or(10000.0),
            rope_scaling: rope_scaling(rope)?,
            norm_eps: json["rms_norm_eps"].as_f64().unwrap_or(1e-6),
            tied: json["tie_word_embeddings"].as_bool().unwrap_or(false),
        };
        config.validate().map_err(|error| error.to_string())?;
        Ok(config)
    }

    /// Refuses sizes that no model can have.
    ///
    /// # Errors
    /// The first of them, with the numbers.
    pub fn validate(&self) -> Result<(), ModelError> {
        let refuse = |why: String| Err(ModelError::Config(why));
        let sizes = [
            ("vocab", self.vocab),
            ("hidden", self.hidden),
            ("ffn", self.ffn),
            ("layers", self.layers),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("max_seq_len", self.max_seq_len),
        ];
        if let Some((name, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return refuse(format!("`{name}` is 0"));
        }
        let (heads, kv_heads) = (self.heads, self.kv_heads);
        if !heads.is_multiple_of(kv_heads) {
            return refuse(format!("{kv_heads} key/value heads do not divide {heads} query heads"));
        }
        if !(self.norm_eps >= 0.0 && self.norm_eps.is_finite()) {
            return refuse(format!("`norm_eps` is {}", self.norm_eps));
        }
        self.rope().frequencies()?;
        Ok(())
    }

    /// What a layout must be able to split, for sequences of `seq_len` tokens.
    ///
    /// # Errors
    /// The layout does not fit, with all the numbers; or the sequence is longer than the model's.
    pub fn check_layout(&self, layout: &Layout, seq_len: usize) -> Result<(), ModelError> {
        if seq_len > self.max_seq_len {
            let why =
                format!("sequences of {seq_len} tokens, the model's limit is {}", self.max_seq_len);
            return Err(ModelError::Config(why));
        }
        let Self { ffn, heads, kv_heads, layers, .. } = *self;
        Ok(layout.fits(&ModelShape { ffn, heads, kv_heads, layers, seq_len })?)
    }

    /// The rotary embedding.
    pub fn rope(&self) -> RopeConfig {
        RopeConfig::new(self.head_dim)
            .with_theta(self.rope_theta)
            .with_scaling(self.rope_scaling.clone())
    }

    /// Elements of all parameters, a tied matrix once.
    pub fn num_params(&self) -> usize {
        let Self { hidden, ffn, head_dim, .. } = *self;
        let attention = hidden * head_dim * (2 * self.heads + 2 * self.kv_heads);
        let block = attention + 3 * hidden * ffn + 2 * hidden;
        let tables = if self.tied { 1 } else { 2 };
        self.layers * block + tables * self.vocab * hidden + hidden
    }

    /// What counts in Megatron's FLOP formula.
    pub fn flop_shape(&self) -> FlopShape {
        FlopShape {
            hidden: self.hidden,
            query: self.heads * self.head_dim,
            key_value: self.kv_heads * self.head_dim,
            ffn: self.ffn,
            ffn_matrices: 3,
            layers: self.layers,
            vocab: self.vocab,
        }
    }
}

fn rope_scaling(json: &Value) -> Result<RopeScaling, String> {
    let kind = json["rope_type"].as_str().or_else(|| json["type"].as_str()).unwrap_or("default");
    let number = |key: &str| {
        json[key].as_f64().ok_or_else(|| format!("rope scaling `{kind}` has no `{key}`"))
    };
    match kind {
        "default" => Ok(RopeScaling::None),
        "llama3" => Ok(RopeScaling::Llama3 {
            factor: number("factor")?,
            low_freq_factor: number("low_freq_factor")?,
            high_freq_factor: number("high_freq_factor")?,
            original_max_position: number("original_max_position_embeddings")? as usize,
        }),
        _ => Err(format!("rope scaling `{kind}` is not supported; `default` and `llama3` are")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PUBLISHED: &str = r#"{"architectures": ["LlamaForCausalLM"], "vocab_size": 128256,
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "rope_theta": 500000.0, "rms_norm_eps": 1e-05, "tie_word_embeddings": false,
        "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"}}"#;

    fn published() -> Value {
        serde_json::from_str(PUBLISHED).unwrap()
    }

    #[test]
    fn a_published_config_is_read() {
        let config = LlamaConfig::from_hf_json(&published()).unwrap();
        assert_eq!(config.head_dim, 128);
        assert_eq!(config.rope_theta, 500000.0);
        assert!(matches!(config.rope_scaling, RopeScaling::Llama3 { factor: 8.0, .. }));
        assert_eq!(config.num_params(), 8_030_261_248);
    }

    #[test]
    fn todays_rope_parameters_mean_the_same() {
        let mut json = published();
        let mut rope = json["rope_scaling"].take();
        rope["rope_theta"] = 500000.0.into();
        json["rope_parameters"] = rope;
        json.as_object_mut().unwrap().remove("rope_theta");
        assert_eq!(
            LlamaConfig::from_hf_json(&json).unwrap(),
            LlamaConfig::from_hf_json(&published()).unwrap()
        );
    }

    #[test]
    fn what_cannot_be_is_refused_by_name() {
        for (key, value, message) in [
            ("architectures", serde_json::json!(["MambaForCausalLM"]), "MambaForCausalLM"),
            ("hidden_size", Value::Null, "`hidden_size` is missing"),
            ("attention_bias", true.into(), "`attention_bias` is not supported"),
            ("hidden_act", "gelu".into(), "`hidden_act` is gelu"),
            ("num_key_value_heads", 5.into(), "5 key/value heads do not divide 32"),
            ("rope_scaling", serde_json::json!({"rope_type": "yarn"}), "`yarn` is not supported"),
        ] {
            let mut json = published();
            json[key] = value;
            let error = LlamaConfig::from_hf_json(&json).unwrap_err();
            assert!(error.contains(message), "{error}");
        }
    }
}
