use megaburn_parallel::MultiLatentAttentionConfig;
use serde::{Deserialize, Serialize};

use super::limits::LARGEST;
use crate::error::ModelError;

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

    /// Refuses sizes that no model can have.
    pub(super) fn validate(&self) -> Result<(), ModelError> {
        let sizes = [
            ("q_lora_rank", self.q_lora_rank.unwrap_or(1)),
            ("kv_lora_rank", self.kv_lora_rank),
            ("qk_nope_head_dim", self.qk_nope_head_dim),
            ("qk_rope_head_dim", self.qk_rope_head_dim),
            ("v_head_dim", self.v_head_dim),
        ];
        match sizes
            .into_iter()
            .find(|(_, size)| !(1..=LARGEST).contains(size))
        {
            Some((name, size)) => Err(ModelError::Config(format!(
                "`{name}` is {size}, which is out of range"
            ))),
            None => Ok(()),
        }
    }
}
