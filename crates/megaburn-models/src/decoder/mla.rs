use megaburn_kernels::{RopeConfig, RopeLayout, RopeScaling};
use megaburn_parallel::MultiLatentAttentionConfig;
use serde::{Deserialize, Serialize};

use super::{Positions, config::LARGEST};
use crate::{DecoderConfig, ModelError};

/// The sizes of attention whose keys and values are made of a latent, under Hugging Face's names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mla {
    /// Features of the latent of queries; none: they are made of the residual stream.
    pub q_lora_rank: Option<usize>,
    /// Features of the latent of keys and values.
    pub kv_lora_rank: usize,
    /// Features of a head's queries and keys that know nothing of positions.
    pub qk_nope_head_dim: usize,
    /// Features of a head's queries and keys that are rotated.
    pub qk_rope_head_dim: usize,
    /// Features of a head's values.
    pub v_head_dim: usize,
    /// Whether neighbours among those that are rotated are pairs, not elements of two halves.
    pub interleaved: bool,
}

impl Mla {
    /// Features of a head's queries and keys.
    pub fn qk_head_dim(&self) -> usize {
        self.qk_nope_head_dim + self.qk_rope_head_dim
    }

    /// The layer that it is in a block. The epsilon of its norms is Transformers', whatever the model's is.
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

    /// Weights of a block's matrices.
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

    /// Refuses sizes that no model can have, and what else of `model` does not go with them.
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
            return refuse(format!("`{name}` is {size}, which no model has"));
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
                "`head_dim` is {head_dim}, and heads of latent attention are of {nope} + {rope}"
            ));
        }
        if kv_heads != heads {
            return refuse(format!(
                "{kv_heads} key/value heads for {heads} query heads, and latent attention shares none"
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
            Some((name, _)) => refuse(format!("latent attention has no such `{name}`")),
            None => Ok(()),
        }
    }
}

impl DecoderConfig {
    /// The rotary embedding, where there is one: of heads, or of the features of them that are rotated.
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

    /// What latent attention multiplies its scores by, where that is not a head's size alone: with YaRN
    /// DeepSeek lets them grow.
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
