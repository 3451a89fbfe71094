//! Turns the weights of a source into FP8 codes and scales, block of rows by block of rows.

use std::{collections::BTreeMap, ops::Range};

use burn::tensor::{DType, TensorData, bf16, f16};

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
    /// The scales of tensors of which only the codes or only the scales were written.
    scales: BTreeMap<String, Vec<f32>>,
}

impl<'a> Encoder<'a> {
    pub(in crate::hf) fn new(source: &'a dyn TensorSource, dtype: DType, block: usize) -> Self {
        Self {
            source,
            dtype,
            block,
            scales: BTreeMap::new(),
        }
    }

    /// The bytes of a tensor's scales, by which codes are multiplied, in the type
    /// [`HfQuantization::scale_dtype`].
    ///
    /// # Errors
    /// The tensor cannot be read, or has values that are not finite.
    pub(in crate::hf) fn scale_bytes(
        &mut self,
        header: &TensorHeader,
        form: HfQuantization,
    ) -> Result<Vec<u8>, CheckpointError> {
        let scales = self.scales(header, form)?;
        let wide: Vec<u8> = scales.into_iter().flat_map(f32::to_le_bytes).collect();
        Ok(converted(&wide, DType::F32, form.scale_dtype(self.dtype)))
    }

    /// Calls `write` with the codes of a tensor, in order.
    ///
    /// # Errors
    /// As [`scale_bytes`](Self::scale_bytes), or an error of `write`.
    pub(in crate::hf) fn codes(
        &mut self,
        header: &TensorHeader,
        form: HfQuantization,
        mut write: impl FnMut(&[u8]) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let scales = self.scales(header, form)?;
        let grid = form.scaling().grid(&header.shape);
        for rows in header.blocks(self.block) {
            let mut codes = Vec::new();
            self.for_each(header, rows, &grid, |elements, at| {
                codes.extend(elements.iter().map(|x| e4m3(x / scales[at])));
            })?;
            write(&codes)?;
        }
        Ok(())
    }

    /// The scales of a tensor, as they are stored. They are kept from the first of two calls to the
    /// second.
    fn scales(
        &mut self,
        header: &TensorHeader,
        form: HfQuantization,
    ) -> Result<Vec<f32>, CheckpointError> {
        if let Some(scales) = self.scales.remove(&header.name) {
            return Ok(scales);
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
            return Err(CheckpointError::NotQuantizable { name });
        }
        let dtype = form.scale_dtype(self.dtype);
        let scales: Vec<_> = amax
            .into_iter()
            .map(|amax| form.scale(amax, dtype))
            .collect();
        self.scales.insert(header.name.clone(), scales.clone());
        Ok(scales)
    }

    /// Calls `f` once for each run of elements in some rows that share a scale, with these elements
    /// and the index of their scale.
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
        let narrow = converted(data.as_bytes(), data.dtype(), self.dtype);
        let wide = converted(&narrow, self.dtype, DType::F32);
        let values = wide.as_chunks().0.iter();
        values.map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }
}

/// Floats of one type in another.
fn converted(bytes: &[u8], from: DType, to: DType) -> Vec<u8> {
    let copy = cast::copy(from, to).expect("the plan has checked the conversion");
    let mut result = vec![0; bytes.len() / from.size() * to.size()];
    copy(bytes, &mut result);
    result
}

impl HfQuantization {
    /// The scale, rounded to `dtype`, of elements whose largest magnitude is `amax`: `amax` over the
    /// largest number in E4M3, and 1 if all elements are zero.
    fn scale(self, amax: f32, dtype: DType) -> f32 {
        if amax == 0.0 {
            return 1.0;
        }
        if self.has_powers_of_two() {
            // The mantissa of the factor is cut off, as in training. No factor is so small that it is
            // no normal number.
            let factor = (LARGEST / amax).min(f32::MAX);
            return 1.0 / f32::from_bits(factor.to_bits() & !0x7f_ffff);
        }
        // Below the normal numbers of its type a scale would lose digits.
        let scale = amax / LARGEST;
        match dtype {
            DType::F16 => f16::from_f32(scale.max(f16::MIN_POSITIVE.to_f32())).to_f32(),
            DType::BF16 => bf16::from_f32(scale.max(f32::MIN_POSITIVE)).to_f32(),
            _ => scale.max(f32::MIN_POSITIVE),
        }
    }
}
