use std::collections::{BTreeMap, BTreeSet};

use burn::Tensor;

use crate::param_grad::ParamGrad;

/// The largest magnitudes of new parameters, which layers need that quantise them.
#[derive(Clone, Debug, Default)]
pub(crate) struct ParamAmaxes {
    pub(crate) wanted: BTreeSet<String>,
    pub(crate) found: BTreeMap<String, Tensor<1>>,
}

impl ParamAmaxes {
    /// Whether the step finds the largest magnitude of a parameter. It does so only if this rank
    /// updates the whole parameter.
    pub(crate) fn wants(&self, path: &str, entry: &ParamGrad) -> bool {
        self.wanted.contains(path) && entry.kept.len() == entry.num_elements()
    }

    pub(crate) fn put(&mut self, path: &str, amax: Option<Tensor<1>>) {
        self.found.extend(amax.map(|amax| (path.to_string(), amax)));
    }
}
