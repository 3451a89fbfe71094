//! The formula of the paper, with which ours is compared.

use super::{ActivationMemory, terms::Sizes};
use crate::decoder::DecoderConfig;

impl ActivationMemory {
    /// Bytes that a rank saves of a block for a micro-batch by Korthikanti et al. (2022), with the
    /// core attention recomputed, minus what [`Recompute`](crate::decoder::Recompute) removes here:
    /// outputs of norms (`4 h r`) and of the activation (`8 h n / t`).
    ///
    /// Elements take two bytes, dropout masks one byte per element. The norms of heads, which the
    /// paper's model lacks, are counted like its other norms, by their input. For a model with
    /// latent attention or experts, the result is for a block without them.
    pub fn layer_by_paper_formula(&self) -> usize {
        let n = self.tokens();
        let r = self.rows();
        let Sizes {
            query,
            key_value,
            ffn,
            up,
            ..
        } = self.sizes();
        let DecoderConfig {
            hidden, qk_norm, ..
        } = self.model;
        let norms = 2 * 2 * hidden;
        let masks = 2 * hidden;
        let inputs = if self.recompute.norm {
            0
        } else {
            2 * 2 * hidden
        };
        let activated = if self.recompute.activation {
            0
        } else {
            2 * ffn
        };
        let of_heads = if qk_norm.is_some() {
            2 * (query + key_value)
        } else {
            0
        };
        let attention = 2 * (query + 2 * key_value) + of_heads + 2 * query;
        (norms + masks + inputs) * r + (attention + 2 * up + activated) * n
    }
}
