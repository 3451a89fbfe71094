use burn::{module::Module, tensor::Tensor};
use megaburn_kernels::{AttentionDropout, AttentionOptions, DropoutKey, attention};
use megaburn_mesh::{PositionRng, Purpose};

use crate::{Input, TokenBlock, recomputed};

/// What is between the matrices, and has no parameters.
#[derive(Module, Debug)]
pub(super) struct CoreAttention {
    pub(super) window: Option<usize>,
    pub(super) recompute: bool,
    #[module(skip)]
    pub(super) dropout: Option<Dropout>,
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
    /// `[seq, batch, heads, head_dim]` each to `[seq, batch, heads * head_dim]`; in training of these
    /// tokens some probabilities are dropped.
    pub(super) fn forward(
        &self,
        queries_keys_values: [Tensor<4>; 3],
        tokens: Option<&TokenBlock>,
    ) -> Tensor<3> {
        let device = queries_keys_values[0].device();
        let tokens = tokens.copied().filter(|_| device.is_autodiff());
        if !self.recompute {
            return self.at(0, queries_keys_values, tokens);
        }
        let inputs = queries_keys_values.map(Input::from);
        let [attended] = recomputed(self, inputs, move |core, inputs| [core.at(0, inputs, tokens)]);
        attended
    }

    /// Of queries from a position on, of those that keys and values have.
    pub(super) fn at(
        &self,
        query_offset: usize,
        [q, k, v]: [Tensor<4>; 3],
        tokens: Option<TokenBlock>,
    ) -> Tensor<3> {
        let seq = k.dims()[0];
        let dropout = self.dropout.as_ref().zip(tokens);
        let options = AttentionOptions {
            window: self.window,
            query_offset,
            dropout: dropout.map(|(dropout, tokens)| dropout.of(tokens, seq)),
            ..AttentionOptions::causal()
        };
        attention(q, k, v, options)
    }
}

impl Dropout {
    fn of(&self, tokens: TokenBlock, seq: usize) -> AttentionDropout {
        let rng =
            PositionRng::new(self.seed, Purpose::Dropout, &self.name).with_stream(tokens.step);
        let key = DropoutKey::new(rng, &[tokens.global_batch, self.num_heads, seq, seq])
            .with_offset(0, tokens.first_sample)
            .with_offset(1, self.first_head);
        AttentionDropout::new(self.prob, key)
    }
}
