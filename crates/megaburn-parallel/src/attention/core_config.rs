use super::{
    AttentionGroups, core_attention::CoreAttention, probability_dropout::ProbabilityDropout,
};
use crate::{context::Mask, dropout, error::ParallelError, max_logits::MaxLogits};

/// Configuration of a [`CoreAttention`].
pub(super) struct CoreConfig<'a> {
    /// The layer's type, for error messages.
    pub(super) layer: &'static str,
    /// The layer's path in the model, which keys dropout.
    pub(super) path: Option<&'a str>,
    /// Query heads and key/value heads of this rank.
    pub(super) heads: [usize; 2],
    pub(super) mask: Mask,
    pub(super) recompute: bool,
    pub(super) dropout: f64,
    pub(super) relative_bias: bool,
    pub(super) max_logits: Option<MaxLogits>,
}

impl CoreConfig<'_> {
    /// Builds the core.
    ///
    /// # Errors
    /// The dropout probability is outside of `[0, 1)` or has no path to key its masks, or the heads
    /// are exchanged and the ranks do not divide them.
    pub(super) fn init(self, groups: &AttentionGroups) -> Result<CoreAttention, ParallelError> {
        let Self {
            layer,
            heads,
            mask,
            recompute,
            dropout: prob,
            relative_bias,
            max_logits,
            ..
        } = self;
        let name = self.path.unwrap_or("unnamed");
        let refuse = |why: String| ParallelError::Config {
            layer,
            name: name.into(),
            why,
        };
        dropout::check(layer, name, prob)?;
        if prob > 0.0 && self.path.is_none() {
            let why = "dropout needs a name, which keys its masks: add `.with_name(\"path\")`";
            return Err(refuse(why.into()));
        }
        let AttentionGroups { tp, cp } = groups;
        cp.comm()
            .check(cp.num_ranks(), heads)
            .map_err(|error| match error {
                ParallelError::Config {
                    name: comm, why, ..
                } => refuse(format!("cp_comm `{comm}`: {why}")),
                error => error,
            })?;
        let dropout = (prob > 0.0).then(|| ProbabilityDropout {
            prob,
            seed: tp.seed(),
            name: format!("{name}.probabilities"),
            first_head: tp.rank() * heads[0],
            num_heads: tp.size() * heads[0],
        });
        Ok(CoreAttention {
            sinks: None,
            sinks_spec: None,
            heads,
            mask,
            recompute,
            relative_bias,
            dropout,
            parallel: cp.clone(),
            max_logits,
        })
    }
}
