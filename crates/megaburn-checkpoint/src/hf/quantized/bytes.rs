//! The bytes that a tensor would have if its FP8 codes were multiplied by their scales.

use std::{ops::Range, path::Path};

use burn::tensor::DType;

use super::{
    found::{Codes, Scales},
    scaling::Grid,
};
use crate::{cast, error::CheckpointError, tensor_bytes::TensorBytes};

/// A tensor that is stored as FP8 codes and scales. A reader of some elements reads their codes and
/// scales only.
///
/// An element is the number of its code times its scale, in f32, which is then rounded to the type
/// of the tensor, as in Transformers and in DeepSeek's `weight_dequant`.
#[derive(Debug)]
pub(super) struct DequantizedBytes {
    codes: Codes,
    scales: Scales,
    grid: Grid,
    dtype: DType,
    cast: cast::Copy,
}

impl DequantizedBytes {
    /// `None` if `dtype` is no float.
    pub(super) fn new(codes: Codes, scales: Scales, grid: Grid, dtype: DType) -> Option<Self> {
        let cast = cast::copy(DType::F32, dtype)?;
        Some(Self {
            codes,
            scales,
            grid,
            dtype,
            cast,
        })
    }

    /// Multiplies the elements from `first` on, whose codes are given.
    fn scaled(&self, codes: &[u8], first: usize) -> Result<Vec<f32>, CheckpointError> {
        if codes.is_empty() {
            return Ok(Vec::new());
        }
        let last = first + codes.len() - 1;
        let Grid { rows, cols, block } = self.grid;
        let [height, width] = self.grid.scales();
        // The index of a row's first scale; the scales of all matrices follow one another.
        let of_row = |row: usize| (row / rows * height + row % rows / block[0]) * width;
        let needed = match [first / cols, last / cols] {
            [row, end] if row == end => {
                of_row(row) + first % cols / block[1]..of_row(row) + last % cols / block[1] + 1
            }
            [row, end] => of_row(row)..of_row(end) + width,
        };
        let scales = self.read_scales(needed.clone())?;
        let numbers = self.codes.format.numbers();
        let mut result = Vec::with_capacity(codes.len());
        let mut rest = codes;
        while !rest.is_empty() {
            let at = first + codes.len() - rest.len();
            let [row, col] = [at / cols, at % cols];
            // The elements up to the end of the row or of the block have one scale.
            let len = (cols - col).min(block[1] - col % block[1]).min(rest.len());
            let scale = scales[of_row(row) + col / block[1] - needed.start];
            let (part, others) = rest.split_at(len);
            result.extend(part.iter().map(|code| numbers[usize::from(*code)] * scale));
            rest = others;
        }
        Ok(result)
    }

    fn read_scales(&self, range: Range<usize>) -> Result<Vec<f32>, CheckpointError> {
        let (bytes, start, size) = match &self.scales {
            Scales::Floats(tensor) => (&tensor.bytes, tensor.start, tensor.dtype.size()),
            Scales::Codes(codes) => (&codes.bytes, codes.start, 1),
        };
        let mut stored = vec![0; range.len() * size];
        bytes.read_at(&mut stored, start + (range.start * size) as u64)?;
        Ok(match &self.scales {
            Scales::Floats(tensor) => floats(&stored, tensor.dtype),
            Scales::Codes(codes) => {
                let numbers = codes.format.numbers();
                stored
                    .iter()
                    .map(|code| numbers[usize::from(*code)])
                    .collect()
            }
        })
    }
}

/// Floats of any type in f32.
fn floats(stored: &[u8], dtype: DType) -> Vec<f32> {
    let mut bytes = vec![0; stored.len() / dtype.size() * size_of::<f32>()];
    if let Some(copy) = cast::copy(dtype, DType::F32) {
        copy(stored, &mut bytes);
    }
    let values = bytes.as_chunks().0.iter();
    values.map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

impl TensorBytes for DequantizedBytes {
    fn path(&self) -> &Path {
        self.codes.bytes.path()
    }

    fn read_at(&self, buffer: &mut [u8], at: u64) -> Result<(), CheckpointError> {
        let size = self.dtype.size();
        let at = at as usize;
        let elements = at / size..(at + buffer.len()).div_ceil(size);
        let mut codes = vec![0; elements.len()];
        let start = self.codes.start + elements.start as u64;
        self.codes.bytes.read_at(&mut codes, start)?;
        let numbers = self.scaled(&codes, elements.start)?;
        let wide: Vec<u8> = numbers.into_iter().flat_map(f32::to_le_bytes).collect();
        let mut bytes = vec![0; codes.len() * size];
        (self.cast)(&wide, &mut bytes);
        buffer.copy_from_slice(&bytes[at - elements.start * size..][..buffer.len()]);
        Ok(())
    }
}
