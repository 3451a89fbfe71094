//! The parts of a training that checkpoints hold.

use std::collections::BTreeSet;

use burn::{lr_scheduler::module_lr_scheduler::ModuleLrScheduler, optim::ModuleOptimizer};
use megaburn_mesh::ShardPlan;

/// The model, and what updates it.
pub(crate) struct Parts<M> {
    pub(crate) plan: ShardPlan,
    /// Always `Some`, except while an update replaces it.
    pub(crate) model: Option<M>,
    pub(crate) optimizer: ModuleOptimizer,
    /// Paths of parameters for which each rank keeps the optimizer state of the full parameter.
    pub(crate) full_state: BTreeSet<String>,
    pub(crate) scheduler: ModuleLrScheduler,
}

impl<M: Clone> Parts<M> {
    pub(crate) fn model(&self) -> &M {
        self.model.as_ref().expect("an update puts it back")
    }

    /// Replaces the model by `f` of it.
    pub(crate) fn map_model<E>(
        &mut self,
        f: impl FnOnce(M, &ShardPlan) -> Result<M, E>,
    ) -> Result<(), E> {
        self.model = Some(f(self.model().clone(), &self.plan)?);
        Ok(())
    }
}
