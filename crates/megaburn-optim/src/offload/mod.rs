//! Keeps optimizer state in host memory.
//!
//! Masters and moments of some parameters are in host memory and are copied to the GPU for an
//! update. While one parameter is updated, the state of the next one is copied in and the state of
//! the previous one is copied out. Each offloaded parameter is stepped by its own kernel, with the
//! same results as state that stays on the GPU.
//!
//! Megatron-LM (`--optimizer-cpu-offload`) computes such updates on the CPU instead, and copies
//! gradients there and parameters back. That moves six bytes per parameter over PCIe; here AdamW
//! with masters moves twelve each way, in both directions at once, but the host computes nothing.

mod choice;
mod h2d_prefetch;
mod host;
mod in_place;
mod slot;
mod store;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use burn::{
    Tensor,
    module::{Module, Param},
};

use crate::{
    accumulator::GradientAccumulator,
    error::OptimError,
    optimizer::Optimizer,
    visit::{FloatVisitor, visit_floats},
};
pub use host::D2hCopy;
pub(crate) use host::OffloadedTensor;
pub(crate) use slot::{HostSlot, Key, What};
pub(crate) use store::Store;

impl Optimizer {
    /// Keeps this fraction of the masters and moments in host memory. The fraction is of the
    /// parameter elements that this rank keeps, as closely as unsplit parameters allow; 1 offloads
    /// all state. On CPUs this has no effect, because state is in host memory already. Call it
    /// before the first step and before [`Optimizer::cast_params`].
    ///
    /// Source: Megatron-LM `--optimizer-offload-fraction`.
    ///
    /// # Errors
    /// The fraction is not between 0 and 1. Too little host memory is reported by
    /// [`Optimizer::step`] and [`Optimizer::load_state`].
    pub fn with_cpu_offload(mut self, fraction: f64) -> Result<Self, OptimError> {
        if !(0.0..=1.0).contains(&fraction) {
            let name = "cpu_offload_fraction";
            let must_be = "at least 0 and at most 1";
            return Err(OptimError::BadConfig {
                name,
                value: fraction,
                must_be,
            });
        }
        self.state.set_fraction(fraction);
        Ok(self)
    }

    /// Announces what a step will update, so that the first state tensors start to be copied in.
    pub(crate) fn expect(&mut self, grads: &GradientAccumulator) {
        if self.state.stays_on_gpu() {
            return;
        }
        let order = self.choose_for(grads);
        let mut keys = Vec::new();
        let spec = |path: &str| &grads.entries[path].spec;
        let moments = |path: &str| {
            let moments = self.rule.moments(path, spec(path)).into_iter();
            moments
                .map(|(moment, _)| Key::moment(path, moment))
                .collect::<Vec<_>>()
        };
        let has_direction = |path: &str| self.rule.has_direction(path, spec(path));
        // This must be the order in which `Rule::directions` takes them.
        let mut matrices: Vec<_> = grads
            .entries
            .keys()
            .filter(|path| has_direction(path))
            .collect();
        matrices.sort_by_key(|path| grads.sharding.kind_of(path));
        for path in matrices {
            keys.extend(moments(path));
        }
        for (path, _) in &order {
            if !has_direction(path) {
                keys.extend(moments(path));
            }
            keys.push(Key::master(path));
        }
        self.state.expect(keys.into_iter());
    }

    /// Chooses which state of the parameters of `grads` will be in host memory. Returns the
    /// parameters in update order, with the number of elements that this rank keeps.
    pub(crate) fn choose_for(&mut self, grads: &GradientAccumulator) -> Vec<(String, usize)> {
        let entries = grads.entries.iter();
        self.choose(
            entries
                .map(|(path, entry)| (path.clone(), entry.num_elements()))
                .collect(),
        )
    }

    /// Like [`choose_for`](Self::choose_for), for the trainable parameters of a module.
    pub(crate) fn choose_in<M: Module>(&mut self, module: &M) {
        let mut lens = LocalNumels::default();
        visit_floats(module, &mut lens);
        self.choose(lens.0);
    }

    fn choose(&mut self, lens: BTreeMap<String, usize>) -> Vec<(String, usize)> {
        let order = self.sharding.update_order(lens);
        self.state
            .choose(order.iter().map(|(path, len)| (path.as_str(), *len)));
        order
    }
}

/// Counts the local elements of trainable parameters. A lazy parameter is not initialized and
/// counts as trainable.
#[derive(Default)]
struct LocalNumels(BTreeMap<String, usize>);

impl FloatVisitor for LocalNumels {
    fn visit<const D: usize>(&mut self, path: String, param: &Param<Tensor<D>>) {
        if !param.is_initialized() || param.val().is_require_grad() {
            self.0.insert(path, param.lazy_shape().num_elements());
        }
    }
}
