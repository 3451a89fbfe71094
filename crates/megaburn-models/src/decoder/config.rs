//! The sizes and the parts of a decoder.

use megaburn_mesh::{ExpertShape, Layout, ModelShape};
use megaburn_parallel::{Activation, NormKind, QkNormKind};
use serde::{Deserialize, Serialize};

use super::{
    BlockOrder, Experts, Mla, Multipliers, NormPlacement, Positions,
    parts::{is_default, read_qk_norm, write_qk_norm},
};
use crate::{error::ModelError, families::Family, flops::FlopShape};

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
    /// How many of the blocks, from the first on, are the encoder of an encoder-decoder model (T5);
    /// the others are its decoder. 0 if the model is only an encoder or only a decoder.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub encoder_layers: usize,
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
    /// Where the norms of a block are.
    #[serde(default, skip_serializing_if = "is_default")]
    pub norm_placement: NormPlacement,
    /// Whether norms scale by `1 + gamma`, with gamma starting at zero (Gemma; Megatron's
    /// `--apply-layernorm-1p`).
    #[serde(default, skip_serializing_if = "is_default")]
    pub zero_centered_gamma: bool,
    /// Whether positions see all others, also later ones: an encoder. Default: causal attention.
    #[serde(default, skip_serializing_if = "is_default")]
    pub bidirectional: bool,
    /// Whether the sum of the embeddings has a norm before the first block (BERT).
    #[serde(default, skip_serializing_if = "is_default")]
    pub embedding_norm: bool,
    /// Number of token types, each with a learned vector that is added to the token embeddings
    /// (BERT's segments); 0 for none.
    #[serde(default, skip_serializing_if = "is_default")]
    pub token_types: usize,
    /// Whether a [`MaskedHead`](super::MaskedHead) is before the output projection.
    #[serde(default, skip_serializing_if = "is_default")]
    pub masked_head: bool,
    /// Whether the model has a [`BinaryHead`](super::BinaryHead).
    #[serde(default, skip_serializing_if = "is_default")]
    pub binary_head: bool,
    /// In what order a block applies attention and MLP.
    #[serde(default, skip_serializing_if = "is_default")]
    pub block_order: BlockOrder,
    /// The activation function of the MLP.
    pub activation: Activation,
    /// Whether queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether the attention's output projection has a bias.
    pub output_bias: bool,
    /// Whether the matrices of the MLP and of experts have biases.
    pub mlp_bias: bool,
    /// What is normalised of the queries and keys, before the rotation.
    #[serde(deserialize_with = "read_qk_norm", serialize_with = "write_qk_norm")]
    pub qk_norm: Option<QkNormKind>,
    /// Factor of the attention scores; `None` is `head_dim^-0.5`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub attention_scale: Option<f64>,
    /// Attention scores are `cap * tanh(score / cap)` before the softmax (Gemma 2).
    #[serde(default, skip_serializing_if = "is_default")]
    pub attention_soft_cap: Option<f64>,
    /// Whether each query head has a learned logit that takes part in its softmax without a value
    /// (gpt-oss; Megatron's `--softmax-type learnable`).
    #[serde(default, skip_serializing_if = "is_default")]
    pub attention_sinks: bool,
    /// Logits are `cap * tanh(logit / cap)` (Gemma 2).
    #[serde(default, skip_serializing_if = "is_default")]
    pub logits_soft_cap: Option<f64>,
    /// Constant factors.
    #[serde(default, skip_serializing_if = "is_default")]
    pub multipliers: Multipliers,
    /// Sliding window: positions that a query sees, including its own; `None` for full causal
    /// attention.
    pub window: Option<usize>,
    /// Layers that ignore `window` and use full causal attention.
    pub full_layers: Vec<usize>,
    /// Whether the embedding is also the output projection.
    pub tied: bool,
    /// Standard deviation of fresh weights. Projections into the residual stream have
    /// `init_std / sqrt(2 layers)`.
    #[serde(
        default = "megatron_init_std",
        skip_serializing_if = "is_megatron_init_std"
    )]
    pub init_std: f64,
    /// Width of the model for which learning rate and `init_std` were found; this model then trains
    /// well with the same (μP). Hidden matrices have fresh weights with a smaller deviation and a
    /// smaller learning rate, and logits are divided by the ratio of the widths.
    #[serde(default, skip_serializing_if = "is_default")]
    pub mup_base_hidden: Option<usize>,
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

/// The default of Megatron's `--init-method-std`.
pub(crate) fn megatron_init_std() -> f64 {
    0.02
}

fn is_megatron_init_std(std: &f64) -> bool {
    *std == megatron_init_std()
}

impl DecoderConfig {
    /// The sizes of the model in a line.
    pub fn summary(&self) -> String {
        let Self {
            layers,
            hidden,
            heads,
            kv_heads,
            vocab,
            ..
        } = self;
        format!(
            "{layers} layers, hidden {hidden}, {heads} heads ({kv_heads} key/value), \
            vocabulary {vocab}"
        )
    }

    /// Refuses sequences that are longer than the model's limit. A relative bias has none, because the
    /// longest distances share a bucket.
    ///
    /// # Errors
    /// `seq_len` exceeds the limit; the message has both lengths.
    pub fn check_seq_len(&self, seq_len: usize) -> Result<(), ModelError> {
        let limit = match self.longest_text() {
            Some(limit) if seq_len > limit => limit,
            _ => return Ok(()),
        };
        Err(ModelError::Config(format!(
            "sequences of {seq_len} tokens exceed the model's limit of {limit}"
        )))
    }

    /// Refuses text generation with an encoder.
    ///
    /// # Errors
    /// The model sees later tokens.
    pub fn check_generates(&self) -> Result<(), ModelError> {
        if !self.bidirectional {
            return Ok(());
        }
        let family = self.family;
        Err(ModelError::Config(format!(
            "this {family} model is an encoder (`bidirectional` attention), which cannot generate \
            text: generate with a decoder"
        )))
    }

    /// Refuses to split the rows of an encoder over `cp` context-parallel ranks, because their padding
    /// has no place in the ranks' chunks, and attention with a relative bias, which is not computed in
    /// chunks.
    ///
    /// # Errors
    /// The model has such attention, and there are several such ranks.
    pub fn check_context_parallel(&self, cp: usize) -> Result<(), ModelError> {
        let what = if self.is_encoder_decoder() {
            "an encoder (`encoder_layers`), whose rows are padded"
        } else if self.bidirectional {
            "`bidirectional` attention, whose rows are padded"
        } else if self.positions.relative().is_some() {
            "`positions` relative, whose bias is not split into chunks"
        } else {
            return Ok(());
        };
        if cp == 1 {
            return Ok(());
        }
        Err(ModelError::Config(format!(
            "context parallelism (cp{cp}) does not support {what}: use tensor parallelism with \
            sequence parallelism instead"
        )))
    }

    /// Checks whether a layout can split the model, for sequences of `seq_len` tokens including
    /// padding. The split of the layers into pipeline stages is not checked.
    ///
    /// # Errors
    /// The layout does not fit; the message has all the numbers.
    pub fn check_layout(&self, layout: &Layout, seq_len: usize) -> Result<(), ModelError> {
        self.check_context_parallel(layout.cp)?;
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

    /// Whether the model has a vector for each position, so that it cannot read longer sequences.
    pub fn learns_positions(&self) -> bool {
        self.positions == Positions::Learned
    }

    /// How much wider the model is than the one of `mup_base_hidden`; 1 without μP.
    ///
    /// Source: Yang et al., "Tensor programs V" (2022), table 8, for Adam,
    /// <https://arxiv.org/abs/2203.03466>.
    pub fn width_multiplier(&self) -> f64 {
        let base = self.mup_base_hidden.unwrap_or(self.hidden);
        self.hidden as f64 / base as f64
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

    /// For each block, including those of multi-token prediction, the first one that is as large and
    /// computes as much. Of an encoder-decoder model, whose halves end differently, each block itself.
    pub fn alike_blocks(&self) -> Vec<usize> {
        let mut kinds = Vec::new();
        let first = |index: usize| {
            let kind = (
                self.is_encoder_decoder().then_some(index),
                self.layer_window(index),
                self.layer_experts(index).is_some(),
            );
            let known = kinds.iter().find(|(known, _)| *known == kind);
            let first = known.map(|(_, first)| *first);
            first.unwrap_or_else(|| {
                kinds.push((kind, index));
                index
            })
        };
        (0..self.num_blocks()).map(first).collect()
    }

    /// The layer whose parts block `index` has: blocks of multi-token prediction are like the last
    /// layer.
    pub(super) fn kind_of(&self, index: usize) -> usize {
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
            encoder_layers: self.encoder_layers,
            bidirectional: self.bidirectional,
            masked_head: self.masked_head,
        }
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
