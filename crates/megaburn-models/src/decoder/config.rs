use megaburn_kernels::RopeScaling;
use megaburn_mesh::{ExpertShape, Layout, ModelShape};
use megaburn_parallel::{Activation, NormKind};
use serde::{Deserialize, Serialize};

use super::{Experts, Mla};
use crate::{Family, ModelError, flops::FlopShape};

/// The sizes of a decoder and the parts of its blocks. [`Family::template`] has the parts of each
/// family.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecoderConfig {
    /// The family, which determines the names on Hugging Face.
    pub family: Family,
    /// Number of token ids, without padding.
    pub vocab: usize,
    /// Features of the residual stream.
    pub hidden: usize,
    /// Features inside the MLP.
    pub ffn: usize,
    /// Number of transformer blocks, without the blocks of multi-token prediction.
    pub layers: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key/value heads.
    pub kv_heads: usize,
    /// Features of a head; those of its queries and keys if its values have another size.
    pub head_dim: usize,
    /// Longest sequence, in tokens.
    pub max_seq_len: usize,
    /// How positions enter the model.
    pub positions: Positions,
    /// The kind of norm.
    pub norm: NormKind,
    /// Epsilon of the norms.
    pub norm_eps: f64,
    /// The activation function of the MLP.
    pub activation: Activation,
    /// Whether queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether the attention's output projection has a bias.
    pub output_bias: bool,
    /// Whether the matrices of the MLP have biases.
    pub mlp_bias: bool,
    /// Whether the queries and keys of each head are normalised before the rotation.
    pub qk_norm: bool,
    /// Sliding window: positions that a query sees, including its own; `None` for full causal
    /// attention.
    pub window: Option<usize>,
    /// Layers that ignore `window` and use full causal attention.
    pub full_layers: Vec<usize>,
    /// Whether the embedding is also the output projection.
    pub tied: bool,
    /// Experts in place of the MLP; `None` if every layer has an MLP.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<Experts>,
    /// Multi-head latent attention; `None` for multi-head or grouped-query attention.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latent: Option<Mla>,
    /// Number of [blocks of multi-token prediction](super::Mtp) after the last layer; used in
    /// training only.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub mtp_layers: usize,
}

fn is_zero(count: &usize) -> bool {
    *count == 0
}

/// Larger sizes are mistakes, and their products could overflow.
pub(crate) const LARGEST: usize = 1 << 30;
/// More layers are a mistake, and lists of them would fill the memory.
pub(crate) const MOST_LAYERS: usize = 10_000;
/// More parameters in the full model are a mistake. Up to this number, their bytes in any type fit
/// a `u64`.
const MOST_PARAMS: f64 = (1u64 << 58) as f64;

/// How positions enter a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Positions {
    /// Rotary embeddings (RoPE): queries and keys are rotated by their position.
    Rotary {
        /// Base of the frequencies.
        theta: f64,
        /// RoPE scaling: changes the frequencies for longer contexts.
        scaling: RopeScaling,
    },
    /// A learned vector per position is added to the token embedding; there are `max_seq_len` of
    /// them.
    Learned,
}

impl DecoderConfig {
    /// Refuses sizes that no model can have.
    ///
    /// # Errors
    /// The first invalid size, with the numbers.
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
            ("window", self.window.unwrap_or(1)),
        ];
        if let Some((name, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return refuse(format!("`{name}` is 0, but must be at least 1"));
        }
        if let Some((name, size)) = sizes.into_iter().find(|(_, size)| *size > LARGEST) {
            return refuse(format!("`{name}` is {size}, which is out of range"));
        }
        for (name, count) in [("layers", self.layers), ("mtp_layers", self.mtp_layers)] {
            if count > MOST_LAYERS {
                return refuse(format!("`{name}` is {count}, which is out of range"));
            }
        }
        let heads = self.heads;
        let kv_heads = self.kv_heads;
        if !heads.is_multiple_of(kv_heads) {
            return refuse(format!(
                "{heads} query heads are not divisible by {kv_heads} key/value heads"
            ));
        }
        if !(self.norm_eps >= 0.0 && self.norm_eps.is_finite()) {
            return refuse(format!(
                "`norm_eps` is {}, but must be at least 0 and finite",
                self.norm_eps
            ));
        }
        if let Some(layer) = self.full_layers.iter().find(|&&layer| layer >= self.layers) {
            return refuse(format!(
                "`full_layers` names layer {layer}, but the model has {} layers",
                self.layers
            ));
        }
        if let Some(latent) = &self.latent {
            latent.validate(self)?;
        }
        if let Some(rope) = self.rope() {
            rope.frequencies()?;
        }
        if let Some(experts) = &self.experts {
            experts.validate(self.layers)?;
        }
        let params = self.most_params();
        if params > MOST_PARAMS {
            return refuse(format!(
                "its sizes amount to {params:.1e} parameters, which is too large"
            ));
        }
        Ok(())
    }

    /// An upper bound of the number of parameters, without biases and norms.
    fn most_params(&self) -> f64 {
        let [vocab, hidden, ffn, heads, head_dim, blocks] = [
            self.vocab,
            self.hidden,
            self.ffn,
            self.heads,
            self.head_dim,
            self.layers,
        ]
        .map(|size| size as f64);
        let mlp = 3.0 * hidden * ffn;
        let experts = self.experts.as_ref().map_or(0.0, |experts| {
            let shared = experts.shared_ffn.unwrap_or(0) as f64;
            hidden * (3.0 * (experts.num as f64 * experts.ffn as f64 + shared) + experts.num as f64)
        });
        let attention = self
            .latent
            .as_ref()
            .map_or(4.0 * hidden * heads * head_dim, |latent| {
                let rank = latent.kv_lora_rank as f64 + latent.q_lora_rank.unwrap_or(0) as f64;
                let values = latent.v_head_dim as f64;
                (2.0 * rank + 2.0 * hidden) * (hidden + heads * (2.0 * head_dim + values))
            });
        let blocks = blocks + self.mtp_layers as f64;
        2.0 * vocab * hidden + blocks * (mlp + experts + attention + 2.0 * hidden * hidden)
    }

    /// Refuses sequences that are longer than the model's limit.
    ///
    /// # Errors
    /// `seq_len` exceeds the limit; the message has both lengths.
    pub fn check_seq_len(&self, seq_len: usize) -> Result<(), ModelError> {
        if seq_len <= self.max_seq_len {
            return Ok(());
        }
        let limit = self.max_seq_len;
        Err(ModelError::Config(format!(
            "sequences of {seq_len} tokens exceed the model's limit of {limit}"
        )))
    }

    /// Checks whether a layout can split the model, for sequences of `seq_len` tokens including
    /// padding. The split of the layers into pipeline stages is not checked.
    ///
    /// # Errors
    /// The layout does not fit; the message has all the numbers.
    pub fn check_layout(&self, layout: &Layout, seq_len: usize) -> Result<(), ModelError> {
        Ok(layout.validate_for(&self.shape(seq_len))?)
    }

    /// The sizes that a layout must be able to split.
    pub fn shape(&self, seq_len: usize) -> ModelShape {
        let Self {
            ffn,
            heads,
            kv_heads,
            ..
        } = *self;
        let is_dense = (0..self.layers).any(|layer| self.layer_experts(layer).is_none());
        let shared = self
            .experts
            .as_ref()
            .and_then(|experts| experts.shared_ffn)
            .unwrap_or(0);
        let of = |experts: &Experts| ExpertShape {
            num: experts.num,
            ffn: experts.ffn,
        };
        ModelShape {
            ffn: gcd(if is_dense { ffn } else { 0 }, shared),
            heads,
            kv_heads,
            seq_len,
            experts: self.experts.as_ref().map(of),
        }
    }

    /// Number of blocks, including the blocks of multi-token prediction.
    pub fn num_blocks(&self) -> usize {
        self.layers + self.mtp_layers
    }

    /// The same model without multi-token prediction.
    #[must_use]
    pub fn without_mtp(&self) -> Self {
        Self {
            mtp_layers: 0,
            ..self.clone()
        }
    }

    /// Sliding window of block `index`; `None` for full causal attention.
    pub fn layer_window(&self, index: usize) -> Option<usize> {
        self.window
            .filter(|_| !self.full_layers.contains(&self.kind_of(index)))
    }

    /// The experts of block `index`; `None` if it has an MLP.
    pub fn layer_experts(&self, index: usize) -> Option<&Experts> {
        let index = self.kind_of(index);
        self.experts
            .as_ref()
            .filter(|experts| !experts.dense_layers.contains(&index))
    }

    /// The layer whose parts block `index` has: blocks of multi-token prediction are like the last
    /// layer.
    fn kind_of(&self, index: usize) -> usize {
        index.min(self.layers.saturating_sub(1))
    }

    /// The sizes that enter Megatron's FLOP formula.
    pub fn flop_shape(&self) -> FlopShape {
        let Self {
            hidden,
            heads,
            head_dim,
            mtp_layers,
            ..
        } = *self;
        let query = heads * head_dim;
        let key_value = self.kv_heads * head_dim;
        let (attention, values) = match &self.latent {
            Some(latent) => (latent.weights(hidden, heads), heads * latent.v_head_dim),
            None => (2 * hidden * (query + key_value), query),
        };
        FlopShape {
            hidden,
            attention,
            query,
            values,
            ffn: self.ffn,
            ffn_matrices: if self.activation.is_gated() { 3 } else { 2 },
            layers: self.num_blocks(),
            mtp_layers,
            expert_layers: (0..self.num_blocks())
                .filter(|&index| self.layer_experts(index).is_some())
                .count(),
            expert_ffn: self.experts.as_ref().map_or(0, Experts::active_ffn),
            vocab: self.vocab,
        }
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
