//! The precision that the layers of a run have now, and what decides on the next one.

use std::collections::BTreeSet;

use super::precision_fallback::Fallbacks;
use crate::config::PrecisionConfig;

/// The precision of the layers of a run.
#[derive(Debug)]
pub(super) struct PrecisionState {
    pub(super) fallbacks: Fallbacks,
    /// The first step of the phase that the layers are in, with its precision.
    pub(super) current: (u64, PrecisionConfig),
    /// The layers that fall back now.
    pub(super) held: BTreeSet<String>,
    /// Whether the elements that layers lose in the current step are counted.
    pub(super) counts: bool,
    /// The layers of all ranks that may be quantised, once they are known.
    pub(super) names: Option<Vec<String>>,
}

impl PrecisionState {
    /// The precision that layers are built with.
    pub(super) fn new(config: &PrecisionConfig) -> Self {
        let first = config.phases().swap_remove(0);
        Self {
            fallbacks: Fallbacks::default(),
            current: first,
            held: BTreeSet::new(),
            counts: false,
            names: None,
        }
    }
}
