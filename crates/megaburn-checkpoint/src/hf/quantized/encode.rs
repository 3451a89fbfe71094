//! Turns the weights of a source into FP8 codes and scales, block of rows by block of rows.

use std::{collections::BTreeMap, ops::Range};

use burn::tensor::{DType, TensorData};

use super::{
    float8::{LARGEST, e4m3},
    form::HfQuantization,
    scaling::Grid,
};
use crate::{
    cast,
    error::CheckpointError,
    source::{TensorHeader, TensorSource},
};

/// Quantises the tensors of a source that have two dimensions.
///
/// A weight is first rounded to `dtype`, in which it is trained and would be written otherwise. Its
/// scales are determined by all of it, so it is read twice.
pub(in crate::hf) struct Encoder<'a> {
    source: &'a dyn TensorSource,
    dtype: DType,
    /// Bytes of a tensor that are read at once.
    block: usize,
    /// The factors of tensors of which only the codes or only the scales were written.
    factors: BTreeMap<String, Vec<f32>>,
}

impl<'a> Encoder<'a> {
    pub(in crate::hf) fn new(source: &'a dyn TensorSource, dtype: DType, block: usize) -> Self {
        Self {
            source,
            dtype,
            block,
            factors: BTreeMap::new(),
        }
    }

    /// The bytes of a tensor's scales, by which codes are multiplied.
    ///
    /// # Errors
    /// The tensor cannot be read, or has values that are not finite.
    pub(in crate::hf) fn scales(
        &mut self,
        header: &TensorHeader,
        form: HfQuantization,
    ) -> Result<Vec<u8>, CheckpointError> {
        let factors = self.factors(header, form)?;
        let scales = factors.iter().map(|factor| 1.0 / factor);
        Ok(scales.flat_map(f32::to_le_bytes).collect())
    }

    /// Calls `write` with the codes of a tensor, in order.
    ///
    /// # Errors
    /// As [`scales`](Self::scales), or an error of `write`.
    pub(in crate::hf) fn codes(
        &mut self,
        header: &TensorHeader,
        form: HfQuantization,
        mut write: impl FnMut(&[u8]) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let factors = self.factors(header, form)?;
        let grid = form.scaling().grid(&header.shape);
        for rows in header.blocks(self.block) {
            let mut codes = Vec::new();
            self.for_each(header, rows, &grid, |elements, at| {
                codes.extend(elements.iter().map(|x| e4m3(x * factors[at])));
            })?;
            write(&codes)?;
        }
        Ok(())
    }

    /// The factors by which the elements of a tensor are multiplied: the largest number in E4M3 over
    /// the largest magnitude of those that share it, and 1 if that is zero. They are kept from the
    /// first of two calls to the second.
    fn factors(
        &mut self,
        header: &TensorHeader,
        form: HfQuantization,
    ) -> Result<Vec<f32>, CheckpointError> {
        if let Some(factors) = self.factors.remove(&header.name) {
            return Ok(factors);
        }
        let grid = form.scaling().grid(&header.shape);
        let [height, width] = grid.scales();
        let mut amax = vec![0f32; height * width];
        let mut is_finite = true;
        for rows in header.blocks(self.block) {
            self.for_each(header, rows, &grid, |elements, at| {
                is_finite &= elements.iter().all(|x| x.is_finite());
                amax[at] = elements.iter().fold(amax[at], |most, x| most.max(x.abs()));
            })?;
        }
        if !is_finite {
            let name = header.name.clone();
            return Err(CheckpointError::NotFinite { name });
        }
        let factors: Vec<_> = amax.into_iter().map(|amax| form.factor(amax)).collect();
        self.factors.insert(header.name.clone(), factors.clone());
        Ok(factors)
    }

    /// Calls `f` with the elements of some rows, those of one scale at a time, and with the place of
    /// the scale.
    fn for_each(
        &self,
        header: &TensorHeader,
        rows: Range<usize>,
        grid: &Grid,
        mut f: impl FnMut(&[f32], usize),
    ) -> Result<(), CheckpointError> {
        let first = rows.start;
        let data = self.source.read_rows(&header.name, rows)?;
        let [_, width] = grid.scales();
        for (row, line) in self.rounded(&data).chunks(grid.cols.max(1)).enumerate() {
            let of_row = (first + row) / grid.block[0] * width;
            let parts = line.chunks(grid.block[1]).enumerate();
            parts.for_each(|(at, elements)| f(elements, of_row + at));
        }
        Ok(())
    }

    /// The elements, rounded to the type in which they are trained.
    fn rounded(&self, data: &TensorData) -> Vec<f32> {
        let mut bytes = data.as_bytes().to_vec();
        let mut dtype = data.dtype();
        for to in [self.dtype, DType::F32] {
            let copy = cast::copy(dtype, to).expect("the plan has checked the conversion");
            let mut next = vec![0; bytes.len() / dtype.size() * to.size()];
            copy(&bytes, &mut next);
            (bytes, dtype) = (next, to);
        }
        let values = bytes.as_chunks().0.iter();
        values.map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }
}

impl HfQuantization {
    /// The factor of elements whose largest magnitude is `amax`.
    fn factor(self, amax: f32) -> f32 {
        if amax == 0.0 {
            return 1.0;
        }
        let factor = (LARGEST / amax).min(f32::MAX);
        if self.has_powers_of_two() {
            // The mantissa is cut off. No factor is so small that it is no normal number.
            f32::from_bits(factor.to_bits() & !0x7f_ffff)
        } else {
            factor
        }
    }
}
