use megaburn_kernels::{AttentionDropout, DropoutKey};
use megaburn_mesh::{PositionRng, Purpose};

use crate::tokens::TokenBlock;

/// Which attention probabilities are dropped in training; the same ones under every layout.
#[derive(Clone, Debug)]
pub(super) struct ProbabilityDropout {
    pub(super) prob: f64,
    /// The run's seed, which keys the masks together with the name.
    pub(super) seed: u64,
    pub(super) name: String,
    /// Index of this rank's first head, and the number of heads over all ranks.
    pub(super) first_head: usize,
    pub(super) num_heads: usize,
}

impl ProbabilityDropout {
    /// The dropout of `s_q` queries and `s_k` keys for this rank's heads from `head` on.
    pub(super) fn of(
        &self,
        block: TokenBlock,
        [s_q, s_k]: [usize; 2],
        head: usize,
    ) -> AttentionDropout {
        let rng = PositionRng::new(self.seed, Purpose::Dropout, &self.name).with_stream(block.step);
        let key = DropoutKey::new(rng, &[block.global_batch, self.num_heads, s_q, s_k])
            .with_offset(0, block.first_sample)
            .with_offset(1, self.first_head + head);
        AttentionDropout::new(self.prob, key)
    }
}
