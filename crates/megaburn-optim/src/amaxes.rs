use std::collections::{BTreeMap, BTreeSet};

use burn::Tensor;

use crate::{optimizer::Optimizer, param_grad::ParamGrad};

/// The largest magnitudes of new parameters, which layers need that quantise them.
#[derive(Clone, Debug, Default)]
pub(crate) struct ParamAmaxes {
    wanted: BTreeSet<String>,
    found: BTreeMap<String, Tensor<1>>,
}

impl ParamAmaxes {
    /// Whether a step finds that of a parameter: only if this rank updates all of it.
    pub(crate) fn wants(&self, path: &str, entry: &ParamGrad) -> bool {
        self.wanted.contains(path) && entry.kept.len() == entry.num_elements()
    }

    pub(crate) fn put(&mut self, path: &str, amax: Option<Tensor<1>>) {
        self.found.extend(amax.map(|amax| (path.to_string(), amax)));
    }
}

impl Optimizer {
    /// Sets the parameters whose largest magnitudes the next steps find while they write them.
    pub fn find_amaxes_of(&mut self, paths: impl IntoIterator<Item = String>) {
        self.amaxes.wanted = paths.into_iter().collect();
    }

    /// Takes the largest magnitudes of parameters after the last step, by path, `[1]` in f32 each. A
    /// parameter that was not wanted, that this rank does not update as a whole, or whose update rule
    /// finds none, has none. With a change to a parameter after the step its magnitude is void.
    pub fn take_amaxes(&mut self) -> BTreeMap<String, Tensor<1>> {
        std::mem::take(&mut self.amaxes.found)
    }
}
