use burn::{
    module::{
        Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor,
    },
    nn::Initializer,
    prelude::Device,
    tensor::Tensor,
};
use megaburn_collective::Group;
use megaburn_kernels::RopeTable;
use megaburn_parallel::{
    ContextParallel, KvCache, MultiLatentAttention, Packed, ParallelError, PlanBuilder,
    Recomputable, SelfAttention, SelfAttentionConfig, Sharded, TokenContext,
};

use super::DecoderConfig;

/// The attention of a block: one of two modules. The paths of the parameters do not name the
/// variant.
///
/// Burn's derive for enums would add the variant's name to the paths, so checkpoints from the time
/// before there were two variants could not be loaded.
#[derive(Clone, Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "a model has one per layer, all of the same variant"
)]
pub enum DecoderAttention {
    /// Multi-head or grouped-query attention.
    Heads(SelfAttention),
    /// Multi-head latent attention.
    Latent(MultiLatentAttention),
}

/// Evaluates an expression for the module of either variant.
macro_rules! either {
    ($attention:expr, $module:ident => $value:expr) => {
        match $attention {
            DecoderAttention::Heads($module) => $value,
            DecoderAttention::Latent($module) => $value,
        }
    };
}

/// Like `either!`, but wraps the result in the same variant.
macro_rules! rewrap {
    ($attention:expr, $module:ident => $value:expr) => {
        match $attention {
            DecoderAttention::Heads($module) => DecoderAttention::Heads($value),
            DecoderAttention::Latent($module) => DecoderAttention::Latent($value),
        }
    };
}

impl DecoderAttention {
    /// The attention of block `index`.
    pub(super) fn new(
        config: &DecoderConfig,
        index: usize,
        group: &Group,
        sequence_parallel: bool,
        output_initializer: Initializer,
        device: &Device,
    ) -> Result<Self, ParallelError> {
        let name = format!("blocks.{index}.attention");
        let DecoderConfig {
            hidden,
            heads,
            kv_heads,
            head_dim,
            ..
        } = *config;
        if let Some(latent) = &config.latent {
            let attention = latent
                .layer(hidden, heads)
                .with_softmax_scale(config.softmax_scale())
                .with_sequence_parallel(sequence_parallel)
                .with_output_initializer(output_initializer)
                .with_name(name);
            return Ok(Self::Latent(attention.init(group, device)?));
        }
        let mut attention = SelfAttentionConfig::new(hidden, heads, kv_heads, head_dim)
            .with_qkv_bias(config.qkv_bias)
            .with_output_bias(config.output_bias)
            .with_sequence_parallel(sequence_parallel)
            .with_output_initializer(output_initializer)
            .with_name(name);
        attention.window = config.layer_window(index);
        attention.qk_norm = config.qk_norm.then_some(config.norm_eps);
        Ok(Self::Heads(attention.init(group, device)?))
    }

    pub(super) fn with_recompute(self, recompute: bool) -> Self {
        rewrap!(self, module => module.with_recompute(recompute))
    }

    pub(super) fn with_dropout(
        self,
        prob: f64,
        name: &str,
        group: &Group,
    ) -> Result<Self, ParallelError> {
        Ok(rewrap!(self, module => module.with_dropout(prob, name, group)?))
    }

    pub(super) fn with_context_parallel(
        self,
        parallel: &ContextParallel,
        name: &str,
    ) -> Result<Self, ParallelError> {
        Ok(rewrap!(self, module => module.with_context_parallel(parallel, name)?))
    }

    pub(super) fn whole_sequence(self) -> Self {
        rewrap!(self, module => module.whole_sequence())
    }

    /// Applies the attention: `[S, B, H]`, unchanged.
    pub(super) fn forward_in(
        &self,
        x: impl Into<Recomputable<3>>,
        context: &TokenContext,
    ) -> Tensor<3> {
        either!(self, module => module.forward_in(x, context))
    }

    /// Applies the attention with a KV cache: `[T, 1, H]`, unchanged.
    pub(super) fn forward_cached(
        &self,
        x: impl Into<Recomputable<3>>,
        rope: Option<&RopeTable>,
        packed: &Packed,
        cache: &mut KvCache,
    ) -> Tensor<3> {
        either!(self, module => module.forward_cached(x, rope, packed, cache))
    }
}

impl Module for DecoderAttention {
    fn collect_devices(&self, devices: Devices) -> Devices {
        either!(self, module => module.collect_devices(devices))
    }

    fn fork(self, device: &Device) -> Self {
        rewrap!(self, module => module.fork(device))
    }

    fn to_device(self, device: &Device) -> Self {
        rewrap!(self, module => module.to_device(device))
    }

    fn train(self) -> Self {
        rewrap!(self, module => module.train())
    }

    fn valid(&self) -> Self {
        rewrap!(self, module => module.valid())
    }

    fn materialize(self) -> Self {
        rewrap!(self, module => module.materialize())
    }

    fn visit<Visitor: ModuleVisitor>(&self, visitor: &mut Visitor) {
        either!(self, module => module.visit(visitor));
    }

    fn map<Mapper: ModuleMapper>(self, mapper: &mut Mapper) -> Self {
        rewrap!(self, module => module.map(mapper))
    }
}

impl ModuleDisplayDefault for DecoderAttention {
    fn content(&self, content: Content) -> Option<Content> {
        either!(self, module => module.content(content))
    }

    fn num_params(&self) -> usize {
        Module::num_params(self)
    }
}

impl ModuleDisplay for DecoderAttention {}

impl Sharded for DecoderAttention {
    fn shards(&self, plan: &mut PlanBuilder) {
        either!(self, module => module.shards(plan));
    }
}
