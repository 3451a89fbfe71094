use std::{fmt, ops::Range};

use burn::tensor::TensorData;

use crate::{
    error::CheckpointError,
    source::{TensorHeader, TensorSource, nearest},
};

/// Some of the tensors of another source.
pub struct Selection<'a> {
    source: &'a dyn TensorSource,
    headers: Vec<TensorHeader>,
}

impl<'a> Selection<'a> {
    /// The tensors of `source` whose names `is_selected` accepts.
    pub fn new(source: &'a dyn TensorSource, is_selected: impl Fn(&str) -> bool) -> Self {
        let mut headers = source.headers();
        headers.retain(|header| is_selected(&header.name));
        Self { source, headers }
    }

    /// The selected tensor of this name.
    fn header(&self, name: &str) -> Option<&TensorHeader> {
        let by_name = |header: &TensorHeader| header.name.as_str().cmp(name);
        let at = self.headers.binary_search_by(by_name).ok()?;
        Some(&self.headers[at])
    }
}

impl fmt::Debug for Selection<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Selection")
            .field("label", &self.label())
            .field("headers", &self.headers)
            .finish_non_exhaustive()
    }
}

impl TensorSource for Selection<'_> {
    fn label(&self) -> String {
        self.source.label()
    }

    fn headers(&self) -> Vec<TensorHeader> {
        self.headers.clone()
    }

    fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<TensorData, CheckpointError> {
        if self.header(name).is_none() {
            return Err(CheckpointError::MissingTensor {
                path: self.label().into(),
                name: name.to_string(),
                nearest: nearest(name, self.headers.iter().map(|header| &header.name)),
            });
        }
        self.source.read_rows(name, rows)
    }
}
