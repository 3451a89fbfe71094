//! The largest attention logits of a step, and the clipping of queries and keys after it.

use std::collections::BTreeMap;

use crate::{error::TrainError, trainer::Trainer, trainer_core::world_max};

impl Trainer {
    /// Returns the largest attention logit of the step: over all micro-batches and ranks, of any head
    /// of any layer; `None` if it is not recorded. If the step was an update and
    /// `optimizer.qk_clip` is set, also clips the queries and keys of heads that exceed the threshold.
    ///
    /// # Collective
    /// All ranks: one number per head. If heads are clipped, see
    /// [`Optimizer::scale_features`](megaburn_optim::Optimizer::scale_features).
    pub(super) fn clip_queries_and_keys(
        &mut self,
        is_update: bool,
    ) -> Result<Option<f64>, TrainError> {
        let Some(max_logits) = self.max_logits()? else {
            return Ok(None);
        };
        if is_update {
            self.clip_to_threshold(&max_logits)?;
        }
        let largest = max_logits.into_iter().reduce(f64::max);
        Ok(largest.filter(|logit| logit.is_finite()))
    }

    /// Discards the logits of a step that ended in an error.
    pub(super) fn discard_max_logits(&self) -> Result<(), TrainError> {
        for (_, attention) in self.model_in_flight().attentions() {
            attention
                .take_max_logits()
                .map_err(|why| TrainError::Device { why })?;
        }
        Ok(())
    }

    /// The largest attention logit of each head of each layer of the full model, over all ranks.
    fn max_logits(&self) -> Result<Option<Vec<f64>>, TrainError> {
        let is_recorded = self.core.config.records_max_logits();
        if !is_recorded {
            return Ok(None);
        }
        let heads = self.model_config.heads;
        let mut all = vec![f64::NEG_INFINITY; self.model_config.num_blocks() * heads];
        for (layer, attention) in self.model_in_flight().attentions() {
            let own = attention
                .take_max_logits()
                .map_err(|why| TrainError::Device { why })?;
            let of_layer = &mut all[layer * heads..][..heads];
            of_layer.copy_from_slice(&own.expect("every layer records its logits"));
        }
        Ok(Some(world_max(&self.core.groups, &all)?))
    }

    fn clip_to_threshold(&mut self, max_logits: &[f64]) -> Result<(), TrainError> {
        let Some(clip) = self.core.config.optimizer.clips_queries_and_keys() else {
            return Ok(());
        };
        let heads = self.model_config.heads;
        let mut factors = BTreeMap::new();
        for (layer, attention) in self.model_in_flight().attentions() {
            let own = attention.clip_factors(&clip, &max_logits[layer * heads..][..heads]);
            let own = own.into_iter();
            factors.extend(own.map(|(path, of)| (format!("blocks.{layer}.attention.{path}"), of)));
        }
        factors.retain(|path, _| !self.core.config.optimizer.is_frozen(path));
        if factors.is_empty() {
            return Ok(());
        }
        let _clip = self.core.part("qk clip");
        let model = self.take_model();
        self.core.model = Some(self.core.optimizer.scale_features(
            model,
            &factors,
            &self.core.grads,
        )?);
        Ok(())
    }
}
