use std::collections::BTreeSet;

/// Which ranks hold copies of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ParamKind {
    /// The ranks along dp and cp hold copies.
    Dense,
    /// The ranks along edp hold copies, which are fewer.
    Expert,
}

impl ParamKind {
    pub(crate) const ALL: [Self; 2] = [Self::Dense, Self::Expert];

    /// The kind of the parameter at `path`, given the paths of the experts' parameters.
    pub(super) fn of(experts: &BTreeSet<String>, path: &str) -> Self {
        if experts.contains(path) {
            Self::Expert
        } else {
            Self::Dense
        }
    }
}
