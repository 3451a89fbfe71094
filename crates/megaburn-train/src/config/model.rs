use megaburn_kernels::RopeScaling;
use megaburn_mesh::ModelShape;
use megaburn_models::{
    DecoderConfig, Family,
    decoder::{Mla, Positions},
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ExpertsConfig, MlaConfig, RopeScalingConfig, require::require};
use crate::error::TrainError;

/// `[model]`: the family and the sizes of the model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(JsonSchema)]
pub struct ModelConfig {
    /// The model that the run starts from: a folder of Hugging Face or torchtitan, a checkpoint or
    /// a run. It determines all other keys of `[model]`, and the defaults of `optimizer.lr`,
    /// `optimizer.min_lr`, `optimizer.warmup_fraction` and `data.seq_len`. Default: freshly
    /// initialized weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub init: Option<String>,
    /// The model family, which determines the architecture of the layers and the tensor names on
    /// export: `llama`, `mistral`, `qwen2`, `qwen3` or `gpt2`; with experts `mixtral`, `qwen3_moe`,
    /// `deepseek_v2` or `deepseek_v3`.
    pub family: Family,
    /// Width of the residual stream.
    #[schemars(extend("minimum" = 1))]
    pub hidden: usize,
    /// Width inside the MLP.
    #[schemars(extend("minimum" = 1))]
    pub ffn: usize,
    /// Number of transformer layers, without `mtp_layers`.
    #[schemars(extend("minimum" = 1))]
    pub layers: usize,
    /// Number of multi-token-prediction (MTP) blocks after the last layer. During training, the
    /// k-th block predicts the token k places after the next one. See
    /// `train.mtp_loss_scaling_factor`.
    pub mtp_layers: usize,
    /// Number of query heads.
    #[schemars(extend("minimum" = 1))]
    pub heads: usize,
    /// Number of key/value heads (query groups), which divides `heads`. In gpt2 and the deepseeks
    /// it equals `heads`, which is its default there.
    #[schemars(extend("minimum" = 1))]
    pub kv_heads: usize,
    /// Width of a head. Default: `hidden / heads`; with `[model.latent]`, the width of its queries
    /// and keys.
    #[schemars(extend("minimum" = 1, "x-rule" = false))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head_dim: Option<usize>,
    /// Number of token ids. Default: that of the tokenizer.
    #[schemars(extend("minimum" = 1))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vocab: Option<usize>,
    /// Sliding-window attention: the number of positions that a query attends to, including its
    /// own. Default: all positions up to its own.
    #[schemars(extend("minimum" = 1))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub window: Option<usize>,
    /// Base of the rotary frequencies.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub rope_theta: f64,
    /// Epsilon of the norms.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub norm_eps: f64,
    /// Whether the embedding is also the output matrix.
    pub tied: bool,
    /// `[model.experts]`: the experts, in a family that has them. Default: the section's own
    /// defaults.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts: Option<ExpertsConfig>,
    /// `[model.latent]`: multi-head latent attention, in a family that has it. Default: the
    /// section's own defaults.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latent: Option<MlaConfig>,
    /// `[model.rope_scaling]`: scaling of the rotary frequencies for longer contexts. Default:
    /// none. Setting any key of the section turns it on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rope_scaling: Option<RopeScalingConfig>,
}

impl Default for ModelConfig {
    fn default() -> Self {
        Self {
            init: None,
            family: Family::Llama,
            hidden: 128,
            ffn: 384,
            layers: 4,
            mtp_layers: 0,
            heads: 4,
            kv_heads: 2,
            head_dim: None,
            vocab: None,
            window: None,
            rope_theta: 10_000.0,
            norm_eps: 1e-5,
            tied: true,
            experts: None,
            latent: None,
            rope_scaling: None,
        }
    }
}

impl ModelConfig {
    /// Width of a head.
    pub fn head_dim(&self) -> usize {
        let of_latent = self.latent().map(|latent| latent.qk_head_dim());
        self.head_dim
            .or(of_latent)
            .unwrap_or(self.hidden / self.heads)
    }

    /// The latent attention, in a family that has it.
    fn latent(&self) -> Option<Mla> {
        let parts = self.family.template().latent?;
        Some(self.latent.clone().unwrap_or_default().latent(&parts))
    }

    /// Whether every query head of the family has its own key/value head.
    pub(super) fn has_all_kv_heads(&self) -> bool {
        let parts = self.family.template();
        parts.positions == Positions::Learned || parts.latent.is_some()
    }

    /// The widths that an attention kernel must support: of a head's queries and keys, and of its
    /// values.
    pub(crate) fn head_dims(&self) -> [usize; 2] {
        let values = self.latent().map(|latent| latent.v_head_dim);
        [self.head_dim(), values.unwrap_or(self.head_dim())]
    }

    /// The full configuration of a model that does not start from another one, for sequences of
    /// `seq_len` tokens and a tokenizer with `vocab` token ids.
    pub fn decoder(&self, seq_len: usize, vocab: usize) -> DecoderConfig {
        let parts = self.family.template();
        let scaling = self.rope_scaling.as_ref();
        let scaling = scaling.map_or(RopeScaling::None, RopeScalingConfig::scaling);
        DecoderConfig {
            vocab: self.vocab.unwrap_or(vocab),
            hidden: self.hidden,
            ffn: self.ffn,
            layers: self.layers,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim(),
            max_seq_len: seq_len,
            positions: match parts.positions {
                Positions::Rotary { .. } => Positions::Rotary {
                    theta: self.rope_theta,
                    scaling,
                },
                Positions::Learned => Positions::Learned,
            },
            norm_eps: self.norm_eps,
            window: self.window,
            tied: self.tied,
            experts: parts.experts.as_ref().map(|of| {
                let config = self.experts.clone().unwrap_or_default();
                config.experts(of, self.ffn, self.layers)
            }),
            latent: self.latent(),
            mtp_layers: self.mtp_layers,
            ..parts
        }
    }

    /// The section that describes `model`, as far as it has keys for it.
    pub fn of(model: &DecoderConfig) -> Self {
        let (rope_theta, rope_scaling) = match &model.positions {
            Positions::Learned => (Self::default().rope_theta, None),
            Positions::Rotary { theta, scaling } => (*theta, RopeScalingConfig::of(scaling)),
        };
        Self {
            init: None,
            family: model.family,
            hidden: model.hidden,
            ffn: model.ffn,
            layers: model.layers,
            mtp_layers: model.mtp_layers,
            heads: model.heads,
            kv_heads: model.kv_heads,
            head_dim: Some(model.head_dim),
            vocab: Some(model.vocab),
            window: model.window,
            rope_theta,
            norm_eps: model.norm_eps,
            tied: model.tied,
            experts: model
                .experts
                .as_ref()
                .map(|of| ExpertsConfig::of(of, model.layers)),
            latent: model.latent.as_ref().map(MlaConfig::of),
            rope_scaling,
        }
    }

    /// The sizes that a layout must be able to split.
    pub fn shape(&self, seq_len: usize) -> ModelShape {
        self.decoder(seq_len, 1).shape(seq_len)
    }

    pub(super) fn validate(&self) -> Result<(), TrainError> {
        let Self {
            hidden,
            heads,
            kv_heads,
            ..
        } = *self;
        let latent = self.latent();
        if self.head_dim.is_none() && latent.is_none() {
            let rule = format!("a multiple of model.heads {heads}, or model.head_dim must be set");
            require(hidden.is_multiple_of(heads), "model.hidden", hidden, rule)?;
        }
        let rule = format!("a divisor of model.heads {heads}");
        require(
            heads.is_multiple_of(kv_heads),
            "model.kv_heads",
            kv_heads,
            rule,
        )?;
        let learned = self.family.template().positions == Positions::Learned;
        let rule = format!(
            "model.heads {heads}, or absent: {} does not share keys and values between heads",
            self.family
        );
        let ok = !self.has_all_kv_heads() || kv_heads == heads;
        require(ok, "model.kv_heads", kv_heads, rule)?;
        let unused = !learned || self.rope_scaling.is_none();
        let rule = format!("absent, because {} has no rotary positions", self.family);
        require(unused, "model.rope_scaling", "set", rule)?;
        if let Some(experts) = &self.experts {
            let rule = format!("absent, because {} has no experts", self.family);
            let has_some = self.family.template().experts.is_some();
            require(has_some, "model.experts", "set", rule)?;
            experts.validate(self.layers)?;
            if let Some(width) = experts.ffn.filter(|_| self.family == Family::Mixtral) {
                let rule = format!(
                    "model.ffn {}, or absent: every layer of mixtral has experts, whose width is \
                    model.ffn",
                    self.ffn
                );
                require(width == self.ffn, "model.experts.ffn", width, rule)?;
            }
        }
        if let Some(config) = &self.latent {
            let rule = format!("absent, because {} has no latent attention", self.family);
            require(latent.is_some(), "model.latent", "set", rule)?;
            config.validate()?;
        }
        let head_dim = self.head_dim();
        if let Some(size) = latent.as_ref().map(Mla::qk_head_dim) {
            let family = self.family;
            let rule = format!("{size}, because model.latent defines the heads of {family}");
            require(head_dim == size, "model.head_dim", head_dim, rule)?;
        }
        let is_rotated = !learned && latent.is_none();
        let even = head_dim > 0 && (!is_rotated || head_dim.is_multiple_of(2));
        let rule = "even and at least 2, because rotary embeddings rotate pairs (default: hidden / \
            heads)";
        require(even, "model.head_dim", head_dim, rule)?;
        self.rope_scaling
            .as_ref()
            .map_or(Ok(()), RopeScalingConfig::validate)?;
        if self.init.is_none() {
            // The check does not depend on the sequence length and the vocabulary.
            self.decoder(1, 1).check_sayable()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use crate::{config::ConfigLayers, exit::Exit};

    #[rstest]
    #[case("hidden = 0", "`model.hidden` is 0: it must be at least 1")]
    #[case("ffn = 0", "`model.ffn` is 0: it must be at least 1")]
    #[case("layers = 0", "`model.layers` is 0: it must be at least 1")]
    #[case("heads = 0", "`model.heads` is 0: it must be at least 1")]
    #[case("kv_heads = 0", "`model.kv_heads` is 0: it must be at least 1")]
    #[case("vocab = 0", "`model.vocab` is 0: it must be at least 1")]
    #[case(
        "hidden = 130",
        "`model.hidden` is 130: it must be a multiple of model.heads 4, or"
    )]
    #[case(
        "kv_heads = 3",
        "`model.kv_heads` is 3: it must be a divisor of model.heads 4"
    )]
    #[case("head_dim = 7", "`model.head_dim` is 7: it must be even")]
    #[case(
        "head_dim = 0",
        "`model.head_dim` is 0: it must be even and at least 2"
    )]
    #[case("hidden = 12", "`model.head_dim` is 3: it must be even")]
    #[case(
        "rope_theta = -1.0",
        "`model.rope_theta` is -1: it must be more than 0 and finite"
    )]
    #[case(
        "norm_eps = nan",
        "`model.norm_eps` is NaN: it must be more than 0 and finite"
    )]
    #[case(
        "rope_scaling.factor = 0.5",
        "`model.rope_scaling.factor` is 0.5: it must be at least 1"
    )]
    #[case(
        "rope_scaling.low_freq_factor = 0",
        "low_freq_factor` is 0: it must be more than 0"
    )]
    #[case(
        "rope_scaling.high_freq_factor = 1",
        "is 1: it must be finite and more than low_freq_factor 1"
    )]
    #[case(
        "rope_scaling.original_max_position_embeddings = 0",
        "is 0: it must be at least 1"
    )]
    #[case(
        "window = 9",
        "`window` is 9, which the config.json of llama cannot express (it would mean null)"
    )]
    #[case("family = \"mistral\"\nwindow = 0", "`model.window` is 0")]
    #[case(
        "family = \"gpt2\"\nkv_heads = 2",
        "`model.kv_heads` is 2: it must be model.heads 4, or absent: gpt2 does not share"
    )]
    #[case(
        "family = \"gpt2\"\nkv_heads = 4\nhead_dim = 8",
        "`head_dim` is 8, which the config.json"
    )]
    #[case("family = \"gpt3\"", "unknown variant `gpt3`")]
    #[case(
        "rope_scaling.kind = \"dynamic\"",
        "unknown variant `dynamic`, expected one of `llama3`, `linear`, `yarn`"
    )]
    fn a_model_that_cannot_be_is_refused(#[case] line: &str, #[case] message: &str) {
        let layers = ConfigLayers::new().with_text("m.toml", &format!("[model]\n{line}"));
        let error = layers.and_then(ConfigLayers::load).unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
        assert_eq!(error.exit(), Exit::BadInput);
    }

    #[test]
    fn an_absent_head_width_follows_from_the_heads() {
        let read = |text| {
            ConfigLayers::new()
                .with_text("m.toml", text)
                .unwrap()
                .load()
                .unwrap()
        };
        assert_eq!(read("").model.head_dim(), 32);
        assert_eq!(
            read("[model]\nhidden = 130\nhead_dim = 24")
                .model
                .head_dim(),
            24
        );
        assert_eq!(read("").model.shape(64).seq_len, 64);
    }

    #[test]
    fn rope_scaling_is_off_until_one_of_its_keys_is_set() {
        assert_eq!(ConfigLayers::new().load().unwrap().model.rope_scaling, None);
        let set = ConfigLayers::new()
            .with_set("model.rope_scaling.factor=32")
            .unwrap();
        let scaling = set.load().unwrap().model.rope_scaling.unwrap();
        assert_eq!((scaling.factor, scaling.high_freq_factor), (32.0, 4.0));
    }
}
