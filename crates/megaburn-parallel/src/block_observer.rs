//! What each block of a model computes, for a comparison of layouts.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use burn::tensor::Tensor;
use megaburn_autograd::{FoundGradient, observed};

use crate::residual::Residual;

/// Keeps the residual stream after each block of this rank, and its gradient. Clones keep in the
/// same place. Blocks that backward recomputes are not observed.
#[derive(Clone, Debug, Default)]
pub struct BlockObserver(Arc<Mutex<BTreeMap<Option<usize>, Observed>>>);

type Observed = (Tensor<3>, FoundGradient);

/// The residual stream after a block, on this rank.
#[derive(Clone, Debug)]
pub struct BlockValues {
    /// The values, off the autodiff device.
    pub output: Tensor<3>,
    /// Their gradient, after a backward pass.
    pub gradient: Option<Tensor<3>>,
}

impl BlockObserver {
    /// Keeps the stream after `block`; `None` stands for the embeddings.
    ///
    /// # Shapes
    /// `[seq, batch, d_model]`
    pub fn observe(&self, block: Option<usize>, x: Tensor<3>) -> Tensor<3> {
        let (x, gradient) = observed(x);
        let is_autodiff = x.device().is_autodiff();
        let output = if is_autodiff {
            x.clone().inner()
        } else {
            x.clone()
        };
        self.lock().insert(block, (output, gradient));
        x
    }

    /// As [`observe`](Self::observe), of a stream whose last term is not added yet.
    pub fn observe_residual(&self, block: usize, x: Residual) -> Residual {
        self.observe(Some(block), x.sum()).into()
    }

    /// What was kept, in the order of the blocks.
    pub fn take(&self) -> BTreeMap<Option<usize>, BlockValues> {
        let found = std::mem::take(&mut *self.lock());
        let values = |(output, gradient): Observed| BlockValues {
            output,
            gradient: gradient.take(),
        };
        let found = found.into_iter();
        found
            .map(|(block, observed)| (block, values(observed)))
            .collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Option<usize>, Observed>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
