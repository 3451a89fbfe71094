//! Tensors of a source that are published as rows of a stack, such as the matrices of experts.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    ops::Range,
};

use burn::tensor::TensorData;

use super::dir::stacked_row;
use crate::{
    buffer::filled,
    error::CheckpointError,
    source::{TensorHeader, TensorSource},
};

/// A source in which the tensors `name[0]`, `name[1]` and so on of another one are the rows of one
/// tensor `name`.
pub struct StackedRows<'a> {
    source: Box<dyn TensorSource + 'a>,
    /// The stacks, and the tensors that have no stack.
    headers: BTreeMap<String, TensorHeader>,
    /// The names of the stacks.
    stacks: BTreeSet<String>,
}

impl<'a> StackedRows<'a> {
    /// Stacks the tensors of `source` whose names end with a number in brackets.
    ///
    /// # Errors
    /// The numbers of a stack are not all from 0 on.
    pub fn new(source: Box<dyn TensorSource + 'a>) -> Result<Self, CheckpointError> {
        let mut headers: BTreeMap<String, TensorHeader> = BTreeMap::new();
        let mut rows: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for header in source.headers() {
            let Some((stack, row)) = stacked_row(&header.name) else {
                headers.insert(header.name.clone(), header);
                continue;
            };
            let stack = stack.to_string();
            rows.entry(stack.clone()).or_default().push(row);
            headers.entry(stack.clone()).or_insert(TensorHeader {
                name: stack,
                ..header
            });
        }
        let stacks = rows.keys().cloned().collect();
        for (stack, mut rows) in rows {
            rows.sort_unstable();
            if let Some(missing) = (0..rows.len()).find(|row| rows[*row] != *row) {
                return Err(CheckpointError::MissingTensor {
                    path: source.label().into(),
                    name: format!("{stack}[{missing}]"),
                    nearest: format!("{stack}[{}]", rows[missing]),
                });
            }
            if let Some(header) = headers.get_mut(&stack) {
                header.shape.insert(0, rows.len());
            }
        }
        Ok(Self {
            source,
            headers,
            stacks,
        })
    }
}

impl fmt::Debug for StackedRows<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StackedRows")
            .field("stacks", &self.stacks)
            .finish_non_exhaustive()
    }
}

impl TensorSource for StackedRows<'_> {
    fn label(&self) -> String {
        self.source.label()
    }

    fn headers(&self) -> Vec<TensorHeader> {
        self.headers.values().cloned().collect()
    }

    fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<TensorData, CheckpointError> {
        let Some(header) = self
            .headers
            .get(name)
            .filter(|_| self.stacks.contains(name))
        else {
            return self.source.read_rows(name, rows);
        };
        let len = header.row_len() * header.dtype.size();
        let first = header.shape.get(1).copied().unwrap_or(1);
        let shape = header.rows_shape(&rows);
        filled(shape, header.dtype, |all| {
            for (row, place) in rows.clone().zip(all.chunks_mut(len.max(1))) {
                let data = self.source.read_rows(&format!("{name}[{row}]"), 0..first)?;
                place.copy_from_slice(data.as_bytes());
            }
            Ok(())
        })
    }
}
