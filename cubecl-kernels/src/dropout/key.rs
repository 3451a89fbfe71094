use megaburn_mesh::PositionRng;

/// Where a tensor's dropout mask comes from: the random stream, and which part of the global tensor
/// it is.
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
    /// The mask of a whole tensor of `global_shape`, drawn from `rng` (a stream per path, for
    /// [`Purpose::Dropout`](megaburn_mesh::Purpose::Dropout), advanced by
    /// [`with_stream`](PositionRng::with_stream) each step and micro-batch).
    pub fn new(rng: PositionRng, global_shape: &[usize]) -> Self {
        Self { rng, global_shape: global_shape.to_vec(), offsets: vec![0; global_shape.len()] }
    }

    /// The tensor is a shard that starts at `offset` of `dim` in the global tensor.
    ///
    /// # Panics
    /// If there is no such dimension.
    pub fn with_offset(mut self, dim: usize, offset: usize) -> Self {
        let rank = self.offsets.len();
        assert!(dim < rank, "dropout key: dim {dim} of a tensor of {rank} dims");
        self.offsets[dim] = offset;
        self
    }

    /// The same with the shard `by` further in `dim`.
    pub(crate) fn moved(mut self, dim: usize, by: usize) -> Self {
        self.offsets[dim] += by;
        self
    }

    /// The stream that the mask is drawn from.
    #[cfg(feature = "cuda")]
    pub(crate) fn rng(&self) -> &PositionRng {
        &self.rng
    }

    /// The number of the shard's first element in the stream, and how many numbers further the next
    /// element of each dimension is.
    #[cfg(feature = "cuda")]
    pub(crate) fn numbers(&self) -> (u64, Vec<u64>) {
        let mut by = vec![1; self.offsets.len()];
        for dim in (1..by.len()).rev() {
            by[dim - 1] = by[dim] * self.global_shape[dim] as u64;
        }
        let first = by.iter().zip(&self.offsets).map(|(by, &offset)| by * offset as u64).sum();
        (first, by)
    }

    /// Panics if a shard of `shape` does not lie in the global shape.
    pub(crate) fn check(&self, shape: &[usize]) {
        let global = &self.global_shape;
        assert_eq!(shape.len(), global.len(), "dropout: a shard {shape:?} of a tensor {global:?}");
        for (dim, ((&len, &start), &size)) in
            shape.iter().zip(&self.offsets).zip(global).enumerate()
        {
            let end = start + len;
            assert!(end <= size, "dropout: elements {start}..{end} of dim {dim} of {global:?}");
        }
    }

    /// For a shard of `shape`, in row-major order: 0 where an element is dropped, `1 / (1 - p)`
    /// where it is kept.
    pub(crate) fn factors(&self, shape: &[usize], p: f64) -> Vec<f32> {
        let mut factors = vec![0.0; shape.iter().product()];
        let row = shape.last().copied().unwrap_or(1).max(1);
        for (i, out) in factors.chunks_mut(row).enumerate() {
            self.rng.fill_uniform(self.global_index(shape, i * row), out);
        }
        let (p, kept) = (p as f32, (1.0 / (1.0 - p)) as f32);
        for factor in &mut factors {
            *factor = if *factor < p { 0.0 } else { kept };
        }
        factors
    }

    /// The index in the global tensor of a shard's `local` element.
    fn global_index(&self, shape: &[usize], mut local: usize) -> u64 {
        let (mut index, mut stride) = (0, 1);
        for dim in (0..shape.len()).rev() {
            index += (self.offsets[dim] + local % shape[dim]) as u64 * stride;
            local /= shape[dim];
            stride *= self.global_shape[dim] as u64;
        }
        index
    }
}

#[cfg(test)]
mod tests {
    use megaburn_mesh::Purpose;

    use super::*;

    #[test]
    fn the_mask_is_the_streams_number_at_the_global_index() {
        let rng = PositionRng::new(1, Purpose::Dropout, "x").with_stream(9);
        let key = DropoutKey::new(rng, &[4, 6, 5]).with_offset(0, 1).with_offset(2, 2);
        let factors = key.factors(&[3, 6, 3], 0.4);
        for (i, factor) in factors.into_iter().enumerate() {
            let (s, b, h) = (1 + i / 18, i / 3 % 6, 2 + i % 3);
            let dropped = rng.uniform((s * 30 + b * 5 + h) as u64) < 0.4;
            assert_eq!(factor == 0.0, dropped, "element {i}");
        }
    }
}
