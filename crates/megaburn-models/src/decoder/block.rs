use burn::{module::Module, nn::Initializer, prelude::Device, tensor::Tensor};
use megaburn_collective::Group;
use megaburn_kernels::RopeTable;
use megaburn_mesh::Zigzag;
use megaburn_parallel::{
    ContextParallel, ExpertGroups, KvCache, Mlp, MlpConfig, Moe, Norm, NormConfig, Packed,
    ParallelDropout, PlanBuilder, Recomputable, Residual, Sharded, TokenContext, recomputed,
};

use super::{DecoderAttention, Dropout, Experts, Mtp, Recompute};
use crate::{DecoderConfig, ModelError};

/// One transformer block: attention, and an MLP or experts. Each is preceded by a norm, and its
/// output is added to the residual stream.
#[derive(Module, Debug)]
pub struct Block {
    /// The norm before the attention.
    pub attention_norm: Norm,
    /// The attention.
    pub attention: DecoderAttention,
    /// The norm before the MLP.
    pub mlp_norm: Norm,
    /// The MLP; `None` if the block has experts.
    pub mlp: Option<Mlp>,
    /// The experts; `None` if the block has an MLP.
    pub moe: Option<Moe>,
    /// The layers around the block, if it is a block of multi-token prediction.
    pub mtp: Option<Mtp>,
    /// Dropout on the outputs of attention and MLP.
    dropouts: Option<[ParallelDropout; 2]>,
    recompute_mlp: bool,
}

pub(super) fn norm(
    config: &DecoderConfig,
    group: &Group,
    sequence_parallel: bool,
    device: &Device,
) -> Norm {
    NormConfig::new(config.hidden, config.norm)
        .with_epsilon(config.norm_eps)
        .with_sequence_parallel(sequence_parallel)
        .init(group, device)
}

impl Block {
    /// Creates block `index`.
    pub(super) fn new(
        config: &DecoderConfig,
        index: usize,
        groups: &ExpertGroups,
        sequence_parallel: bool,
        device: &Device,
    ) -> Result<Self, ModelError> {
        let group = &groups.tp;
        let DecoderConfig {
            hidden,
            ffn,
            layers,
            ..
        } = *config;
        let into_stream = Initializer::Normal {
            mean: 0.0,
            std: 0.02 / (2.0 * layers as f64).sqrt(),
        };
        let attention = DecoderAttention::new(
            config,
            index,
            group,
            sequence_parallel,
            into_stream.clone(),
            device,
        )?;
        let mlp = || {
            MlpConfig::new(hidden, ffn)
                .with_activation(config.activation)
                .with_bias(config.mlp_bias)
                .with_sequence_parallel(sequence_parallel)
                .with_output_initializer(into_stream.clone())
                .with_name(format!("blocks.{index}.mlp"))
                .init(group, device)
        };
        let moe = |experts: &Experts| {
            let moe = experts
                .layer(hidden)
                .with_activation(config.activation)
                .with_sequence_parallel(sequence_parallel)
                .with_output_initializer(into_stream.clone())
                .with_name(format!("blocks.{index}.moe"));
            Experts::init(&moe, groups, device)
        };
        let experts = config.layer_experts(index);
        Ok(Self {
            attention_norm: norm(config, group, sequence_parallel, device),
            attention,
            mlp_norm: norm(config, group, sequence_parallel, device),
            mlp: experts.is_none().then(mlp).transpose()?,
            moe: experts.map(moe).transpose()?,
            mtp: (index >= layers)
                .then(|| Mtp::new(config, index, groups, sequence_parallel, device))
                .transpose()?,
            dropouts: None,
            recompute_mlp: false,
        })
    }

    /// Sets the dropout of the block with number `index`.
    pub(super) fn with_dropout(
        self,
        dropout: Dropout,
        index: usize,
        group: &Group,
        (sequence_parallel, zigzag): (bool, Zigzag),
    ) -> Result<Self, ModelError> {
        let name = format!("blocks.{index}.attention");
        let layer = |of: &str| {
            let path = format!("blocks.{index}.{of}");
            let layer = dropout.layer(&path, group, sequence_parallel);
            layer.map(|layer| layer.with_context(zigzag))
        };
        let of_mtp =
            |mtp: Mtp| mtp.with_dropout(dropout, index, group, (sequence_parallel, zigzag));
        Ok(Self {
            attention: self
                .attention
                .with_dropout(dropout.attention, &name, group)?,
            mtp: self.mtp.map(of_mtp).transpose()?,
            dropouts: Some([layer("attention")?, layer("mlp")?]),
            ..self
        })
    }

    /// Enables context parallelism for the block with number `index`.
    pub(super) fn with_context_parallel(
        self,
        parallel: &ContextParallel,
        index: usize,
    ) -> Result<Self, ModelError> {
        let name = format!("blocks.{index}.attention");
        let dropouts = self
            .dropouts
            .map(|both| both.map(|of| of.with_context(parallel.zigzag())));
        let attention = self.attention.with_context_parallel(parallel, &name)?;
        let mtp = self.mtp.map(|mtp| mtp.with_context(parallel.zigzag()));
        Ok(Self {
            attention,
            mtp,
            dropouts,
            ..self
        })
    }

    /// Sets which activations of the block backward recomputes.
    pub(super) fn with_recompute(self, recompute: Recompute) -> Self {
        Self {
            attention_norm: self.attention_norm.with_recompute(recompute.norm),
            attention: self.attention.with_recompute(recompute.core_attention),
            mlp_norm: self.mlp_norm.with_recompute(recompute.norm),
            mlp: self
                .mlp
                .map(|mlp| mlp.with_recompute(recompute.activation && !recompute.mlp)),
            moe: self
                .moe
                .map(|moe| moe.with_recompute(recompute.activation && !recompute.mlp)),
            mtp: self.mtp.map(|mtp| mtp.with_recompute(recompute)),
            recompute_mlp: recompute.mlp,
            ..self
        }
    }

    /// Prepares a block of a checkpointed group; `is_first` says whether it is the first one of the
    /// group.
    pub(super) fn into_checkpoint_member(self, is_first: bool) -> Self {
        // The norm of the first block is outside the checkpointed function: it saves the residual
        // stream, which is the only tensor that the group saves.
        let plain = self.with_recompute(Recompute::default());
        Self {
            attention_norm: plain.attention_norm.with_recompute(is_first),
            ..plain
        }
    }

    /// Applies the block.
    ///
    /// # Shapes
    /// `[S, B, H]`, unchanged (with sequence parallelism `[S / n, B, H]`); `context` is of `S`
    /// tokens
    pub(super) fn forward(&self, x: Residual, context: &TokenContext) -> Residual {
        let (normed, x) = x.normed(&self.attention_norm);
        self.forward_after_norm(normed, x, context)
    }

    /// Applies the block to the output of its first norm, and the residual stream `x` before that
    /// norm.
    pub(super) fn forward_after_norm(
        &self,
        normed: impl Into<Recomputable<3>>,
        x: Residual,
        context: &TokenContext,
    ) -> Residual {
        let dropped = |part: usize, y: Tensor<3>| match (&self.dropouts, &context.block) {
            (Some(dropouts), Some(block)) => dropouts[part].forward(y, block),
            _ => y,
        };
        let x = x + dropped(0, self.attention.forward_in(normed, context));
        let (normed, x) = x.normed(&self.mlp_norm);
        x + dropped(1, self.feed_forward(normed, context))
    }

    fn feed_forward(&self, normed: Recomputable<3>, context: &TokenContext) -> Tensor<3> {
        let again = self.recompute_mlp;
        match (&self.mlp, &self.moe) {
            (Some(mlp), _) if again => {
                let [y] = recomputed(mlp, [normed], |mlp, [x]| [mlp.forward(x)]);
                y
            }
            (Some(mlp), _) => mlp.forward(normed),
            (None, Some(moe)) if again => {
                let context = context.clone();
                let [y] = recomputed(moe, [normed], move |moe, [x]| [moe.forward(x, &context)]);
                y
            }
            (None, Some(moe)) => moe.forward(normed, context),
            (None, None) => unreachable!("a block has either an MLP or experts"),
        }
    }

    /// The same block and weights for generation, without sequence parallelism, dropout and
    /// multi-token prediction.
    pub(super) fn whole_sequence(self) -> Self {
        Self {
            attention_norm: self.attention_norm.whole_sequence(),
            attention: self.attention.whole_sequence(),
            mlp_norm: self.mlp_norm.whole_sequence(),
            mlp: self.mlp.map(Mlp::whole_sequence),
            moe: self.moe.map(Moe::whole_sequence),
            mtp: None,
            dropouts: None,
            ..self
        }
    }

    /// Applies the block to the next tokens of several sequences.
    ///
    /// # Shapes
    /// `[T, 1, H]`, unchanged: the tokens of `packed`
    pub(super) fn forward_cached(
        &self,
        x: Residual,
        rope: Option<&RopeTable>,
        packed: &Packed,
        cache: &mut KvCache,
    ) -> Residual {
        let (normed, x) = x.normed(&self.attention_norm);
        let x = x + self.attention.forward_cached(normed, rope, packed, cache);
        let (normed, x) = x.normed(&self.mlp_norm);
        x + self.feed_forward(normed, &TokenContext::default())
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
