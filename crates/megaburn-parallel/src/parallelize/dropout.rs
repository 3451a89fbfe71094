use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use burn::{module::Module, nn::Dropout, tensor::Tensor};
use megaburn_kernels::{DropoutKey, dropout};
use megaburn_mesh::{PositionRng, Purpose};

use super::layers::Layers;
use crate::shards::{PlanBuilder, Sharded};

/// Burn's `Dropout` of activations that are the same on all ranks, of which all ranks drop the same
/// elements: outside of the split between a column and a row.
///
/// A field of Burn's type becomes one of this type, built with `.into()`. Before
/// [`parallelize`](super::parallelize) it is Burn's. Afterwards the elements are a function of the
/// group's seed, the layer's path and the number of calls so far, which no record holds, and the same
/// for any number of ranks.
///
/// # Collective
/// None; all ranks call it equally often.
#[derive(Module, Debug)]
pub struct ReplicatedDropout {
    /// What it is on one rank.
    pub dropout: Dropout,
    #[module(skip)]
    masks: Option<Masks>,
}

/// Where the masks of a layer come from.
#[derive(Clone, Debug)]
struct Masks {
    rng: PositionRng,
    calls: Arc<AtomicU64>,
}

impl From<Dropout> for ReplicatedDropout {
    fn from(dropout: Dropout) -> Self {
        Self {
            dropout,
            masks: None,
        }
    }
}

impl ReplicatedDropout {
    /// As Burn's `Dropout::forward`.
    ///
    /// # Shapes
    /// Any, unchanged.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let Some(Masks { rng, calls }) = &self.masks else {
            return self.dropout.forward(x);
        };
        let is_training = self.dropout.training.is_enabled() && x.device().is_autodiff();
        if !is_training || self.dropout.prob == 0.0 {
            return x;
        }
        let rng = rng.with_stream(calls.fetch_add(1, Ordering::Relaxed));
        let key = DropoutKey::new(rng, &x.dims());
        dropout(x, self.dropout.prob, key)
    }
}

impl Sharded for ReplicatedDropout {
    fn shards(&self, _: &mut PlanBuilder) {}

    fn parallelize(&mut self, layers: &mut Layers<'_>) {
        layers.place(|path, group| {
            self.masks = Some(Masks {
                rng: PositionRng::new(group.seed(), Purpose::Dropout, path),
                calls: Arc::default(),
            });
        });
    }
}
