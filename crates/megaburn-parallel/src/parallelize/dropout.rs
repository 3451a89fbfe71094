use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use burn::{
    module::{Content, DisplaySettings, Module, ModuleDisplay},
    nn::Dropout,
    tensor::Tensor,
};
use megaburn_kernels::{DropoutKey, dropout};
use megaburn_mesh::{PositionRng, Purpose};

use super::layers::Layers;
use crate::{
    display::one_line,
    shards::{PlanBuilder, Sharded},
};

/// Burn's `Dropout` in a module that [`parallelize`](super::parallelize) splits, for activations
/// that are the same on all ranks: those outside of the split between a column and a row. All ranks
/// drop the same elements.
///
/// A field of Burn's type becomes one of this type, built with `.into()`. Before `parallelize` it
/// is Burn's, so [`shard_plan`](crate::shard_plan) refuses it in a module whose layers are built
/// with a group of several ranks, where [`ParallelDropout`](crate::ParallelDropout) is used. After
/// `parallelize` the elements are a function of the group's seed, the layer's path and the number
/// of calls so far, which no record holds, and they are the same for any number of ranks.
///
/// # Collective
/// None; all ranks call it equally often.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct ReplicatedDropout {
    /// Burn's layer, which draws the elements before `parallelize`.
    pub dropout: Dropout,
    #[module(skip)]
    masks: Option<Masks>,
}

/// The random numbers that choose the elements which a layer drops.
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
    fn shards(&self, plan: &mut PlanBuilder) {
        if self.masks.is_none() {
            plan.dropout(
                "",
                self.dropout.prob,
                "only `parallelize` gives a `ReplicatedDropout` the same masks on all ranks: in a module \
                whose layers are built with a group, use `ParallelDropout`",
            );
        }
    }

    fn parallelize(&mut self, layers: &mut Layers<'_>) {
        layers.place(|path, group| {
            self.masks = Some(Masks {
                rng: PositionRng::new(group.seed(), Purpose::Dropout, path),
                calls: Arc::default(),
            });
        });
    }
}

impl ModuleDisplay for ReplicatedDropout {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        one_line()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        content.add("prob", &self.dropout.prob).optional()
    }
}
