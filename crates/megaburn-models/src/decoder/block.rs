use burn::{module::Module, tensor::Tensor};
use megaburn_kernels::RopeTable;
use megaburn_parallel::{
    Attention, BatchContext, ContextParallel, KvCache, Mlp, Moe, Norm, Packed, ParallelDropout,
    PlanBuilder, Recomputable, Residual, Sharded, recomputed,
};

use super::{Mtp, builder::ModelBuilder, recompute_options::BlockRecompute};
use crate::error::ModelError;

/// One transformer block: attention, and an MLP or experts. Each is preceded by a norm, and its
/// output is added to the residual stream.
#[derive(Module, Debug)]
pub struct Block {
    /// The norm before the attention.
    pub attention_norm: Norm,
    /// The attention.
    pub attention: Attention,
    /// The norm before the MLP.
    pub mlp_norm: Norm,
    /// The MLP; `None` if the block has experts.
    pub mlp: Option<Mlp>,
    /// The experts; `None` if the block has an MLP.
    pub moe: Option<Moe>,
    /// The layers around the block, if it is a block of multi-token prediction.
    pub mtp: Option<Mtp>,
    attention_dropout: ParallelDropout,
    mlp_dropout: ParallelDropout,
    recompute_mlp: bool,
}

impl Block {
    /// Creates block `index`.
    pub(super) fn new(
        build: &ModelBuilder<'_>,
        index: usize,
        cp: &ContextParallel,
        recompute: BlockRecompute,
    ) -> Result<Self, ModelError> {
        let config = build.config;
        let activation = recompute.activation;
        let (mlp, moe) = match config.layer_experts(index) {
            None => (Some(build.mlp(index, activation)?), None),
            Some(experts) => (None, Some(build.moe(experts, index, activation)?)),
        };
        let mtp = (index >= config.layers)
            .then(|| Mtp::new(build, index, recompute.norm))
            .transpose()?;
        Ok(Self {
            attention_norm: build.norm(recompute.attention_norm),
            attention: build.attention(index, cp, recompute.core_attention)?,
            mlp_norm: build.norm(recompute.norm),
            mlp,
            moe,
            mtp,
            attention_dropout: build.dropout(&format!("blocks.{index}.attention"))?,
            mlp_dropout: build.dropout(&format!("blocks.{index}.mlp"))?,
            recompute_mlp: recompute.mlp,
        })
    }

    /// Applies the block: `h = x + attention(norm(x))`, then `h + mlp(norm(h))`.
    ///
    /// # Shapes
    /// `[S, B, H]`, unchanged (with sequence parallelism `[S / n, B, H]`); `rope` is of `S` tokens
    pub(super) fn forward(
        &self,
        mut x: Residual,
        rope: Option<&RopeTable>,
        batch: &BatchContext,
    ) -> Residual {
        x += self.attend(x.normed(&self.attention_norm), rope, batch);
        x += self.feed_forward(x.normed(&self.mlp_norm), batch);
        x
    }

    /// Applies the block to the next tokens of several sequences.
    ///
    /// # Shapes
    /// `[T, 1, H]`, unchanged: the tokens of `packed`
    pub(super) fn forward_cached(
        &self,
        mut x: Residual,
        rope: Option<&RopeTable>,
        packed: &Packed,
        cache: &mut KvCache,
    ) -> Residual {
        let normed = x.normed(&self.attention_norm);
        x += self.attention.forward_cached(normed, rope, packed, cache);
        x += self.feed_forward(x.normed(&self.mlp_norm), &BatchContext::default());
        x
    }

    /// The attention, and its dropout in training.
    fn attend(
        &self,
        x: Recomputable<3>,
        rope: Option<&RopeTable>,
        batch: &BatchContext,
    ) -> Tensor<3> {
        let y = self.attention.forward_in(x, rope, batch);
        self.attention_dropout.forward(y, batch.block)
    }

    /// The MLP or the experts, recomputed if so configured, and the dropout in training.
    fn feed_forward(&self, x: Recomputable<3>, batch: &BatchContext) -> Tensor<3> {
        let recompute = self.recompute_mlp;
        let y = match (&self.mlp, &self.moe) {
            (Some(mlp), _) => maybe_recomputed(recompute, mlp, x, |mlp, x| mlp.forward(x)),
            (None, Some(moe)) => {
                let batch = batch.clone();
                maybe_recomputed(recompute, moe, x, move |moe, x| moe.forward(x, &batch))
            }
            (None, None) => unreachable!("a block has either an MLP or experts"),
        };
        self.mlp_dropout.forward(y, batch.block)
    }

    /// The same block and weights for generation, without sequence parallelism and multi-token
    /// prediction.
    pub(super) fn whole_sequence(self) -> Self {
        Self {
            attention_norm: self.attention_norm.whole_sequence(),
            attention: self.attention.whole_sequence(),
            mlp_norm: self.mlp_norm.whole_sequence(),
            mlp: self.mlp.map(Mlp::whole_sequence),
            moe: self.moe.map(Moe::whole_sequence),
            mtp: None,
            ..self
        }
    }
}

impl Sharded for Block {
    fn shards(&self, plan: &mut PlanBuilder) {
        plan.child("attention_norm", &self.attention_norm);
        plan.child("attention", &self.attention);
        plan.child("mlp_norm", &self.mlp_norm);
        plan.child("mlp", &self.mlp);
        plan.child("moe", &self.moe);
        plan.child("mtp", &self.mtp);
    }
}

/// Applies `layer`. With `recompute` only its input is saved, and backward applies it again.
fn maybe_recomputed<M: Module + 'static>(
    recompute: bool,
    layer: &M,
    x: Recomputable<3>,
    forward: impl Fn(&M, Recomputable<3>) -> Tensor<3> + Send + Sync + 'static,
) -> Tensor<3> {
    if !recompute {
        return forward(layer, x);
    }
    let [y] = recomputed(layer, [x], move |layer, [x]| [forward(layer, x.into())]);
    y
}
