//! Which fields are read.

use super::inputs::{Inputs, Kind};
use crate::error::DataError;

#[derive(Clone, Debug)]
pub(super) enum Keys {
    /// One field, for a data set `OUT`.
    Field(String),
    /// Fields, each for a data set `OUT_KEY_document`.
    Each(Vec<String>),
}

impl Keys {
    pub(super) fn names(&self) -> &[String] {
        match self {
            Self::Field(field) => std::slice::from_ref(field),
            Self::Each(keys) => keys,
        }
    }

    /// Checks that each key gives a file name, and that text files have one key.
    pub(super) fn check(&self, inputs: &Inputs) -> Result<(), DataError> {
        let keys = self.names();
        let bad = |why: String| Err(DataError::Keys { why });
        if keys.is_empty() {
            return bad("none is given; name at least one".into());
        }
        for (index, key) in keys.iter().enumerate() {
            if key.is_empty() {
                return bad("`` is empty; give the name of a field".into());
            }
            if keys[..index].contains(key) {
                return bad(format!("`{key}` is given twice; give each field once"));
            }
            if matches!(self, Self::Each(_)) && key.contains(['/', '\0']) {
                return bad(format!(
                    "`{key}` cannot be a part of a file name; read it with --field"
                ));
            }
        }
        let text = inputs.files.iter().find(|file| file.kind == Kind::Text);
        match text {
            Some(file) if keys.len() > 1 => bad(format!(
                "`{}` is one text without fields, and {} are given; leave it out, or give one field",
                file.path.display(),
                keys.len()
            )),
            _ => Ok(()),
        }
    }
}
