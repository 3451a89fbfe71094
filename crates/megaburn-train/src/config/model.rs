use megaburn_kernels::RopeScaling;
use megaburn_mesh::ModelShape;
use megaburn_models::{
    DecoderConfig, Family,
    decoder::{Experts, Mla, Positions, Rotary},
};
use megaburn_parallel::ALIBI_FEATURES;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ExpertsConfig, MlaConfig, ModelParts, RopeScalingConfig, require::require};
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
    /// The model family, which determines the default of each part of the layers and the tensor
    /// names on export: `llama`, `mistral`, `qwen2`, `qwen3`, `gemma2`, `gemma3_text`, `phi3`,
    /// `olmo2`, `granite`, `starcoder2`, `nemotron`, `gpt_neox`, `falcon` or `gpt2`; with experts
    /// `mixtral`, `qwen2_moe`, `qwen3_moe`, `olmoe`, `gpt_oss`, `deepseek_v2` or `deepseek_v3`;
    /// encoders `bert` or `megatron-bert`; encoder and decoder `t5` or `mt5`. A program can register
    /// families of other crates; its own `config schema` lists them.
    pub family: Family,
    /// Width of the residual stream.
    #[schemars(extend("minimum" = 1))]
    pub hidden: usize,
    /// Width inside the MLP.
    #[schemars(extend("minimum" = 1))]
    pub ffn: usize,
    /// Number of transformer layers, without `mtp_layers`; of encoder and decoder together in a
    /// model with both.
    #[schemars(extend("minimum" = 1))]
    pub layers: usize,
    /// How many of the layers, from the first on, are the encoder of an encoder-decoder model. The
    /// others are its decoder, which attends to the encoder's output (Megatron-LM's
    /// `--encoder-num-layers`, but `layers` counts both). Default: half of the layers, rounded
    /// up, in t5 and mt5, 0 in other families.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub encoder_layers: Option<usize>,
    /// Number of multi-token-prediction (MTP) blocks after the last layer. During training, the
    /// k-th block predicts the token k places after the next one. See
    /// `train.mtp_loss_scaling_factor`.
    pub mtp_layers: usize,
    /// Number of query heads.
    #[schemars(extend("minimum" = 1))]
    pub heads: usize,
    /// Number of key/value heads (query groups), which divides `heads`. In gpt2, gpt_neox, the
    /// berts, the T5s and the deepseeks it equals `heads`, which is its default there.
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
    /// Whether the embedding is also the output matrix. Default: true; false in t5 and mt5, as in
    /// T5 1.1.
    pub tied: bool,
    /// `[model.parts]`: what differs from the family. Default: nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parts: Option<ModelParts>,
    /// `[model.experts]`: experts in place of the MLP. Default: none, or the section's own defaults
    /// in a family that has experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts: Option<ExpertsConfig>,
    /// `[model.latent]`: multi-head latent attention. Default: none, or the section's own defaults in
    /// a family that has it.
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
            family: Family::LLAMA,
            hidden: 128,
            ffn: 384,
            layers: 4,
            encoder_layers: None,
            mtp_layers: 0,
            heads: 4,
            kv_heads: 2,
            head_dim: None,
            vocab: None,
            window: None,
            rope_theta: 10_000.0,
            norm_eps: 1e-5,
            tied: true,
            parts: None,
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

    /// The parts of the family, with what this model changes.
    pub(crate) fn template(&self) -> DecoderConfig {
        let family = sized(self.family, self.hidden, self.layers);
        let has_parts = self.parts.as_ref();
        let parts = has_parts.map_or(family.clone(), |parts| parts.applied_to(family));
        let latent = self.latent.as_ref().map(|_| Family::DEEPSEEK_V3.template());
        let experts = self.experts.as_ref();
        DecoderConfig {
            encoder_layers: self.encoder_layers(),
            experts: parts
                .experts
                .clone()
                .or(experts.map(|of| Experts::new(of.num, of.top_k, self.ffn))),
            latent: parts.latent.clone().or(latent.and_then(|of| of.latent)),
            ..parts
        }
    }

    /// The number of the encoder's layers in an encoder-decoder model, else 0.
    pub(crate) fn encoder_layers(&self) -> usize {
        let has_encoder = self.family.template().is_encoder_decoder();
        let of_family = if has_encoder {
            self.layers.div_ceil(2)
        } else {
            0
        };
        self.encoder_layers.unwrap_or(of_family)
    }

    /// The latent attention, if the model has it.
    fn latent(&self) -> Option<Mla> {
        let parts = self.template().latent?;
        Some(self.latent.clone().unwrap_or_default().latent(&parts))
    }

    /// Whether every query head of the family has its own key/value head.
    pub(super) fn has_all_kv_heads(&self) -> bool {
        let family = self.family.template();
        family.kv_heads == family.heads || self.template().latent.is_some()
    }

    /// How much wider the model is than that of `parts.mup_base_hidden`; 1 without μP.
    pub(crate) fn width_multiplier(&self) -> f64 {
        let base = self.template().mup_base_hidden;
        self.hidden as f64 / base.unwrap_or(self.hidden) as f64
    }

    /// The widths that an attention kernel must support: of a head's queries and keys, and of its
    /// values.
    pub(crate) fn head_dims(&self) -> [usize; 2] {
        let values = self.latent().map(|latent| latent.v_head_dim);
        let added = match self.template().positions.alibi() {
            Some(_) => ALIBI_FEATURES,
            None => 0,
        };
        [self.head_dim() + added, values.unwrap_or(self.head_dim())]
    }

    /// The full configuration of a model that does not start from another one, for sequences of
    /// `seq_len` tokens and a tokenizer with `vocab` token ids.
    pub fn decoder(&self, seq_len: usize, vocab: usize) -> DecoderConfig {
        let parts = self.template();
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
            positions: match &parts.positions {
                Positions::Rotary(rotary) => Positions::Rotary(Rotary {
                    theta: self.rope_theta,
                    scaling,
                    // The family's base is unused in a model without a window.
                    window_theta: rotary
                        .window_theta
                        .filter(|_| self.window.is_some() || self.sets_window_theta()),
                    ..rotary.clone()
                }),
                other => other.clone(),
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

    fn sets_window_theta(&self) -> bool {
        let parts = self.parts.as_ref();
        parts.is_some_and(|parts| parts.window_rope_theta.is_some_and(|theta| theta > 0.0))
    }

    /// The section that describes `model`, as far as it has keys for it.
    pub fn of(model: &DecoderConfig) -> Self {
        let (rope_theta, rope_scaling) = match model.positions.rotary() {
            None => (Self::default().rope_theta, None),
            Some(rotary) => (rotary.theta, RopeScalingConfig::of(&rotary.scaling)),
        };
        let family = sized(model.family, model.hidden, model.layers);
        Self {
            init: None,
            family: model.family,
            hidden: model.hidden,
            ffn: model.ffn,
            layers: model.layers,
            encoder_layers: (family.is_encoder_decoder() || model.is_encoder_decoder())
                .then_some(model.encoder_layers),
            mtp_layers: model.mtp_layers,
            heads: model.heads,
            kv_heads: model.kv_heads,
            head_dim: Some(model.head_dim),
            vocab: Some(model.vocab),
            window: model.window,
            rope_theta,
            norm_eps: model.norm_eps,
            tied: model.tied,
            parts: ModelParts::of(model, &family),
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
        let rule = format!("model.heads {heads}, or absent: latent attention does not share heads");
        let ok = latent.is_none() || kv_heads == heads;
        require(ok, "model.kv_heads", kv_heads, rule)?;
        let positions = self.template().positions;
        let is_rotary = positions.rotary().is_some();
        let unused = is_rotary || self.rope_scaling.is_none();
        let rule = "absent, because the model has no rotary positions";
        require(unused, "model.rope_scaling", "set", rule)?;
        if let Some(parts) = &self.parts {
            parts.validate(self.layers, &positions)?;
            let ok = parts.window_layers.is_none() || self.window.is_some();
            let rule = "absent, because model.window is not set";
            require(ok, "model.parts.window_layers", "set", rule)?;
        }
        if let Some(experts) = &self.experts {
            experts.validate(self.layers)?;
        }
        if let Some(config) = &self.latent {
            config.validate()?;
        }
        let head_dim = self.head_dim();
        if let Some(size) = latent.as_ref().map(Mla::qk_head_dim) {
            let family = self.family;
            let rule = format!("{size}, because model.latent defines the heads of {family}");
            require(head_dim == size, "model.head_dim", head_dim, rule)?;
        }
        let is_rotated = is_rotary && latent.is_none();
        let even = head_dim > 0 && (!is_rotated || head_dim.is_multiple_of(2));
        let rule = "even and at least 2, because rotary embeddings rotate pairs (default: hidden / \
            heads)";
        require(even, "model.head_dim", head_dim, rule)?;
        self.rope_scaling
            .as_ref()
            .map_or(Ok(()), RopeScalingConfig::validate)?;
        if self.init.is_none() {
            // The check does not depend on the sequence length and the vocabulary.
            self.decoder(1, 1).validate()?;
        }
        Ok(())
    }
}

/// The parts, as keys of `[model.parts]`, by which `model` differs from what a conversion to
/// Megatron-LM knows: GPT-2, and Llama with biases and norms of query and key heads.
pub(crate) fn parts_unknown_to_megatron(model: &DecoderConfig) -> Vec<String> {
    let is_gpt2 = model.family == Family::GPT2;
    let base = if is_gpt2 { Family::GPT2 } else { Family::LLAMA };
    let parts = ModelParts::of(model, &sized(base, model.hidden, model.layers));
    let mut names = parts.map_or_else(Vec::new, |parts| parts.besides_biases());
    if model.is_encoder_decoder() {
        names.push("an encoder (model.encoder_layers)".into());
    }
    let definition = model.family.definition();
    if definition.head().is_some() {
        names.push(format!("the output head of {}", model.family));
    }
    if definition.loss().is_some() {
        names.push(format!("the loss of {}", model.family));
    }
    names
}

/// The parts of a family in a model of this width and number of layers.
fn sized(family: Family, hidden: usize, layers: usize) -> DecoderConfig {
    let mut parts = DecoderConfig {
        hidden,
        layers,
        ..family.template()
    };
    family.definition().follow(&mut parts);
    parts
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
    #[case("family = \"mistral\"\nwindow = 0", "`model.window` is 0")]
    #[case(
        "[model.parts]\nattention_soft_cap = -1",
        "`model.parts.attention_soft_cap` is -1: it must be 0 or more"
    )]
    #[case(
        "[model.parts]\nrotary_percent = 0.3",
        "rotates 9 elements (rotary_percent 0.3 of head_dim 32)"
    )]
    #[case(
        "[model.parts]\nwindow_layers = \"2\"",
        "`model.parts.window_layers` is set: it must be absent, because model.window"
    )]
    #[case("[model.parts]\nactivation = \"swish\"", "unknown variant `swish`")]
    #[case(
        "[model.parts]\nwindow_rope_theta = 100.0",
        "`window_theta` is set, but the model has no `window`"
    )]
    #[case(
        "window = 4\n[model.parts]\nwindow_layers = \"[1]*3\"",
        "`model.parts.window_layers` is [1]*3: it must be an interval in layers"
    )]
    #[case(
        "[model.parts]\nnorm_placement = \"output\"\nblock_order = \"parallel_shared_norm\"",
        "needs `norm_placement` pre"
    )]
    #[case(
        "[model.parts]\npositions = \"none\"\n[model.rope_scaling]\nfactor = 2",
        "because the model has no rotary positions"
    )]
    #[case(
        "family = \"gpt3\"",
        "`model.family` in `m.toml`: unknown family `gpt3`, expected one of `gpt2`, `llama`"
    )]
    #[case(
        "rope_scaling.kind = \"ntk\"",
        "unknown variant `ntk`, expected one of `llama3`, `linear`, `yarn`, `longrope`, `dynamic`"
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
