use std::{fmt, ops::Range};

use burn::tensor::{DType, TensorData};

use crate::{
    buffer::filled,
    cast,
    error::CheckpointError,
    source::{TensorHeader, TensorSource},
    values::{BATCH, convert},
};

/// The element-wise weighted mean of sources that have the same tensors. It is computed in f64 and
/// rounded once to the element type in which the tensors are stored.
///
/// Source: Wortsman et al., "Model soups", arXiv 2203.05482.
pub struct Average<'a> {
    /// The sources and their weights, whose sum is 1.
    sources: Vec<(&'a dyn TensorSource, f64)>,
    headers: Vec<TensorHeader>,
}

impl<'a> Average<'a> {
    /// The mean of `sources`, each with a weight. The weights are divided by their sum.
    ///
    /// # Errors
    /// - There is no source, a weight is negative or not finite, or the sum of the weights is not
    ///   positive and finite.
    /// - A tensor is missing in one of the sources, or its shape or element type differs there.
    /// - A tensor is not of floats.
    pub fn new(sources: Vec<(&'a dyn TensorSource, f64)>) -> Result<Self, CheckpointError> {
        let sum: f64 = sources.iter().map(|(_, weight)| weight).sum();
        let is_weight = |weight: f64| weight.is_finite() && weight >= 0.0;
        let has_weights = sources.iter().all(|(_, weight)| is_weight(*weight));
        if !has_weights || !sum.is_finite() || sum <= 0.0 {
            let weights: Vec<_> = sources.iter().map(|(_, weight)| *weight).collect();
            return Err(CheckpointError::Weights { weights });
        }
        let first = sources[0].0;
        let headers = first.headers();
        if let Some(header) = headers.iter().find(|header| !header.dtype.is_float()) {
            let name = header.name.clone();
            let why = format!("its element type is {:?}, not a float", header.dtype);
            return Err(CheckpointError::Averaged { name, why });
        }
        for (source, _) in &sources[1..] {
            check_same(&headers, first, &source.headers(), *source)?;
        }
        // A source without weight does not count, whatever its values are.
        let sources = sources
            .into_iter()
            .filter(|(_, weight)| *weight > 0.0)
            .map(|(source, weight)| (source, weight / sum))
            .collect();
        Ok(Self { sources, headers })
    }
}

impl fmt::Debug for Average<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Average")
            .field("label", &self.label())
            .finish_non_exhaustive()
    }
}

/// Refuses two sources whose tensors differ in name, shape or element type.
fn check_same(
    headers: &[TensorHeader],
    first: &dyn TensorSource,
    others: &[TensorHeader],
    other: &dyn TensorSource,
) -> Result<(), CheckpointError> {
    let [of_first, of_other] = [first.label(), other.label()];
    let refuse = |name: &str, why: String| {
        let name = name.to_string();
        Err(CheckpointError::Averaged { name, why })
    };
    let lacks = |headers: &[TensorHeader], name: &str| {
        headers
            .binary_search_by(|header| header.name.as_str().cmp(name))
            .is_err()
    };
    if let Some(extra) = others.iter().find(|header| lacks(headers, &header.name)) {
        return refuse(&extra.name, format!("{of_first} does not have it"));
    }
    if let Some(extra) = headers.iter().find(|header| lacks(others, &header.name)) {
        return refuse(&extra.name, format!("{of_other} does not have it"));
    }
    for (a, b) in headers.iter().zip(others) {
        if a.shape != b.shape {
            let why = format!(
                "its shape is {:?} in {of_first} and {:?} in {of_other}",
                a.shape, b.shape
            );
            return refuse(&a.name, why);
        }
        if a.dtype != b.dtype {
            let why = format!(
                "it is {:?} in {of_first} and {:?} in {of_other}; convert one of them first with \
                `megaburn checkpoint weights --dtype`",
                a.dtype, b.dtype
            );
            return refuse(&a.name, why);
        }
    }
    Ok(())
}

impl TensorSource for Average<'_> {
    fn label(&self) -> String {
        let labels: Vec<_> = self
            .sources
            .iter()
            .map(|(source, _)| source.label())
            .collect();
        format!("the mean of {}", labels.join(", "))
    }

    fn headers(&self) -> Vec<TensorHeader> {
        self.headers.clone()
    }

    fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<TensorData, CheckpointError> {
        let mut mean: Vec<f64> = Vec::new();
        let mut batch = Vec::new();
        let mut last = None;
        for (source, weight) in &self.sources {
            let data = source.read_rows(name, rows.clone())?;
            let dtype = data.dtype();
            mean.resize(data.num_elements(), 0.0);
            batch.resize(BATCH.min(mean.len()), 0.0);
            let parts = data.as_bytes().chunks(BATCH * dtype.size());
            for (bytes, mean) in parts.zip(mean.chunks_mut(BATCH)) {
                let values = &mut batch[..mean.len()];
                convert(dtype, bytes, values);
                for (mean, value) in mean.iter_mut().zip(values) {
                    *mean += weight * *value;
                }
            }
            last = Some((data.shape().to_vec(), dtype));
        }
        let (shape, dtype) = last.expect("an average has a source");
        let copy = cast::copy(DType::F64, dtype).expect("the tensors are of floats");
        filled(shape, dtype, |bytes| {
            copy(bytemuck::cast_slice(&mean), bytes);
            Ok(())
        })
    }
}
