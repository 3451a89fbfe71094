use burn::{module::Module, tensor::Tensor};
use megaburn_kernels::{AttentionDropout, AttentionOptions, DropoutKey, attention};
use megaburn_mesh::{PositionRng, Purpose};

use crate::{
    ContextParallel, Input, PackedDocuments, TokenBlock, TokenContext,
    context::{Mask, context_attention},
    recomputed,
};

/// What is between the matrices, and has no parameters.
#[derive(Module, Debug)]
pub(super) struct CoreAttention {
    pub(super) causal: bool,
    pub(super) window: Option<usize>,
    pub(super) recompute: bool,
    #[module(skip)]
    pub(super) dropout: Option<Dropout>,
    #[module(skip)]
    pub(super) parallel: ContextParallel,
}

/// Which probabilities training drops: the same under every layout.
#[derive(Clone, Debug)]
pub(super) struct Dropout {
    pub(super) prob: f64,
    /// What masks are drawn from.
    pub(super) seed: u64,
    pub(super) name: String,
    /// The first of this rank's heads, and how many all ranks have.
    pub(super) first_head: usize,
    pub(super) num_heads: usize,
}

impl CoreAttention {
    /// `[seq, batch, heads, head_dim]` each to `[seq, batch, heads * head_dim]`; in training some
    /// probabilities are dropped.
    pub(super) fn forward(
        &self,
        queries_keys_values: [Tensor<4>; 3],
        context: &TokenContext,
    ) -> Tensor<3> {
        let TokenContext { block, documents, parallel, .. } = context;
        let parallel = parallel.as_ref().unwrap_or(&self.parallel).clone();
        let is_trained = queries_keys_values[0].device().is_autodiff();
        let (block, documents) = (block.filter(|_| is_trained), documents.clone());
        if !self.recompute {
            return self.whole(queries_keys_values, block, documents, &parallel);
        }
        let inputs = queries_keys_values.map(Input::from);
        let again =
            move |core: &Self, inputs| [core.whole(inputs, block, documents.clone(), &parallel)];
        let [attended] = recomputed(self, inputs, again);
        attended
    }

    /// Of queries from a position on, of those that keys and values have.
    pub(super) fn at(&self, query_offset: usize, [q, k, v]: [Tensor<4>; 3]) -> Tensor<3> {
        let options = Mask { causal: self.causal, window: self.window, ..Mask::default() }.whole();
        attention(q, k, v, AttentionOptions { query_offset, ..options })
    }

    /// Of all tokens of sequences, or the stretches that ranks hold.
    fn whole(
        &self,
        queries_keys_values: [Tensor<4>; 3],
        block: Option<TokenBlock>,
        documents: Option<PackedDocuments>,
        parallel: &ContextParallel,
    ) -> Tensor<3> {
        let [seq, _, heads, _] = queries_keys_values[0].dims();
        let ranks = parallel.num_ranks();
        let dropout = self
            .dropout
            .as_ref()
            .zip(block)
            .map(|(dropout, block)| dropout.of(block, seq * ranks, parallel.first_head(heads)));
        let mask = Mask { causal: self.causal, window: self.window, dropout, documents };
        if ranks > 1 {
            return context_attention(queries_keys_values, mask, parallel);
        }
        let [q, k, v] = queries_keys_values;
        attention(q, k, v, mask.whole())
    }
}

impl Dropout {
    /// Of sequences of `seq` tokens, for the heads from `head` of this rank's on.
    fn of(&self, block: TokenBlock, seq: usize, head: usize) -> AttentionDropout {
        let rng = PositionRng::new(self.seed, Purpose::Dropout, &self.name).with_stream(block.step);
        let key = DropoutKey::new(rng, &[block.global_batch, self.num_heads, seq, seq])
            .with_offset(0, block.first_sample)
            .with_offset(1, self.first_head + head);
        AttentionDropout::new(self.prob, key)
    }
}
