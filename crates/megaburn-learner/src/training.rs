//! The entry point: launches a training on all ranks.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex},
};

use burn::{
    lr_scheduler::module_lr_scheduler::ModuleLrScheduler,
    module::{Module, ModuleVisitor, Param},
    tensor::{Bool, Int, Tensor},
};
use burn_train::{
    InferenceStep, Learner, LearnerModel, LearningResult, SupervisedTraining, TrainStep,
    TrainingStrategy, checkpoint::CheckpointingStrategy,
};
use megaburn_collective::ProcessGroups;
use megaburn_mesh::Axis;
use megaburn_parallel::{Sharded, shard_plan};

use crate::{
    checkpoint::{Checkpoints, default_strategy},
    error::LearnerError,
    optimizer::TrainingOptimizer,
    output::RankOutput,
    parts::Parts,
    silent::{NoLogger, NoRenderer},
    strategy::{Options, Strategy},
};

/// Trains a model of parallel layers with the settings of a [`SupervisedTraining`], on all ranks of a
/// layout. Every rank builds one and launches it.
///
/// ```
/// # use std::sync::Arc;
/// use burn::{
///     data::{dataloader::{DataLoaderBuilder, batcher::Batcher}, dataset::InMemDataset},
///     module::Module, nn::loss::{MseLoss, Reduction}, optim::AdamWConfig, prelude::Device,
///     lr_scheduler::constant::ConstantLr, tensor::{Tensor, activation::relu},
/// };
/// use burn_train::{
///     InferenceStep, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep, metric::LossMetric,
/// };
/// use megaburn_collective::{Group, GroupOptions, ProcessGroups, run_threads};
/// use megaburn_learner::{LearnerError, ParallelTraining};
/// use megaburn_parallel::{ParallelLinear, ParallelLinearConfig, Sharded};
///
/// #[derive(Module, Sharded, Debug)]
/// struct Net {
///     up: ParallelLinear,
///     down: ParallelLinear,
/// }
///
/// impl Net {
///     fn new(tp: &Group, device: &Device) -> Result<Self, LearnerError> {
///         let up = ParallelLinearConfig::column(1, 8).with_name("up").init(tp, device)?;
///         let down = ParallelLinearConfig::row(8, 1).with_name("down").init(tp, device)?;
///         Ok(Self { up, down })
///     }
///
///     fn forward(&self, [x, y]: [Tensor<2>; 2]) -> RegressionOutput {
///         let output = self.down.forward(relu(self.up.forward(x)));
///         let loss = MseLoss::new().forward(output.clone(), y.clone(), Reduction::Mean);
///         RegressionOutput::new(loss, output, y)
///     }
/// }
///
/// impl TrainStep for Net {
///     type Input = [Tensor<2>; 2];
///     type Output = RegressionOutput;
///
///     fn step(&self, batch: Self::Input) -> TrainOutput<RegressionOutput> {
///         let item = self.forward(batch);
///         TrainOutput::new(self, item.loss.backward(), item)
///     }
/// }
///
/// impl InferenceStep for Net {
///     type Input = [Tensor<2>; 2];
///     type Output = RegressionOutput;
///
///     fn step(&self, batch: Self::Input) -> RegressionOutput {
///         self.forward(batch)
///     }
/// }
///
/// #[derive(Clone)]
/// struct Square;
///
/// impl Batcher<f32, [Tensor<2>; 2]> for Square {
///     fn batch(&self, items: Vec<f32>, device: &Device) -> [Tensor<2>; 2] {
///         let x = Tensor::<1>::from_floats(items.as_slice(), device).reshape([-1, 1]);
///         [x.clone(), x.powi_scalar(2)]
///     }
/// }
///
/// let dir = std::env::temp_dir().join(format!("learner-{}", std::process::id()));
/// let layout = "tp2-dp2".parse().unwrap();
/// let ranks = run_threads(4, GroupOptions::default(), |world| {
///     let groups = ProcessGroups::new(&world, layout)?;
///     let model = Net::new(&groups.tp, &Device::flex().autodiff())?;
///     let items = || InMemDataset::new((0..16).map(|i| i as f32 / 16.0).collect());
///     let loader = || DataLoaderBuilder::new(Square).batch_size(4).build(items());
///     let training = SupervisedTraining::new(&dir, loader(), loader())
///         .metrics((LossMetric::new(),))
///         .num_epochs(2);
///     let optimizer = AdamWConfig::new().init();
///     let result = ParallelTraining::new(&groups)
///         .launch(training, model, optimizer, ConstantLr::new(1e-2))?;
///     Ok::<_, LearnerError>(result.model)
/// });
/// ranks.into_iter().for_each(|rank| drop(rank.unwrap()));
/// # std::fs::remove_dir_all(dir).ok();
/// ```
pub struct ParallelTraining {
    groups: ProcessGroups,
    max_grad_norm: Option<f64>,
    folder: Option<PathBuf>,
    checkpointing: Option<Box<dyn CheckpointingStrategy>>,
}

impl ParallelTraining {
    /// Trains on the ranks of `groups`.
    pub fn new(groups: &ProcessGroups) -> Self {
        Self {
            groups: groups.clone(),
            max_grad_norm: None,
            folder: None,
            checkpointing: None,
        }
    }

    /// Clips gradients by the norm of the full gradient, over all shards and parameters, as PyTorch's
    /// `clip_grad_norm_` does.
    #[must_use]
    pub fn with_max_grad_norm(self, max_grad_norm: f64) -> Self {
        Self {
            max_grad_norm: Some(max_grad_norm),
            ..self
        }
    }

    /// Saves model, optimizer and scheduler to `folder/step-<epoch>`, with the epoch in eight digits,
    /// when Burn's default strategy says so: the last two epochs and the one with the
    /// lowest validation loss stay. Each rank writes its share, and any layout with tp and dp can
    /// resume: `SupervisedTraining::checkpoint(epoch)`.
    #[must_use]
    pub fn with_checkpoints(self, folder: impl Into<PathBuf>) -> Self {
        Self {
            folder: Some(folder.into()),
            ..self
        }
    }

    /// Replaces the strategy that says after which epochs [checkpoints](Self::with_checkpoints) are
    /// saved, and which are deleted. Rank 0's is asked.
    #[must_use]
    pub fn with_checkpointing_strategy(
        self,
        strategy: impl CheckpointingStrategy + 'static,
    ) -> Self {
        Self {
            checkpointing: Some(Box::new(strategy)),
            ..self
        }
    }

    /// Trains `model` as `training` says, and returns this rank's shard of it. Parameters that
    /// data-parallel ranks or replicas in a tensor-parallel group should share are first set to those
    /// of the first rank.
    ///
    /// Every rank builds its own data loaders, with the same seed. Batches of loaders with several
    /// workers arrive in any order, so they cannot be used with tp. `optimizer` is one of Burn's
    /// ([`ModuleOptimizer`](burn::optim::ModuleOptimizer)), or a
    /// [`ShardedOptimizer`](megaburn_optim::ShardedOptimizer). Of a `ModuleOptimizer` with several
    /// groups of parameters, only the first group's optimizer is checked.
    ///
    /// # Errors
    /// A setting that cannot be right on shards; a folder of checkpoints that cannot be used; an error
    /// of any rank, on every rank. An error of a data set or metric is in [`LearningResult::error`],
    /// as without this crate.
    /// # Collective
    /// All ranks. Each step sends the number of items, all gradients over dp, and the outputs to rank
    /// 0; what the model's layers send comes on top.
    pub fn launch<M>(
        self,
        training: SupervisedTraining<M>,
        model: M,
        optimizer: impl Into<TrainingOptimizer>,
        scheduler: impl Into<ModuleLrScheduler>,
    ) -> Result<LearningResult<M>, LearnerError>
    where
        M: LearnerModel + Sharded,
        <M as TrainStep>::Output: RankOutput,
        <M as InferenceStep>::Output: RankOutput,
    {
        self.check()?;
        let Self {
            groups,
            max_grad_norm,
            folder,
            checkpointing,
        } = self;
        let scheduler = scheduler.into();
        let plan = shard_plan(&model)?;
        check_kinds(&model)?;
        let (optimizer, full_state) = optimizer.into().init(&plan, &groups)?;
        let training = if groups.is_main() {
            training
        } else {
            training
                .renderer(Box::new(NoRenderer))
                .with_metric_logger(NoLogger)
                .with_progress_logger(NoRenderer)
                .with_application_logger(None)
        };
        let checkpoints = folder.map(|folder| {
            let strategy = checkpointing.unwrap_or_else(default_strategy);
            Checkpoints::new(folder, strategy)
        });
        let failure = Arc::new(Mutex::new(None));
        let learner = Learner::new(model.clone(), optimizer.clone(), scheduler.clone());
        let strategy = Strategy::new(
            Parts {
                plan,
                model: Some(model),
                optimizer,
                full_state,
                scheduler,
            },
            Options {
                groups,
                max_grad_norm,
                checkpoints,
            },
            failure.clone(),
        );
        let strategy = TrainingStrategy::Custom(Arc::new(strategy));
        let result = training.with_training_strategy(strategy).launch(learner);
        let failure = failure
            .lock()
            .unwrap_or_else(|lock| lock.into_inner())
            .take();
        match failure {
            Some(error) => Err(error),
            None => Ok(result),
        }
    }

    fn check(&self) -> Result<(), LearnerError> {
        let layout = self.groups.layout();
        for axis in [Axis::Pp, Axis::Cp, Axis::Ep, Axis::Etp] {
            let degree = layout.degree(axis);
            if degree > 1 && !(axis == Axis::Etp && degree == layout.degree(Axis::Tp)) {
                return Err(LearnerError::Axis {
                    layout: layout.to_string(),
                    axis: axis.name(),
                    degree,
                });
            }
        }
        if let Some(norm) = self.max_grad_norm
            && (norm.is_nan() || norm <= 0.0)
        {
            return Err(LearnerError::MaxGradNorm(norm));
        }
        Ok(())
    }
}

/// Refuses parameters that are not floats.
fn check_kinds<M: Module>(model: &M) -> Result<(), LearnerError> {
    struct Kinds(Vec<String>, Option<String>);
    impl Kinds {
        fn refuse(&mut self) {
            self.1.get_or_insert(self.0.join("."));
        }
    }
    impl ModuleVisitor for Kinds {
        fn enter_module(&mut self, name: &str, _container_type: &str) {
            self.0.push(name.to_owned());
        }
        fn exit_module(&mut self, _name: &str, _container_type: &str) {
            self.0.pop();
        }
        fn visit_int<const D: usize>(&mut self, _: &Param<Tensor<D, Int>>) {
            self.refuse();
        }
        fn visit_bool<const D: usize>(&mut self, _: &Param<Tensor<D, Bool>>) {
            self.refuse();
        }
    }
    let mut kinds = Kinds(Vec::new(), None);
    model.visit(&mut kinds);
    match kinds.1 {
        Some(path) => Err(LearnerError::NotFloat { path }),
        None => Ok(()),
    }
}

impl std::fmt::Debug for ParallelTraining {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ParallelTraining")
            .field("layout", &self.groups.layout().to_string())
            .field("max_grad_norm", &self.max_grad_norm)
            .field("folder", &self.folder)
            .finish_non_exhaustive()
    }
}
