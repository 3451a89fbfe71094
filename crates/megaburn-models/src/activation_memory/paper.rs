//! The formula that ours is compared with.

use super::{ActivationMemory, Sizes};
use crate::decoder::DecoderConfig;

impl ActivationMemory {
    /// Bytes that a rank holds of a block for a micro-batch by Korthikanti et al. (2022), with the core
    /// attention recomputed, and less what [`Recompute`](crate::decoder::Recompute) does not keep here: what
    /// norms give (`4 h r`), what the activation gives (`8 h n / t`).
    ///
    /// Of two bytes an element, and of one where dropout kept an element. Norms of heads, which the paper's
    /// model has not, are counted as its norms are: by what they read. Of a model with latents or experts it is that
    /// of a block without.
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
        let of_heads = if qk_norm { 2 * (query + key_value) } else { 0 };
        let attention = 2 * (query + 2 * key_value) + of_heads + 2 * query;
        (norms + masks + inputs) * r + (attention + 2 * up + activated) * n
    }
}
