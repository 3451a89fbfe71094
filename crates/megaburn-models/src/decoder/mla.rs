use megaburn_kernels::{RopeConfig, RopeLayout, RopeScaling};
use megaburn_parallel::MultiLatentAttentionConfig;
use serde::{Deserialize, Serialize};

use super::{Positions, config::LARGEST};
use crate::{DecoderConfig, ModelError};

/// The sizes of multi-head latent attention, with Hugging Face's names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mla {
    /// Size of the query latent; `None` if queries are projected from the residual stream directly.
    pub q_lora_rank: Option<usize>,
    /// Size of the key/value latent.
    pub kv_lora_rank: usize,
    /// Features per head of queries and keys without rotary embedding.
    pub qk_nope_head_dim: usize,
    /// Features per head of queries and keys with rotary embedding.
    pub qk_rope_head_dim: usize,
    /// Features per head of values.
    pub v_head_dim: usize,
    /// Whether the rotation pairs neighbouring features (interleaved), in place of features of the
    /// two halves.
    pub interleaved: bool,
}

impl Mla {
    /// Features per head of queries and keys.
    pub fn qk_head_dim(&self) -> usize {
        self.qk_nope_head_dim + self.qk_rope_head_dim
    }

    /// The configuration of the attention layer of a block. The epsilon of its norms is fixed, as
    /// in Transformers; it is not the model's.
    pub(super) fn layer(&self, d_model: usize, heads: usize) -> MultiLatentAttentionConfig {
        let Self {
            kv_lora_rank,
            qk_nope_head_dim,
            qk_rope_head_dim,
            v_head_dim,
            ..
        } = *self;
        let nope = qk_nope_head_dim;
        let rope = qk_rope_head_dim;
        MultiLatentAttentionConfig::new(d_model, heads, kv_lora_rank, nope, rope, v_head_dim)
            .with_q_lora_rank(self.q_lora_rank)
            .with_norm_epsilon(1e-6)
    }

    /// Number of weights of the matrices of a block's attention.
    pub(super) fn weights(&self, hidden: usize, heads: usize) -> usize {
        let query = heads * self.qk_head_dim();
        let key_value = heads * (self.qk_nope_head_dim + self.v_head_dim);
        let queries = match self.q_lora_rank {
            Some(rank) => rank * (hidden + query),
            None => hidden * query,
        };
        let latent = hidden * (self.kv_lora_rank + self.qk_rope_head_dim);
        queries + latent + self.kv_lora_rank * key_value + heads * self.v_head_dim * hidden
    }

    /// Refuses sizes that no model can have, and parts of `model` that latent attention does not
    /// support.
    pub(super) fn validate(&self, model: &DecoderConfig) -> Result<(), ModelError> {
        let refuse = |why: String| Err(ModelError::Config(why));
        let sizes = [
            ("q_lora_rank", self.q_lora_rank.unwrap_or(1)),
            ("kv_lora_rank", self.kv_lora_rank),
            ("qk_nope_head_dim", self.qk_nope_head_dim),
            ("qk_rope_head_dim", self.qk_rope_head_dim),
            ("v_head_dim", self.v_head_dim),
        ];
        if let Some((name, size)) = sizes
            .into_iter()
            .find(|(_, size)| !(1..=LARGEST).contains(size))
        {
            return refuse(format!("`{name}` is {size}, which is out of range"));
        }
        let DecoderConfig {
            heads,
            kv_heads,
            head_dim,
            ..
        } = *model;
        if head_dim != self.qk_head_dim() {
            let Self {
                qk_nope_head_dim: nope,
                qk_rope_head_dim: rope,
                ..
            } = self;
            return refuse(format!(
                "`head_dim` is {head_dim}, but heads of latent attention have {nope} + {rope}"
            ));
        }
        if kv_heads != heads {
            return refuse(format!(
                "{kv_heads} key/value heads for {heads} query heads: latent attention needs as \
                many key/value heads as query heads"
            ));
        }
        let others = [
            ("window", model.window.is_some()),
            ("qk_norm", model.qk_norm),
            ("qkv_bias", model.qkv_bias),
            ("output_bias", model.output_bias),
            ("positions", model.positions == Positions::Learned),
        ];
        match others.into_iter().find(|(_, is_set)| *is_set) {
            Some((name, _)) => refuse(format!("latent attention does not support `{name}`")),
            None => Ok(()),
        }
    }
}

impl DecoderConfig {
    /// The rotary embedding, if the model has one: of all features of a head, or of the rotated
    /// ones in latent attention.
    pub fn rope(&self) -> Option<RopeConfig> {
        let Positions::Rotary { theta, scaling } = &self.positions else {
            return None;
        };
        let (features, layout) = match &self.latent {
            Some(Mla {
                qk_rope_head_dim,
                interleaved: true,
                ..
            }) => (*qk_rope_head_dim, RopeLayout::Interleaved),
            Some(latent) => (latent.qk_rope_head_dim, RopeLayout::Halves),
            None => (self.head_dim, RopeLayout::Halves),
        };
        let rope = RopeConfig::new(features)
            .with_theta(*theta)
            .with_scaling(scaling.clone());
        Some(rope.with_layout(layout))
    }

    /// The softmax scale of latent attention if it is not `head_dim^-0.5`: with YaRN, DeepSeek
    /// multiplies it by a factor.
    pub(super) fn softmax_scale(&self) -> Option<f64> {
        match &self.positions {
            Positions::Rotary {
                scaling: RopeScaling::Yarn(yarn),
                ..
            } => Some((self.head_dim as f64).powf(-0.5) * yarn.score_factor()),
            _ => None,
        }
    }
}
