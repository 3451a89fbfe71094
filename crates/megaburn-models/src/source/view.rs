//! Views of a model's tensors with their names on Hugging Face, for reading block by block.

use std::{collections::BTreeMap, ops::Range};

use burn::tensor::TensorData;
use megaburn_checkpoint::{
    CheckpointError, HfDir, TensorHeader, TensorSource,
    hf::{HfEntry, HfView, StackedRows},
};

use super::{
    ModelSource, PREFIX, Weights,
    mtp::{Copied, copies},
};
use crate::{error::ModelError, hf::HfParam};

impl ModelSource {
    /// The parameters, with their names on Hugging Face; no other tensors.
    ///
    /// # Errors
    /// A checkpoint lacks a parameter.
    pub fn as_hf(&self) -> Result<Box<dyn TensorSource + '_>, ModelError> {
        self.tensors(Vec::new())
    }

    /// Like [`as_hf`](Self::as_hf), but stacks experts as the family does, and includes the copies of
    /// parameters that a published model contains.
    pub(crate) fn as_published(&self) -> Result<Box<dyn TensorSource + '_>, ModelError> {
        let entry = |Copied { name, path }: Copied| {
            let param = &self.params[path];
            let columns = param.parts[0].columns.clone();
            let transposed = param.transposed;
            HfEntry {
                name,
                tensor: format!("{PREFIX}{path}"),
                columns,
                transposed,
            }
        };
        let copied = copies(&self.config, self.has_bare_names);
        let tensors = self.tensors(copied.into_iter().map(entry).collect())?;
        Ok(Box::new(StackedRows::new(tensors)?))
    }

    fn tensors(&self, copied: Vec<HfEntry>) -> Result<Box<dyn TensorSource + '_>, ModelError> {
        match &self.weights {
            Weights::Hf(dir) => Ok(Box::new(Parameters {
                dir,
                params: &self.params,
            })),
            Weights::Checkpoint(checkpoint) => {
                let entries = self.params().flat_map(|param| {
                    param.parts.iter().map(|part| HfEntry {
                        name: part.name.clone(),
                        tensor: format!("{PREFIX}{}", param.path),
                        columns: part.columns.clone(),
                        transposed: param.transposed,
                    })
                });
                Ok(Box::new(HfView::new(
                    checkpoint,
                    entries.chain(copied).collect(),
                )?))
            }
        }
    }
}

/// The tensors of a folder that are parameters: neither constants nor copies of a tied matrix.
struct Parameters<'a> {
    dir: &'a HfDir,
    params: &'a BTreeMap<String, HfParam>,
}

impl TensorSource for Parameters<'_> {
    fn label(&self) -> String {
        self.dir.label()
    }

    fn headers(&self) -> Vec<TensorHeader> {
        let parts = self.params.values().flat_map(|param| &param.parts);
        let mut headers: Vec<_> = parts
            .filter_map(|part| self.dir.header(&part.name))
            .collect();
        headers.sort_by(|a, b| a.name.cmp(&b.name));
        headers
    }

    fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<TensorData, CheckpointError> {
        self.dir.read_rows(name, rows)
    }
}
