//! The names of the model families.

use std::{
    fmt,
    hash::{Hash, Hasher},
};

use serde::{Serialize, Serializer};

use super::ModelFamily;

/// A model family of this program: one of the built-in families, or one that was
/// [registered](Self::register). It is written as its `model_type`.
#[derive(Clone, Copy)]
pub struct Family(pub(super) &'static dyn ModelFamily);

impl Family {
    /// The definition of the family.
    pub fn definition(self) -> &'static dyn ModelFamily {
        self.0
    }

    /// The names in `architectures` of models of the family, the one that is written first.
    pub(super) fn architectures(self) -> Vec<&'static str> {
        let others = self.0.other_architectures().iter().copied();
        std::iter::once(self.0.architecture())
            .chain(others)
            .collect()
    }
}

impl PartialEq for Family {
    fn eq(&self, other: &Self) -> bool {
        self.0.model_type() == other.0.model_type()
    }
}

impl Eq for Family {}

impl Hash for Family {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.model_type().hash(state);
    }
}

impl fmt::Debug for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Family({})", self.0.model_type())
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.model_type())
    }
}

impl Serialize for Family {
    fn serialize<S: Serializer>(&self, into: S) -> Result<S::Ok, S::Error> {
        into.serialize_str(self.0.model_type())
    }
}
