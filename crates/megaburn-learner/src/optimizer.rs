//! The optimizer of a training, which must be right on shards.

use std::collections::BTreeSet;

use burn::{
    lr_scheduler::module_lr_scheduler::ModuleLearningRate,
    module::{Module, Param},
    optim::{GradientsParams, ModuleOptimizer},
    prelude::Device,
    tensor::{Tensor, TensorData},
};
use megaburn_collective::ProcessGroups;
use megaburn_mesh::ShardPlan;
use megaburn_optim::ShardedOptimizer;

use crate::error::LearnerError;

/// An optimizer of Burn, or a [`ShardedOptimizer`], which also is right on shards where it reads full
/// parameters or clips gradients.
#[derive(Debug)]
pub struct TrainingOptimizer(Kind);

enum Kind {
    OfBurn(Box<ModuleOptimizer>),
    Sharded(ShardedOptimizer),
}

impl std::fmt::Debug for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::OfBurn(_) => f.write_str("ModuleOptimizer"),
            Self::Sharded(optimizer) => optimizer.fmt(f),
        }
    }
}

impl From<ModuleOptimizer> for TrainingOptimizer {
    fn from(optimizer: ModuleOptimizer) -> Self {
        Self(Kind::OfBurn(Box::new(optimizer)))
    }
}

impl From<ShardedOptimizer> for TrainingOptimizer {
    fn from(optimizer: ShardedOptimizer) -> Self {
        Self(Kind::Sharded(optimizer))
    }
}

impl TrainingOptimizer {
    /// The optimizer for a module with this plan, and the paths of the parameters whose state is that
    /// of the full parameter.
    ///
    /// # Errors
    /// An optimizer of Burn that clips gradients or reads full parameters, with tp.
    pub(crate) fn init(
        self,
        plan: &ShardPlan,
        groups: &ProcessGroups,
    ) -> Result<(ModuleOptimizer, BTreeSet<String>), LearnerError> {
        match self.0 {
            Kind::OfBurn(optimizer) => {
                if groups.tp.size() > 1 {
                    check(&optimizer)?;
                }
                Ok((*optimizer, BTreeSet::new()))
            }
            Kind::Sharded(optimizer) => {
                let paths = plan.iter().map(|(path, _)| path);
                let full = paths.filter(|path| optimizer.has_full_state(path));
                let full = full.map(str::to_owned).collect();
                Ok((optimizer.init(plan, &groups.tp)?, full))
            }
        }
    }
}

fn check(optimizer: &ModuleOptimizer) -> Result<(), LearnerError> {
    if optimizer.has_gradient_clipping() {
        return Err(LearnerError::Clipping);
    }
    let full = updated(optimizer, 0..SIZE);
    let halves = [0..SIZE / 2, SIZE / 2..SIZE].map(|columns| updated(optimizer, columns));
    let [left, right] = halves.map(Vec::into_iter);
    // Rows of both halves, side by side.
    let rows = left.zip(right).map(|(left, right)| [left, right].concat());
    let rows: Vec<Vec<f32>> = rows.collect();
    let is_near = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5 * a.abs().max(1e-3);
    let pairs = full.iter().flatten().zip(rows.iter().flatten());
    match pairs.into_iter().all(is_near) {
        true => Ok(()),
        false => Err(LearnerError::ReadsFullParameters),
    }
}

/// Number of rows and of columns of the matrix that the optimizer is tried on.
const SIZE: usize = 4;

#[derive(Module, Debug)]
struct Matrix {
    weight: Param<Tensor<2>>,
}

/// The columns of a matrix after two updates of these columns alone, as rows.
fn updated(optimizer: &ModuleOptimizer, columns: std::ops::Range<usize>) -> Vec<Vec<f32>> {
    let device = Device::flex();
    let values = |seed: usize| {
        let value = |i: usize| ((i * 7 + seed * 5) % 11) as f32 / 11.0 - 0.4;
        let all: Vec<f32> = (0..SIZE * SIZE).map(value).collect();
        let all = Tensor::<2>::from_data(TensorData::new(all, [SIZE, SIZE]), &device);
        all.narrow(1, columns.start, columns.len())
    };
    let mut optimizer = optimizer.clone();
    let weight = Param::from_tensor(values(0).autodiff().require_grad());
    let mut matrix = Matrix { weight };
    for step in 1..=2 {
        let mut grads = GradientsParams::new();
        grads.register(matrix.weight.id, values(step));
        matrix = optimizer.step(ModuleLearningRate::from(1e-2), matrix, grads);
    }
    let data = matrix.weight.val().into_data();
    let all: Vec<f32> = data.try_into_vec().expect("the matrix is f32");
    all.chunks(columns.len()).map(<[f32]>::to_vec).collect()
}

#[cfg(test)]
mod tests {
    use burn::{
        grad_clipping::GradientClippingConfig,
        optim::{
            AdaGradConfig, AdafactorConfig, AdamConfig, AdamWConfig, AdanConfig, LambConfig,
            LionConfig, MuonConfig, RmsPropConfig, SgdConfig,
        },
    };
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::sgd(SgdConfig::new().init())]
    #[case::adam(AdamConfig::new().init())]
    #[case::adamw(AdamWConfig::new().init())]
    #[case::adan(AdanConfig::new().init())]
    #[case::adagrad(AdaGradConfig::new().init())]
    #[case::rmsprop(RmsPropConfig::new().init())]
    #[case::lion(LionConfig::new().init())]
    fn elementwise_optimizers_are_accepted(#[case] optimizer: ModuleOptimizer) {
        check(&optimizer).unwrap();
    }

    #[rstest]
    #[case::lamb(LambConfig::new().init())]
    #[case::muon(MuonConfig::new().init())]
    #[case::adafactor(AdafactorConfig::new().init())]
    fn optimizers_that_read_full_parameters_are_refused(#[case] optimizer: ModuleOptimizer) {
        let error = check(&optimizer).unwrap_err().to_string();
        assert!(error.contains("ShardedOptimizer"), "{error}");
    }

    #[rstest]
    #[case(GradientClippingConfig::Norm(1.0))]
    #[case(GradientClippingConfig::Value(1.0))]
    fn clipping_is_refused(#[case] clipping: GradientClippingConfig) {
        let optimizer = AdamWConfig::new().with_grad_clipping(Some(clipping));
        let error = check(&optimizer.init()).unwrap_err().to_string();
        assert!(error.contains("with_max_grad_norm"), "{error}");
    }
}
