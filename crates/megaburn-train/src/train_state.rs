//! The model, gradients and optimizer of a rank.

use burn::{
    module::Module,
    prelude::Device,
    tensor::{DType, FloatDType},
};
use megaburn_collective::ProcessGroups;
use megaburn_mesh::{Layout, ShardPlan};
use megaburn_models::{
    Decoder, DecoderConfig, ModelError, decoder::ModelOptions, source::ModelSource,
};
use megaburn_optim::{GradientAccumulator, Optimizer, Sharding};
use megaburn_parallel::{Sharded, main_grads, shard_plan, vector_grads};

use crate::{
    config::{Dtype, OptimizerConfig, ParallelConfig, TrainConfig},
    error::TrainError,
    pipeline::Pipeline,
};

/// What a rank trains: its part of the model, and the gradients and optimizer state of that part.
#[derive(Debug)]
pub struct TrainState<M = Decoder> {
    /// The rank's role in the pipeline.
    pub pipeline: Pipeline,
    /// The rank's part of the model.
    pub model: M,
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
        let dtype = self.dtype.into();
        let shape = self.shape(groups, device)?;
        shape.init(
            self.parallel,
            self.optimizer,
            |optimizer, model, plan| match self.weights {
                Some(source) => Ok(optimizer.load_params(model, dtype, |path, _| {
                    groups.world.pulse().beat();
                    source.local(path, plan)
                })?),
                None => Ok(optimizer.cast_params(model, dtype)),
            },
        )
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
        let chunk_of = |path: &str| model.chunk_of(path);
        let f32_params: Vec<String> = model.f32_params().collect();
        TrainStateShape::new(
            (pipeline, model.clone()),
            (self.parallel, self.optimizer, self.dtype),
            chunk_of,
            groups,
        )
        .map(|shape| shape.with_f32_params(f32_params))
    }
}

/// A [`TrainState`] whose parameters are not initialized, and whose optimizer has no state.
pub(crate) struct TrainStateShape<M = Decoder> {
    pub(crate) pipeline: Pipeline,
    pub(crate) model: M,
    pub(crate) plan: ShardPlan,
    pub(crate) sharding: Sharding,
    pub(crate) optimizer: Optimizer,
}

impl<M: Module + Sharded> TrainStateShape<M> {
    /// What a rank holds of `model`. `chunk_of` returns the chunk of this rank to which a parameter
    /// belongs.
    ///
    /// # Errors
    /// The shard plan leaves out a parameter, or the optimizer does not suit the sharding.
    /// # Collective
    /// No communication.
    pub(crate) fn new(
        (pipeline, model): (Pipeline, M),
        (parallel, optimizer, dtype): (&ParallelConfig, &OptimizerConfig, Dtype),
        chunk_of: impl Fn(&str) -> usize,
        groups: &ProcessGroups,
    ) -> Result<Self, TrainError> {
        let plan = shard_plan(&model).map_err(ModelError::from)?;
        let paths = || plan.iter().map(|(path, spec)| (path.to_string(), spec));
        let experts = paths().filter(|(_, spec)| spec.is_expert());
        let sharding = parallel
            .sharding()
            .with_direct(main_grads(&model).into_keys())
            .with_cross_stage(pipeline.shared())
            .with_chunks(paths().map(|(path, _)| (path.clone(), chunk_of(&path))))
            .with_experts(experts.map(|(path, _)| path))
            .init(&model, groups)?;
        Ok(Self {
            optimizer: optimizer.init(dtype, &sharding, groups)?,
            pipeline,
            model,
            plan,
            sharding,
        })
    }

    /// Keeps these parameters in f32.
    fn with_f32_params(self, paths: Vec<String>) -> Self {
        Self {
            optimizer: self.optimizer.with_f32_params(paths),
            ..self
        }
    }

    /// Initializes the parameters with `weights`, and the gradients.
    ///
    /// # Errors
    /// Those of `weights`, or a type of gradients that the sharding does not support.
    pub(crate) fn init(
        self,
        parallel: &ParallelConfig,
        config: &OptimizerConfig,
        weights: impl FnOnce(&mut Optimizer, M, &ShardPlan) -> Result<M, TrainError>,
    ) -> Result<TrainState<M>, TrainError> {
        let Self {
            pipeline,
            model,
            plan,
            sharding,
            mut optimizer,
        } = self;
        let main_grads = main_grads(&model);
        let vector_grads = vector_grads(&model);
        sharding.attach(&main_grads, parallel.overlap);
        let model = weights(&mut optimizer, model, &plan)?;
        let grads = GradientAccumulator::new(&model, &plan, &sharding)?
            .with_dtype(config.main_grads_dtype.into())?
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
