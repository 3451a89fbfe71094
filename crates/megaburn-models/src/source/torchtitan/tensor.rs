//! The bytes of a tensor of torchtitan, in the order of rows that Hugging Face has.

use std::{ops::Range, path::Path, sync::Arc};

use burn::tensor::DType;
use megaburn_checkpoint::{CheckpointError, TensorBytes};
use megaburn_torch::{self as torch, dcp::DcpDir};

/// The order of the rows of a matrix.
#[derive(Clone, Copy, Debug)]
pub(super) enum Rows {
    /// That of torchtitan.
    Same,
    /// That of queries and keys. The rotary positions of torchtitan rotate neighbours, rows `2i` and
    /// `2i + 1` of a head; those of Hugging Face rotate halves, rows `i` and `head_dim / 2 + i`.
    Halves { head_dim: usize },
}

impl Rows {
    /// The row of torchtitan that is row `row`.
    fn of_titan(self, row: usize) -> usize {
        match self {
            Self::Same => row,
            Self::Halves { head_dim } => {
                let (head, of_head) = (row / head_dim, row % head_dim);
                let half = head_dim / 2;
                head * head_dim + of_head % half * 2 + of_head / half
            }
        }
    }

    /// The rows up to which those from `start` on are read together.
    fn together(self, start: usize, end: usize) -> usize {
        match self {
            Self::Same => end,
            Self::Halves { head_dim } => end.min((start / head_dim + 1) * head_dim),
        }
    }
}

/// The element type of a tensor of PyTorch, if it is a float that a model may have.
pub(super) fn dtype(dtype: torch::DType) -> Option<DType> {
    match dtype {
        torch::DType::F64 => Some(DType::F64),
        torch::DType::F32 => Some(DType::F32),
        torch::DType::F16 => Some(DType::F16),
        torch::DType::BF16 => Some(DType::BF16),
        _ => None,
    }
}

/// A tensor of a checkpoint, of which regions are read from the chunks of the ranks.
#[derive(Debug)]
pub(super) struct TitanTensor {
    dir: Arc<DcpDir>,
    name: String,
    /// Whether it has one dim. Then it is seen as one row.
    is_vector: bool,
    num_rows: usize,
    num_columns: usize,
    /// Bytes of an element.
    item: usize,
    rows: Rows,
}

impl TitanTensor {
    /// A vector or a matrix; `None` if the rows are not those of whole heads.
    pub(super) fn new(
        dir: Arc<DcpDir>,
        name: String,
        shape: &[usize],
        item: usize,
        rows: Rows,
    ) -> Option<Self> {
        let is_vector = shape.len() == 1;
        let num_columns = *shape.last()?;
        let num_rows = if is_vector { 1 } else { shape[0] };
        if let Rows::Halves { head_dim } = rows
            && (is_vector || !num_rows.is_multiple_of(head_dim))
        {
            return None;
        }
        Some(Self {
            dir,
            name,
            is_vector,
            num_rows,
            num_columns,
            item,
            rows,
        })
    }

    /// Reads some columns of some rows of torchtitan.
    fn region(
        &self,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> Result<Vec<u8>, CheckpointError> {
        let read = if self.is_vector {
            self.dir
                .read_region(&self.name, &[columns.start], &[columns.len()])
        } else {
            let offsets = [rows.start, columns.start];
            self.dir
                .read_region(&self.name, &offsets, &[rows.len(), columns.len()])
        };
        Ok(read?)
    }

    /// Reads some columns of some rows, which are in one head if their order differs.
    fn ordered(
        &self,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> Result<Vec<u8>, CheckpointError> {
        if matches!(self.rows, Rows::Same) {
            return self.region(rows, columns);
        }
        let of_titan: Vec<usize> = rows.map(|row| self.rows.of_titan(row)).collect();
        let start = of_titan.iter().copied().min().unwrap_or(0);
        let end = of_titan.iter().copied().max().map_or(0, |last| last + 1);
        let len = columns.len() * self.item;
        let region = self.region(start..end, columns)?;
        let mut found = Vec::with_capacity(of_titan.len() * len);
        for row in of_titan {
            found.extend_from_slice(&region[(row - start) * len..][..len]);
        }
        Ok(found)
    }
}

impl TensorBytes for TitanTensor {
    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn read_at(&self, buffer: &mut [u8], at: u64) -> Result<(), CheckpointError> {
        let line = (self.num_columns * self.item) as u64;
        let end = at + buffer.len() as u64;
        assert!(
            end <= line * self.num_rows as u64,
            "bytes {at} to {end} are out of range"
        );
        let mut at = at;
        let mut rest = buffer;
        while !rest.is_empty() {
            let row = (at / line) as usize;
            let skipped = (at % line) as usize;
            let last = ((end - 1) / line) as usize;
            // Whole lines are read together, and a part of a single one without the rest of it.
            let (rows, columns) = if last == row {
                let until = (skipped + rest.len()).div_ceil(self.item);
                (row..row + 1, skipped / self.item..until)
            } else {
                (row..self.rows.together(row, last + 1), 0..self.num_columns)
            };
            let skipped = skipped - columns.start * self.item;
            let bytes = self.ordered(rows, columns)?;
            let here = (bytes.len() - skipped).min(rest.len());
            let (filled, later) = rest.split_at_mut(here);
            filled.copy_from_slice(&bytes[skipped..skipped + here]);
            at += here as u64;
            rest = later;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_made_of_neighbours() {
        let rows = Rows::Halves { head_dim: 6 };
        let of_titan: Vec<usize> = (0..12).map(|row| rows.of_titan(row)).collect();
        assert_eq!(of_titan, [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]);
        assert_eq!((rows.together(1, 9), rows.together(6, 9)), (6, 9));
        assert_eq!(Rows::Same.together(1, 9), 9);
    }
}
