//! The model, gradients and optimizer of a rank.

use burn::{
    prelude::Device,
    tensor::{DType, FloatDType},
};
use megaburn_collective::ProcessGroups;
use megaburn_mesh::{Layout, ShardPlan};
use megaburn_models::{
    Decoder, DecoderConfig, ModelError, decoder::ModelOptions, source::ModelSource,
};
use megaburn_optim::{GradientAccumulator, Optimizer, Sharding};
use megaburn_parallel::{main_grads, shard_plan, vector_grads};

use crate::{
    config::{Dtype, OptimizerConfig, ParallelConfig, TrainConfig},
    error::TrainError,
    pipeline::Pipeline,
};

/// What a rank trains: its part of the model, and the gradients and optimizer state of that part.
#[derive(Debug)]
pub struct TrainState {
    /// The rank's role in the pipeline.
    pub pipeline: Pipeline,
    /// The rank's part of the model.
    pub model: Decoder,
    /// The part of each parameter that the rank holds.
    pub plan: ShardPlan,
    /// How gradients and optimizer state are sharded.
    pub sharding: Sharding,
    /// The gradients.
    pub grads: GradientAccumulator,
    /// The optimizer with its state.
    pub optimizer: Optimizer,
}

/// What a [`TrainState`] is built from.
#[derive(Debug)]
pub struct TrainStateConfig<'a> {
    /// The sizes and parts of the model.
    pub model: &'a DecoderConfig,
    /// How the model is computed.
    pub options: ModelOptions,
    /// How ranks share the work.
    pub parallel: &'a ParallelConfig,
    /// The optimizer.
    pub optimizer: &'a OptimizerConfig,
    /// The type of the parameters.
    pub dtype: Dtype,
    /// The weights that are loaded; `None` initializes fresh ones at their first use.
    pub weights: Option<&'a ModelSource>,
}

impl TrainStateConfig<'_> {
    /// Builds the state of this rank.
    ///
    /// # Errors
    /// A model, option or optimizer that the layout does not split, or weights that cannot be read.
    /// # Collective
    /// No communication.
    pub fn init(&self, groups: &ProcessGroups, device: &Device) -> Result<TrainState, TrainError> {
        let TrainStateShape {
            pipeline,
            model,
            plan,
            sharding,
            mut optimizer,
        } = self.shape(groups, device)?;
        let main_grads = main_grads(&model);
        let vector_grads = vector_grads(&model);
        sharding.attach(&main_grads, self.parallel.overlap);
        let dtype = self.dtype.into();
        let model = match self.weights {
            Some(source) => optimizer.load_params(model, dtype, |path, _| {
                groups.world.pulse().beat();
                source.local(path, &plan)
            })?,
            None => optimizer.cast_params(model, dtype),
        };
        let grads = GradientAccumulator::new(&model, &plan, &sharding)?
            .with_dtype(self.optimizer.main_grads_dtype.into())?
            .with_main_grads(main_grads)
            .with_vector_grads(vector_grads);
        Ok(TrainState {
            pipeline,
            model,
            plan,
            sharding,
            grads,
            optimizer,
        })
    }

    /// What this rank will hold; its parameters are lazy.
    pub(crate) fn shape(
        &self,
        groups: &ProcessGroups,
        device: &Device,
    ) -> Result<TrainStateShape, TrainError> {
        let pipeline = Pipeline::new(self.parallel, self.model, self.dtype, groups)?;
        let chunks = pipeline.chunks();
        let model = self
            .model
            .init_stages(chunks, groups, &self.options, device)?;
        let plan = shard_plan(&model).map_err(ModelError::from)?;
        let paths = || plan.iter().map(|(path, spec)| (path.to_string(), spec));
        let experts = paths().filter(|(_, spec)| spec.is_expert());
        let sharding = self
            .parallel
            .sharding()
            .with_direct(main_grads(&model).into_keys())
            .with_cross_stage(pipeline.shared())
            .with_chunks(paths().map(|(path, _)| (path.clone(), model.chunk_of(&path))))
            .with_experts(experts.map(|(path, _)| path))
            .init(&model, groups)?;
        let optimizer = self.optimizer.init(self.dtype, &sharding, groups)?;
        Ok(TrainStateShape {
            optimizer: optimizer.with_f32_params(model.f32_params()),
            pipeline,
            model,
            plan,
            sharding,
        })
    }
}

/// A [`TrainState`] whose parameters are not initialized, and whose optimizer has no state.
pub(crate) struct TrainStateShape {
    pub(crate) pipeline: Pipeline,
    pub(crate) model: Decoder,
    pub(crate) plan: ShardPlan,
    pub(crate) sharding: Sharding,
    pub(crate) optimizer: Optimizer,
}

impl TrainConfig {
    /// Whether training records the largest attention logit of each head.
    pub(crate) fn records_max_logits(&self) -> bool {
        self.optimizer.qk_clip || self.train.log_max_attention_logit
    }

    /// The options of the model under this layout.
    ///
    /// # Errors
    /// `parallel.cp_comm` does not fit the model's layers or heads.
    pub(crate) fn model_options(
        &self,
        layout: &Layout,
        model: &DecoderConfig,
    ) -> Result<ModelOptions, TrainError> {
        Ok(ModelOptions {
            sequence_parallel: layout.sp,
            cp_comm: self.context_comms(layout, model)?,
            attention: self.train.attention.resolved(
                DType::from(FloatDType::from(self.train.dtype)),
                &self.model.head_dims(),
            ),
            dropout: self.train.dropout(),
            loss: self.train.loss_terms(),
            recompute: self.recompute.of_model(),
            record_max_logits: self.records_max_logits(),
            moe: self.moe.options(),
            fused_linear_cross_entropy: self.train.fused_linear_cross_entropy,
            precision: self.precision.of_all_phases(),
        })
    }
}
