use megaburn_mesh::PositionRng;

/// Identifies the dropout mask of a tensor: the random stream, and the position of the tensor in
/// the global tensor.
///
/// ```
/// use megaburn_kernels::DropoutKey;
/// use megaburn_mesh::{PositionRng, Purpose};
///
/// // The second of two sequence shards of `[s, b, h] = [8, 2, 16]`, in micro-batch 5.
/// let rng = PositionRng::new(42, Purpose::Dropout, "layers.3.attn").with_stream(5);
/// let key = DropoutKey::new(rng, &[8, 2, 16]).with_offset(0, 4);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct DropoutKey {
    rng: PositionRng,
    global_shape: Vec<usize>,
    offsets: Vec<usize>,
}

impl DropoutKey {
    /// The mask of an unsharded tensor of `global_shape`, drawn from `rng`. Use one stream per
    /// module path, for [`Purpose::Dropout`](megaburn_mesh::Purpose::Dropout), and advance it with
    /// [`with_stream`](PositionRng::with_stream) for each step and micro-batch.
    pub fn new(rng: PositionRng, global_shape: &[usize]) -> Self {
        Self {
            rng,
            global_shape: global_shape.to_vec(),
            offsets: vec![0; global_shape.len()],
        }
    }

    /// Declares the tensor a shard that starts at `offset` of dimension `dim` in the global tensor.
    ///
    /// # Panics
    /// If there is no such dimension.
    pub fn with_offset(mut self, dim: usize, offset: usize) -> Self {
        let rank = self.offsets.len();
        assert!(
            dim < rank,
            "dropout key: dimension {dim} is out of range for a tensor of {rank} dimensions"
        );
        self.offsets[dim] = offset;
        self
    }

    /// Moves the shard `by` elements further in `dim`.
    pub(crate) fn moved(mut self, dim: usize, by: usize) -> Self {
        self.offsets[dim] += by;
        self
    }

    /// The stream that the mask is drawn from.
    #[cfg(feature = "cuda")]
    pub(crate) fn rng(&self) -> &PositionRng {
        &self.rng
    }

    /// The index of the shard's first element in the stream, and the index stride of each
    /// dimension.
    pub(crate) fn numbers(&self) -> (u64, Vec<u64>) {
        let mut by = vec![1; self.offsets.len()];
        for dim in (1..by.len()).rev() {
            by[dim - 1] = by[dim] * self.global_shape[dim] as u64;
        }
        let first = by
            .iter()
            .zip(&self.offsets)
            .map(|(by, &offset)| by * offset as u64)
            .sum();
        (first, by)
    }

    /// Panics if a shard of `shape` does not lie in the global shape.
    pub(crate) fn check(&self, shape: &[usize]) {
        let global = &self.global_shape;
        assert_eq!(
            shape.len(),
            global.len(),
            "dropout: the shard {shape:?} and the global tensor {global:?} have different \
            numbers of dimensions"
        );
        for (dim, ((&len, &start), &size)) in
            shape.iter().zip(&self.offsets).zip(global).enumerate()
        {
            let end = start.saturating_add(len);
            assert!(
                end <= size,
                "dropout: elements {start}..{end} of dimension {dim} are outside {global:?}"
            );
        }
    }

    /// The mask factors of a shard of `shape`, in row-major order: 0 for a dropped element,
    /// `1 / (1 - p)` for a kept one.
    pub(crate) fn factors(&self, shape: &[usize], p: f64) -> Vec<f32> {
        let mut factors = vec![0.0; shape.iter().product()];
        let row = shape.last().copied().unwrap_or(1).max(1);
        let starts = self.row_starts(shape);
        for (i, out) in factors.chunks_mut(row).enumerate() {
            self.rng.fill_uniform(starts.of(i), out);
        }
        let (p, kept) = (p as f32, kept(p));
        for factor in &mut factors {
            *factor = if *factor < p { 0.0 } else { kept };
        }
        factors
    }

    /// The positions of a shard's rows in the global tensor.
    pub(super) fn row_starts(&self, shape: &[usize]) -> RowStarts {
        let (first, by) = self.numbers();
        let mut dims: Vec<(usize, u64)> = Vec::new();
        for (&size, by) in shape.iter().zip(by).rev().skip(1) {
            match dims.last_mut() {
                // Rows are equally spaced across both dimensions, so merge them.
                Some((inner, inner_by)) if by == *inner as u64 * *inner_by => *inner *= size,
                _ if size != 1 => dims.push((size, by)),
                _ => {}
            }
        }
        RowStarts { first, dims }
    }
}

/// The factor of elements that are kept.
pub(crate) fn kept(p: f64) -> f32 {
    (1.0 / (1.0 - p)) as f32
}

/// The positions in the global tensor at which the rows (of the last dimension) of a shard begin.
#[derive(Debug, PartialEq)]
pub(super) struct RowStarts {
    /// The index of the first row.
    pub(super) first: u64,
    /// Size and index stride of each dimension before the last, from the innermost outwards.
    /// Dimensions across which rows are equally spaced are merged into one.
    pub(super) dims: Vec<(usize, u64)>,
}

impl RowStarts {
    fn of(&self, mut row: usize) -> u64 {
        self.dims.iter().fold(self.first, |index, &(size, by)| {
            let at = row % size;
            row /= size;
            index + at as u64 * by
        })
    }
}

#[cfg(test)]
mod tests {
    use megaburn_mesh::Purpose;

    use super::*;

    #[test]
    fn the_mask_is_the_streams_number_at_the_global_index() {
        let rng = PositionRng::new(1, Purpose::Dropout, "x").with_stream(9);
        let key = DropoutKey::new(rng, &[4, 6, 5])
            .with_offset(0, 1)
            .with_offset(2, 2);
        let factors = key.factors(&[3, 6, 3], 0.4);
        for (i, factor) in factors.into_iter().enumerate() {
            let s = 1 + i / 18;
            let b = i / 3 % 6;
            let h = 2 + i % 3;
            let dropped = rng.uniform((s * 30 + b * 5 + h) as u64) < 0.4;
            assert_eq!(factor == 0.0, dropped, "element {i}");
        }
    }

    #[test]
    fn dimensions_that_are_one_stretch_of_rows_are_one() {
        let key = DropoutKey::new(PositionRng::new(1, Purpose::Dropout, "x"), &[4, 6, 5, 8]);
        let dims = |key: &DropoutKey, shape: [usize; 4]| key.row_starts(&shape).dims;
        assert_eq!(dims(&key, [4, 6, 5, 8]), [(120, 8)]);
        assert_eq!(dims(&key, [4, 6, 5, 3]), [(120, 8)]);
        assert_eq!(dims(&key, [4, 3, 5, 8]), [(15, 8), (4, 240)]);
        assert_eq!(dims(&key, [2, 6, 1, 8]), [(12, 40)]);
        assert_eq!(dims(&key, [1, 1, 1, 8]), []);
        assert_eq!(key.with_offset(1, 2).row_starts(&[1, 2, 2, 8]).first, 80);
    }
}
