//! The search for the origin of a step that is not finite.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::{module::Module, prelude::Device};
use megaburn_collective::objects;
use megaburn_parallel::lazy_params;

use super::TrainerCore;
use crate::{
    diagnosis::{Diagnosis, NonFiniteOrigin},
    error::TrainError,
    failure::{diagnose, read_all},
    ranks::panic_text,
};

impl<M: Module> TrainerCore<M> {
    /// Examines gradients that were recomputed and not reduced over data-parallel ranks, after which
    /// they would be equal on all of them. A successful step costs nothing extra, whereas
    /// Megatron-LM checks each bucket in each step (`--check-for-nan-in-loss-and-grad`). A failure
    /// that does not occur a second time is not found.
    ///
    /// Every rank holds its own unreduced sum of all gradients, even if ZeRO shards gradients.
    /// `place` orders parameters as the forward pass does: the last one that is not finite is the first
    /// in the backward pass. Returns `None` if every gradient is finite this time.
    ///
    /// # Errors
    /// A failed collective or device.
    /// # Collective
    /// All ranks; one parameter name.
    pub(crate) fn non_finite_origin(
        &mut self,
        place: impl Fn(&str) -> usize,
    ) -> Result<Option<NonFiniteOrigin>, TrainError> {
        self.sharding.check()?;
        self.sharding.release();
        let model = self
            .model
            .as_ref()
            .expect("the model is absent only during an update");
        let order = lazy_params(model).into_iter().map(|param| param.path);
        let bad = self.grads.find_non_finite()?;
        let mine = order
            .filter(|path| bad.contains(path.as_str()))
            .map(|path| (place(&path), path))
            .max_by_key(|(place, _)| *place);
        let world = &self.groups.world;
        let all = objects::gather(world, &mine)?.into_iter().enumerate();
        let (ranks, params): (Vec<_>, Vec<(usize, String)>) =
            all.filter_map(|(rank, param)| Some((rank, param?))).unzip();
        let latest = |first: (usize, String), next: (usize, String)| {
            if next.0 > first.0 { next } else { first }
        };
        let non_finite_origin = params
            .into_iter()
            .reduce(latest)
            .map(|(_, param)| NonFiniteOrigin { ranks, param });
        Ok(objects::broadcast(world, &non_finite_origin)?)
    }
}

impl<M: Module> TrainerCore<M> {
    /// The ranks whose losses were not finite in the last step, before they were summed. Stages that
    /// compute no loss are not among them.
    ///
    /// # Errors
    /// A failed collective or device.
    /// # Collective
    /// All ranks; one flag.
    pub(crate) fn ranks_of_non_finite_losses(&mut self) -> Result<Vec<usize>, TrainError> {
        let own = match self.own_losses.take() {
            Some(losses) => read_all(losses)?,
            None => Vec::new(),
        };
        let is_bad = own.iter().any(|loss| !loss.is_finite());
        let world = &self.groups.world;
        let all = objects::gather(world, &is_bad)?.into_iter().enumerate();
        let ranks: Vec<usize> = all.filter_map(|(rank, bad)| bad.then_some(rank)).collect();
        Ok(objects::broadcast(world, &ranks)?)
    }
}

/// Adds what `find` finds to the error of a non-finite step; other errors are returned unchanged.
/// The error stays the same if the diagnosis fails, which needs more memory than a step.
///
/// # Collective
/// All ranks, with the same error.
pub(crate) fn with_diagnosis(
    mut error: TrainError,
    device: &Device,
    find: impl FnOnce() -> Result<Option<NonFiniteOrigin>, TrainError>,
) -> TrainError {
    let diagnosis = match &mut error {
        TrainError::NonFinite { diagnosis, .. } => diagnosis,
        TrainError::TooManySkippedSteps {
            loss,
            grad_norm,
            diagnosis,
            ..
        } if !(loss.is_finite() && grad_norm.is_finite()) => diagnosis,
        _ => return error,
    };
    *diagnosis = match catch_unwind(AssertUnwindSafe(find)) {
        Ok(Ok(Some(non_finite_origin))) => Diagnosis::NonFiniteOrigin(non_finite_origin),
        Ok(Ok(None)) => Diagnosis::Finite,
        Ok(Err(error)) => failed(&error.to_string(), device),
        Err(panic) => failed(panic_text(&*panic).unwrap_or("a panic"), device),
    };
    error
}

fn failed(why: &str, device: &Device) -> Diagnosis {
    Diagnosis::Failed(diagnose(why, device).map_or(why.to_string(), |error| error.to_string()))
}
