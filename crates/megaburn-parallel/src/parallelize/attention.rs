use burn::{
    module::Module,
    nn::{
        Dropout,
        attention::{MhaOutput, MultiHeadAttention},
    },
    tensor::{
        Bool, Tensor,
        activation::{quiet_softmax, softmax},
    },
};

use super::Layers;
use crate::{
    linear::ParallelLinear,
    shards::{PlanBuilder, Sharded},
};

/// Burn's `MultiHeadAttention` with the same parameters, which
/// [`ParallelPlan::attention`](super::ParallelPlan::attention) splits by heads.
///
/// A field of Burn's type becomes one of this type, built with `.into()`, and `MhaInput` becomes
/// [`ParallelMhaInput`]. There is no `forward_cache`. Each rank drops probabilities of its own
/// heads, so [`parallelize`](super::parallelize) refuses an attention with dropout that no pattern
/// splits.
///
/// # Collective
/// Split by heads, forward has one all-reduce, of the output, and backward one for each of the
/// layers of queries, keys and values.
#[derive(Module, Debug)]
pub struct ParallelMultiHeadAttention {
    /// The layer of the queries.
    pub query: ParallelLinear,
    /// The layer of the keys.
    pub key: ParallelLinear,
    /// The layer of the values.
    pub value: ParallelLinear,
    /// The layer of the output.
    pub output: ParallelLinear,
    /// Drops probabilities of this rank's heads.
    pub dropout: Dropout,
    /// Features of a head.
    pub d_k: usize,
    /// The value of a masked score.
    pub min_float: f64,
    /// Whether all probabilities of a query may be near zero.
    pub quiet_softmax: bool,
}

impl From<MultiHeadAttention> for ParallelMultiHeadAttention {
    fn from(layer: MultiHeadAttention) -> Self {
        Self {
            query: layer.query.into(),
            key: layer.key.into(),
            value: layer.value.into(),
            output: layer.output.into(),
            dropout: layer.dropout,
            d_k: layer.d_k,
            min_float: layer.min_float,
            quiet_softmax: layer.quiet_softmax,
        }
    }
}

/// The input of an attention, as Burn's `MhaInput`, of which no other crate can read the fields.
#[derive(Clone, Debug)]
pub struct ParallelMhaInput {
    query: Tensor<3>,
    key: Tensor<3>,
    value: Tensor<3>,
    mask_pad: Option<Tensor<2, Bool>>,
    mask_attn: Option<Tensor<3, Bool>>,
}

impl ParallelMhaInput {
    /// Attention of a sequence to itself.
    ///
    /// # Shapes
    /// `[batch, seq, d_model]`
    pub fn self_attn(x: Tensor<3>) -> Self {
        Self::new(x.clone(), x.clone(), x)
    }

    /// Attention of queries to keys and values.
    ///
    /// # Shapes
    /// - query: `[batch, seq, d_model]`
    /// - key, value: `[batch, keys, d_model]`
    pub fn new(query: Tensor<3>, key: Tensor<3>, value: Tensor<3>) -> Self {
        Self {
            query,
            key,
            value,
            mask_pad: None,
            mask_attn: None,
        }
    }

    /// Masks keys.
    ///
    /// # Shapes
    /// `[batch, keys]`
    #[must_use]
    pub fn mask_pad(mut self, mask: Tensor<2, Bool>) -> Self {
        self.mask_pad = Some(mask);
        self
    }

    /// Masks pairs of queries and keys.
    ///
    /// # Shapes
    /// `[batch, seq, keys]`
    #[must_use]
    pub fn mask_attn(mut self, mask: Tensor<3, Bool>) -> Self {
        self.mask_attn = Some(mask);
        self
    }
}

impl ParallelMultiHeadAttention {
    /// As Burn's `MultiHeadAttention::forward`.
    ///
    /// # Shapes
    /// - `context`: `[batch, seq, d_model]`
    /// - `weights`: `[batch, heads, seq, keys]`, of this rank's heads
    pub fn forward(&self, input: ParallelMhaInput) -> MhaOutput {
        let query = self.heads(self.query.forward(input.query));
        let key = self.heads(self.key.forward(input.key));
        let value = self.heads(self.value.forward(input.value));
        let scores = query.matmul(key.transpose());
        let mut scores = scores.div_scalar((self.d_k as f32).sqrt());
        if let Some(mask) = input.mask_pad {
            let [batch, keys] = mask.dims();
            scores = scores.mask_fill(mask.reshape([batch, 1, 1, keys]), self.min_float);
        }
        if let Some(mask) = input.mask_attn {
            let [batch, seq, keys] = mask.dims();
            scores = scores.mask_fill(mask.reshape([batch, 1, seq, keys]), self.min_float);
        }
        let weights = if self.quiet_softmax {
            quiet_softmax(scores, 3)
        } else {
            softmax(scores, 3)
        };
        let weights = self.dropout.forward(weights);
        let context = weights.clone().matmul(value).swap_dims(1, 2);
        let [batch, seq, heads, features] = context.dims();
        let context = context.reshape([batch, seq, heads * features]);
        MhaOutput {
            weights,
            context: self.output.forward(context),
        }
    }

    /// `[batch, seq, heads * features]` to `[batch, heads, seq, features]`, of this rank's heads.
    fn heads(&self, x: Tensor<3>) -> Tensor<4> {
        let [batch, seq, width] = x.dims();
        x.reshape([batch, seq, width / self.d_k, self.d_k])
            .swap_dims(1, 2)
    }
}

impl Sharded for ParallelMultiHeadAttention {
    fn shards(&self, plan: &mut PlanBuilder) {
        plan.child("query", &self.query);
        plan.child("key", &self.key);
        plan.child("value", &self.value);
        plan.child("output", &self.output);
        if !self.query.has_split_output() {
            plan.dropout(
                "dropout",
                self.dropout.prob,
                "split the heads with `ParallelPlan::attention`, or build the attention with dropout 0",
            );
        }
    }

    fn parallelize(&mut self, layers: &mut Layers<'_>) {
        layers.child("query", &mut self.query);
        layers.child("key", &mut self.key);
        layers.child("value", &mut self.value);
        layers.child("output", &mut self.output);
    }
}
