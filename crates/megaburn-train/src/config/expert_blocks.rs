//! Layouts that do not cut the blocks of quantised experts.

use megaburn_mesh::Layout;
use megaburn_models::DecoderConfig;

use super::{PrecisionConfig, TrainConfig, require::require};
use crate::error::TrainError;

impl TrainConfig {
    /// Refuses layouts that would cut the blocks of quantised experts: over the ranks that split an
    /// expert, or over those that have tokens of the same micro-batch for it.
    pub(super) fn check_expert_blocks(
        &self,
        layout: &Layout,
        model: &DecoderConfig,
        block: usize,
    ) -> Result<(), TrainError> {
        let PrecisionConfig {
            recipe,
            experts_in_bf16,
            ..
        } = self.precision;
        let Some(experts) = model.experts.as_ref().filter(|_| !experts_in_bf16) else {
            return Ok(());
        };
        let Layout {
            tp, cp, ep, etp, ..
        } = *layout;
        let own = experts.ffn / etp;
        let rule = format!(
            "\"tensorwise\" or \"delayed\", or precision.experts_in_bf16 = true, with this model and etp \
            {etp}: {block} features share a scale, and each rank would have {own} of an expert's, which \
            is no multiple of {block}"
        );
        let is_cut = etp > 1 && !own.is_multiple_of(block);
        require(!is_cut, "precision.recipe", recipe, rule)?;
        let rule = format!(
            "\"tensorwise\" or \"delayed\", or precision.experts_in_bf16 = true, with experts over cp {cp}, \
            tp {tp}, ep {ep} and etp {etp}: {block} tokens of an expert share a scale, and ranks would \
            have other blocks of them than one rank; use cp 1 and ep times etp that is a multiple of tp"
        );
        let are_together = cp == 1 && (ep * etp).is_multiple_of(tp);
        require(are_together, "precision.recipe", recipe, rule)
    }
}
