use megaburn_models::decoder::Mla;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::require::require;
use crate::error::TrainError;

/// `[model.latent]`: the sizes of multi-head latent attention (MLA). The keys have Hugging Face's
/// names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(JsonSchema)]
pub struct MlaConfig {
    /// Width of the latent that queries are made from. Default: queries have no latent.
    #[schemars(extend("minimum" = 1))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub q_lora_rank: Option<usize>,
    /// Width of the latent that keys and values are made from.
    #[schemars(extend("minimum" = 1))]
    pub kv_lora_rank: usize,
    /// Width of the part of a head's queries and keys that rotary embeddings do not rotate.
    #[schemars(extend("minimum" = 1))]
    pub qk_nope_head_dim: usize,
    /// Width of the part of a head's queries and keys that is rotated; it is even.
    #[schemars(extend("minimum" = 2, "x-rule" = false))]
    pub qk_rope_head_dim: usize,
    /// Width of a head's values.
    #[schemars(extend("minimum" = 1))]
    pub v_head_dim: usize,
}

impl Default for MlaConfig {
    fn default() -> Self {
        Self {
            q_lora_rank: None,
            kv_lora_rank: 32,
            qk_nope_head_dim: 32,
            qk_rope_head_dim: 16,
            v_head_dim: 32,
        }
    }
}

impl MlaConfig {
    /// The latent attention of a family with the defaults `parts`.
    pub(super) fn latent(&self, parts: &Mla) -> Mla {
        Mla {
            q_lora_rank: self.q_lora_rank,
            kv_lora_rank: self.kv_lora_rank,
            qk_nope_head_dim: self.qk_nope_head_dim,
            qk_rope_head_dim: self.qk_rope_head_dim,
            v_head_dim: self.v_head_dim,
            ..*parts
        }
    }

    /// The section that describes `latent`.
    pub(super) fn of(latent: &Mla) -> Self {
        Self {
            q_lora_rank: latent.q_lora_rank,
            kv_lora_rank: latent.kv_lora_rank,
            qk_nope_head_dim: latent.qk_nope_head_dim,
            qk_rope_head_dim: latent.qk_rope_head_dim,
            v_head_dim: latent.v_head_dim,
        }
    }

    pub(super) fn validate(&self) -> Result<(), TrainError> {
        let rope = self.qk_rope_head_dim;
        let rule = "even and at least 2, because rotary embeddings rotate pairs";
        let even = rope > 0 && rope.is_multiple_of(2);
        require(even, "model.latent.qk_rope_head_dim", rope, rule)
    }
}

#[cfg(test)]
mod tests {
    use megaburn_models::Family;
    use rstest::rstest;

    use crate::{
        config::{ConfigLayers, TrainConfig},
        error::TrainError,
    };

    fn load(text: &str) -> Result<TrainConfig, TrainError> {
        ConfigLayers::new()
            .with_text("m.toml", text)
            .and_then(ConfigLayers::load)
    }

    #[rstest]
    #[case("deepseek_v2")]
    #[case("deepseek_v3")]
    fn a_family_with_latents_has_its_sizes_and_says_them_again(#[case] family: &str) {
        let text = format!(
            "[model]\nfamily = \"{family}\"\nkv_heads = 4\n[model.latent]\nq_lora_rank = 24\nv_head_dim = 20\n
             [model.rope_scaling]\nkind = \"yarn\"\nmscale_all_dim = 0.7\nbeta_fast = 16\n"
        );
        let config = load(&text).unwrap();
        let model = config.model.decoder(64, 100);
        let latent = model.latent.as_ref().unwrap();
        assert_eq!(
            (latent.q_lora_rank, latent.v_head_dim, latent.interleaved),
            (Some(24), 20, true)
        );
        assert_eq!((model.head_dim, model.kv_heads), (48, 4));
        let experts = model.experts.as_ref().unwrap();
        let v3 = model.family == Family::DEEPSEEK_V3;
        assert_eq!(
            (experts.normalise, experts.bias, experts.sigmoid),
            (v3, v3, v3)
        );
        assert_eq!(experts.shared_ffn, Some(model.ffn));
        let again = super::super::ModelConfig::of(&model);
        assert_eq!(again.decoder(64, 1), model);
        // The resolved configuration of an actual run reads back to the same sizes.
        let layout = config.layout(Some(2)).unwrap();
        load(&config.resolved(&layout, &model).to_toml()).unwrap();
    }

    #[rstest]
    #[case(
        "[model]\nkv_heads = 2\n[model.latent]\nkv_lora_rank = 8",
        "`model.kv_heads` is 2: it must be model.heads 4, or absent: latent attention"
    )]
    #[case(
        "[model]\nfamily = \"deepseek_v3\"\nkv_heads = 2",
        "`model.kv_heads` is 2: it must be model.heads 4, or absent: latent attention does not"
    )]
    #[case(
        "[model]\nfamily = \"deepseek_v3\"\nkv_heads = 4\nhead_dim = 32",
        "`model.head_dim` is 32: it must be 48, because model.latent defines the heads of deepseek_v3"
    )]
    #[case(
        "[model]\nfamily = \"deepseek_v3\"\nkv_heads = 4\nwindow = 8",
        "latent attention does not support `window`"
    )]
    #[case(
        "[model]\nfamily = \"deepseek_v2\"\nkv_heads = 4\n[model.latent]\nqk_rope_head_dim = 5",
        "`model.latent.qk_rope_head_dim` is 5: it must be even"
    )]
    #[case(
        "[model]\nfamily = \"deepseek_v2\"\nkv_heads = 4\n[model.latent]\nv_head_dim = 0",
        "`model.latent.v_head_dim` is 0: it must be at least 1"
    )]
    #[case(
        "[model.rope_scaling]\nkind = \"yarn\"\nbeta_fast = 1",
        "is 1: it must be finite and more than beta_slow 1"
    )]
    #[case(
        "[model.rope_scaling]\nkind = \"yarn\"\nmscale = -1",
        "`model.rope_scaling.mscale` is -1: it must be at least 0"
    )]
    fn latents_are_those_that_a_family_has(#[case] text: &str, #[case] message: &str) {
        let error = load(text).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
}
