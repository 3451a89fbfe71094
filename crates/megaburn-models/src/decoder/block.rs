use burn::{module::Module, tensor::Tensor};
use megaburn_kernels::FoundAmax;
use megaburn_parallel::{
    Attention, BatchContext, ContextParallel, CrossAttention, CurrentTokens, Mlp, Moe, Norm,
    Packed, ParallelDropout, PositionTables, Recomputable, Residual, Sharded, recomputed,
};

use super::{
    BlockOrder, Mtp, NormPlacement,
    block_inputs::{BlockCache, BlockInputs},
    builder::ModelBuilder,
    recompute_options::BlockRecompute,
    rotary::BlockRope,
};
use crate::error::ModelError;

/// One transformer block: attention, and an MLP or experts. Each reads a norm of the residual
/// stream, or has a norm of its output, and is added to the stream; or the sum has a norm.
#[derive(Module, Sharded, Debug)]
pub struct Block {
    /// The norm before the attention; `None` if only outputs are normalised.
    pub attention_norm: Option<Norm>,
    /// The attention.
    pub attention: Attention,
    /// The norm of the output of the attention, or of the residual stream after it.
    pub attention_output_norm: Option<Norm>,
    /// The norm before the cross attention; `None` without it, or if only outputs are normalised.
    pub cross_attention_norm: Option<Norm>,
    /// The attention to the output of the encoder, in blocks of a decoder that follows one.
    pub cross_attention: Option<CrossAttention>,
    /// The norm of the output of the cross attention, or of the residual stream after it.
    pub cross_attention_output_norm: Option<Norm>,
    /// The norm before the MLP; `None` if only outputs are normalised, or if the MLP reads what the
    /// attention reads.
    pub mlp_norm: Option<Norm>,
    /// The norm of the output of the MLP or the experts, or of the residual stream after it.
    pub mlp_output_norm: Option<Norm>,
    /// The MLP; `None` if the block has experts.
    pub mlp: Option<Mlp>,
    /// The experts; `None` if the block has an MLP.
    pub moe: Option<Moe>,
    /// The norm of the residual stream after the last block of an encoder that a decoder reads.
    pub encoder_norm: Option<Norm>,
    /// The layers around the block, if it is a block of multi-token prediction.
    pub mtp: Option<Mtp>,
    attention_dropout: ParallelDropout,
    cross_attention_dropout: ParallelDropout,
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
    #[module(skip)]
    current: CurrentTokens,
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
        let crosses = config.attends_to_encoder(index);
        let ends_encoder = config.ends_encoder(index) && placement.has_last_norm();
        let has_mlp_norm = order != BlockOrder::ParallelSharedNorm;
        Ok(Self {
            attention_norm: input_norm(recompute.attention_norm),
            attention_output_norm: output_norm(),
            attention: build.attention(index, cp, recompute.core_attention)?,
            cross_attention_norm: crosses.then(|| input_norm(recompute.norm)).flatten(),
            cross_attention: crosses
                .then(|| build.cross_attention(index, recompute.core_attention))
                .transpose()?,
            cross_attention_output_norm: crosses.then(output_norm).flatten(),
            mlp_norm: has_mlp_norm.then(|| input_norm(recompute.norm)).flatten(),
            mlp_output_norm: output_norm(),
            mlp,
            moe,
            encoder_norm: ends_encoder.then(|| build.norm(false)),
            mtp,
            attention_dropout: build.dropout(&format!("blocks.{index}.attention"))?,
            cross_attention_dropout: build.dropout(&format!("blocks.{index}.cross_attention"))?,
            mlp_dropout: build.dropout(&format!("blocks.{index}.mlp"))?,
            recompute_mlp: recompute.mlp,
            multiplier: config.multipliers.residual,
            placement,
            order,
            rope: config.block_rope(index),
            current: build.scope.current.clone(),
        })
    }

    /// Applies the block: `h = x + attention(norm(x))`, then `h + mlp(norm(h))`; or in parallel,
    /// `x + attention(norm(x)) + mlp(norm(x))`. [`NormPlacement`] says where else norms can be. In a
    /// decoder that follows an encoder, cross attention is between attention and MLP.
    ///
    /// # Shapes
    /// `[S, B, H]`, unchanged (with sequence parallelism `[S / n, B, H]`); the tables are of `S`
    /// tokens
    pub(super) fn forward(&self, x: Residual, inputs: BlockInputs<'_>) -> Residual {
        let batch = inputs.batch;
        self.current.set(batch.block);
        let attend = |x| {
            let y = self.attention.forward_in(x, self.tables(inputs), batch);
            self.attention_dropout.forward(y, batch.block)
        };
        let cross = |layer: &CrossAttention, x| {
            let memory = inputs
                .memory
                .expect("the blocks of a decoder are given the memory");
            let y = layer.forward(x, memory.clone(), batch);
            self.cross_attention_dropout.forward(y, batch.block)
        };
        self.applied(x, batch, attend, cross)
    }

    /// The positions of the tokens, as this block's attention needs them.
    fn tables<'a>(&self, inputs: BlockInputs<'a>) -> PositionTables<'a> {
        PositionTables {
            relative: inputs.bias,
            ..inputs.ropes.of(self.rope)
        }
    }

    /// Applies the block to the next tokens of several sequences.
    ///
    /// # Shapes
    /// `[T, 1, H]`, unchanged: the tokens of `packed`
    pub(super) fn forward_cached(
        &self,
        x: Residual,
        inputs: BlockInputs<'_>,
        packed: &Packed,
        cache: &mut BlockCache,
    ) -> Residual {
        let attend = |x| {
            self.attention
                .forward_cached(x, self.tables(inputs), packed, &mut cache.own)
        };
        let cross = |layer: &CrossAttention, x| layer.forward_cached(x, packed, &cache.memory);
        self.applied(x, inputs.batch, attend, cross)
    }

    /// Applies the block, whose attentions are `attend` and `cross`.
    fn applied(
        &self,
        mut x: Residual,
        batch: &BatchContext,
        attend: impl FnOnce(Recomputable<3>) -> Tensor<3>,
        cross: impl FnOnce(&CrossAttention, Recomputable<3>) -> Tensor<3>,
    ) -> Residual {
        let finds_amax = self.attention.needs_input_amax();
        let input = input_of(&x, self.attention_norm.as_ref(), finds_amax);
        match self.order {
            BlockOrder::Serial => {
                let amax = self.amax_of_attention();
                let attended = attend(input.with_gradient_amax(amax.clone()));
                x = self.joined(x, attended, self.attention_output_norm.as_ref(), amax);
                if let Some(layer) = &self.cross_attention {
                    let input = input_of(&x, self.cross_attention_norm.as_ref(), false);
                    let norm = self.cross_attention_output_norm.as_ref();
                    x = self.joined(x, cross(layer, input), norm, None);
                }
                let input = input_of(&x, self.mlp_norm.as_ref(), self.mlp_needs_input_amax());
                let amax = self.amax_of_mlp();
                let fed = self.feed_forward(input.with_gradient_amax(amax.clone()), batch);
                x = self.joined(x, fed, self.mlp_output_norm.as_ref(), amax);
            }
            BlockOrder::Parallel | BlockOrder::ParallelSharedNorm => {
                let of_mlp = if self.order == BlockOrder::ParallelSharedNorm {
                    input.clone()
                } else {
                    input_of(&x, self.mlp_norm.as_ref(), self.mlp_needs_input_amax())
                };
                let attended = self.added(attend(input), self.attention_output_norm.as_ref());
                let fed = self.feed_forward(of_mlp, batch);
                x += attended + self.added(fed, self.mlp_output_norm.as_ref());
            }
        }
        match &self.encoder_norm {
            Some(norm) => x.normed(norm).into_tensor().into(),
            None => x,
        }
    }

    /// Whether the norm before the MLP can find the largest magnitude that the MLP needs. A recomputed
    /// MLP finds it by itself, twice.
    fn mlp_needs_input_amax(&self) -> bool {
        let mlp = self.mlp.as_ref().filter(|_| !self.recompute_mlp);
        mlp.is_some_and(Mlp::needs_input_amax)
    }

    /// Where the norm after the attention puts the largest magnitude of the gradient of the attention's
    /// output, if it finds it.
    fn amax_of_attention(&self) -> Option<FoundAmax> {
        let needs = self.attention.needs_gradient_amax();
        self.amax_of_output(needs, &self.attention_dropout, &self.attention_output_norm)
    }

    /// As [`amax_of_attention`](Self::amax_of_attention), of the MLP.
    fn amax_of_mlp(&self) -> Option<FoundAmax> {
        let mlp = self.mlp.as_ref().filter(|_| !self.recompute_mlp);
        let needs = mlp.is_some_and(Mlp::needs_gradient_amax);
        self.amax_of_output(needs, &self.mlp_dropout, &self.mlp_output_norm)
    }

    /// Where the norm that adds an output to the residual stream puts the largest magnitude of its
    /// gradient: only if nothing changes the output before.
    fn amax_of_output(
        &self,
        needs: bool,
        dropout: &ParallelDropout,
        norm: &Option<Norm>,
    ) -> Option<FoundAmax> {
        let is_unchanged = norm.is_none() && !dropout.drops() && self.multiplier == 1.0;
        (needs && is_unchanged).then(FoundAmax::default)
    }

    /// The residual stream after the output `y` of the attention or the MLP. The next norm puts the
    /// largest magnitude of its gradient into `amax`.
    fn joined(
        &self,
        mut x: Residual,
        y: Tensor<3>,
        norm: Option<&Norm>,
        amax: Option<FoundAmax>,
    ) -> Residual {
        match (self.placement, norm) {
            (NormPlacement::Post, Some(norm)) => {
                x += self.added(y, None);
                x.normed(norm).into_tensor().into()
            }
            (_, norm) => {
                x.add_observed(self.added(y, norm), amax);
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
        let (block, current) = (batch.block, self.current.clone());
        let y = match (&self.mlp, &self.moe) {
            (Some(mlp), _) => maybe_recomputed(recompute, mlp, x, move |mlp, x| {
                current.set(block);
                mlp.forward(x)
            }),
            (None, Some(moe)) => {
                let batch = batch.clone();
                maybe_recomputed(recompute, moe, x, move |moe, x| {
                    current.set(block);
                    moe.forward(x, &batch)
                })
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
            cross_attention_norm: self.cross_attention_norm.map(Norm::whole_sequence),
            cross_attention: self.cross_attention.map(CrossAttention::whole_sequence),
            cross_attention_output_norm: self.cross_attention_output_norm.map(Norm::whole_sequence),
            mlp_norm: self.mlp_norm.map(Norm::whole_sequence),
            mlp_output_norm: self.mlp_output_norm.map(Norm::whole_sequence),
            mlp: self.mlp.map(Mlp::whole_sequence),
            moe: self.moe.map(Moe::whole_sequence),
            encoder_norm: self.encoder_norm.map(Norm::whole_sequence),
            mtp: None,
            ..self
        }
    }
}

/// Returns the input of attention or MLP: the norm of the residual stream, or the stream itself. With
/// `finds_amax` a norm finds its largest magnitude.
fn input_of(x: &Residual, norm: Option<&Norm>, finds_amax: bool) -> Recomputable<3> {
    match norm {
        Some(norm) => x.normed_observed(norm, finds_amax),
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
