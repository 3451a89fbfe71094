use burn::{module::Module, tensor::Tensor};
use megaburn_parallel::{
    Attention, BatchContext, ContextParallel, KvCache, Mlp, Moe, Norm, Packed, ParallelDropout,
    PlanBuilder, Recomputable, Residual, Sharded, recomputed,
};

use super::{
    BlockOrder, Mtp, NormPlacement,
    builder::ModelBuilder,
    recompute_options::BlockRecompute,
    rotary::{BlockRope, Ropes},
};
use crate::error::ModelError;

/// One transformer block: attention, and an MLP or experts. Each reads a norm of the residual
/// stream, or has a norm of its output, and is added to the stream; or the sum has a norm.
#[derive(Module, Debug)]
pub struct Block {
    /// The norm before the attention; `None` if only outputs are normalised.
    pub attention_norm: Option<Norm>,
    /// The attention.
    pub attention: Attention,
    /// The norm of the output of the attention, or of the residual stream after it.
    pub attention_output_norm: Option<Norm>,
    /// The norm before the MLP; `None` if only outputs are normalised, or if the MLP reads what the
    /// attention reads.
    pub mlp_norm: Option<Norm>,
    /// The norm of the output of the MLP or the experts, or of the residual stream after it.
    pub mlp_output_norm: Option<Norm>,
    /// The MLP; `None` if the block has experts.
    pub mlp: Option<Mlp>,
    /// The experts; `None` if the block has an MLP.
    pub moe: Option<Moe>,
    /// The layers around the block, if it is a block of multi-token prediction.
    pub mtp: Option<Mtp>,
    attention_dropout: ParallelDropout,
    mlp_dropout: ParallelDropout,
    recompute_mlp: bool,
    /// Factor of the outputs of attention and MLP.
    multiplier: f64,
    #[module(skip)]
    placement: NormPlacement,
    #[module(skip)]
    order: BlockOrder,
    #[module(skip)]
    rope: BlockRope,
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
        let placement = config.norm_placement;
        let order = config.block_order;
        let input_norm = |recompute| placement.has_input_norms().then(|| build.norm(recompute));
        let output_norm = || placement.has_output_norms().then(|| build.norm(false));
        let has_mlp_norm = order != BlockOrder::ParallelSharedNorm;
        Ok(Self {
            attention_norm: input_norm(recompute.attention_norm),
            attention_output_norm: output_norm(),
            attention: build.attention(index, cp, recompute.core_attention)?,
            mlp_norm: has_mlp_norm.then(|| input_norm(recompute.norm)).flatten(),
            mlp_output_norm: output_norm(),
            mlp,
            moe,
            mtp,
            attention_dropout: build.dropout(&format!("blocks.{index}.attention"))?,
            mlp_dropout: build.dropout(&format!("blocks.{index}.mlp"))?,
            recompute_mlp: recompute.mlp,
            multiplier: config.multipliers.residual,
            placement,
            order,
            rope: config.block_rope(index),
        })
    }

    /// Applies the block: `h = x + attention(norm(x))`, then `h + mlp(norm(h))`; or in parallel,
    /// `x + attention(norm(x)) + mlp(norm(x))`. [`NormPlacement`] says where else norms can be.
    ///
    /// # Shapes
    /// `[S, B, H]`, unchanged (with sequence parallelism `[S / n, B, H]`); `ropes` are of `S` tokens
    pub(super) fn forward(&self, x: Residual, ropes: &Ropes, batch: &BatchContext) -> Residual {
        let rope = ropes.of(self.rope);
        self.applied(x, batch, |x| {
            let y = self.attention.forward_in(x, rope, batch);
            self.attention_dropout.forward(y, batch.block)
        })
    }

    /// Applies the block to the next tokens of several sequences.
    ///
    /// # Shapes
    /// `[T, 1, H]`, unchanged: the tokens of `packed`
    pub(super) fn forward_cached(
        &self,
        x: Residual,
        ropes: &Ropes,
        packed: &Packed,
        cache: &mut KvCache,
    ) -> Residual {
        let rope = ropes.of(self.rope);
        self.applied(x, &BatchContext::default(), |x| {
            self.attention.forward_cached(x, rope, packed, cache)
        })
    }

    /// Applies the block, whose attention is `attend`.
    fn applied(
        &self,
        mut x: Residual,
        batch: &BatchContext,
        attend: impl FnOnce(Recomputable<3>) -> Tensor<3>,
    ) -> Residual {
        let input = input_of(&x, self.attention_norm.as_ref());
        match self.order {
            BlockOrder::Serial => {
                x = self.joined(x, attend(input), self.attention_output_norm.as_ref());
                let input = input_of(&x, self.mlp_norm.as_ref());
                let fed = self.feed_forward(input, batch);
                x = self.joined(x, fed, self.mlp_output_norm.as_ref());
            }
            BlockOrder::Parallel | BlockOrder::ParallelSharedNorm => {
                let of_mlp = if self.order == BlockOrder::ParallelSharedNorm {
                    input.clone()
                } else {
                    input_of(&x, self.mlp_norm.as_ref())
                };
                let attended = self.added(attend(input), self.attention_output_norm.as_ref());
                let fed = self.feed_forward(of_mlp, batch);
                x += attended + self.added(fed, self.mlp_output_norm.as_ref());
            }
        }
        x
    }

    /// The residual stream after the output `y` of the attention or the MLP.
    fn joined(&self, mut x: Residual, y: Tensor<3>, norm: Option<&Norm>) -> Residual {
        match (self.placement, norm) {
            (NormPlacement::Post, Some(norm)) => {
                x += self.added(y, None);
                x.normed(norm).into_tensor().into()
            }
            (_, norm) => {
                x += self.added(y, norm);
                x
            }
        }
    }

    /// What the output `y` of the attention or the MLP adds to the residual stream.
    fn added(&self, y: Tensor<3>, norm: Option<&Norm>) -> Tensor<3> {
        let y = match norm {
            Some(norm) => norm.forward(y),
            None => y,
        };
        if self.multiplier == 1.0 {
            y
        } else {
            y * self.multiplier
        }
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
            attention_norm: self.attention_norm.map(Norm::whole_sequence),
            attention: self.attention.whole_sequence(),
            attention_output_norm: self.attention_output_norm.map(Norm::whole_sequence),
            mlp_norm: self.mlp_norm.map(Norm::whole_sequence),
            mlp_output_norm: self.mlp_output_norm.map(Norm::whole_sequence),
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
        plan.child("attention_output_norm", &self.attention_output_norm);
        plan.child("mlp_norm", &self.mlp_norm);
        plan.child("mlp", &self.mlp);
        plan.child("moe", &self.moe);
        plan.child("mlp_output_norm", &self.mlp_output_norm);
        plan.child("mtp", &self.mtp);
    }
}

/// Returns the input of attention or MLP: the norm of the residual stream, or the stream itself.
fn input_of(x: &Residual, norm: Option<&Norm>) -> Recomputable<3> {
    match norm {
        Some(norm) => x.normed(norm),
        None => x.value().into(),
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
