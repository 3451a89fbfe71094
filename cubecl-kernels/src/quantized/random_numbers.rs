//! The random numbers that a layer is quantised with.

use std::ops::Range;
use std::sync::Arc;

use megaburn_mesh::{PositionRng, Purpose};

use super::recipe::SummedDim;

/// What a layer draws at random when it is quantised: how each element of the gradient is rounded,
/// and the signs of the Hadamard transform.
///
/// The numbers are a function of the seed, the layer, the step and the position of an element in
/// the whole gradient, so that ranks that hold parts of it draw those of one rank, and a resumed run
/// draws those of an uninterrupted one. The signs are a function of the seed.
///
/// ```
/// use megaburn_kernels::RandomNumbers;
///
/// // The second half of 32 tokens, and the first half of 64 features, in step 7.
/// let numbers = RandomNumbers::new(42, "blocks.0.mlp.up")
///     .with_step(7)
///     .with_rows([16..32], 0)
///     .with_cols([0..32], 64);
/// ```
#[derive(Clone, Debug)]
pub struct RandomNumbers {
    signs: u16,
    rng: PositionRng,
    step: u64,
    rows: Option<(Arc<[Range<usize>]>, u64)>,
    cols: Option<(Arc<[Range<usize>]>, usize)>,
}

/// Where a layer's random numbers are in their stream.
#[derive(Clone, Debug)]
pub(super) struct Drawn {
    pub(super) rng: PositionRng,
    /// The index of the first element of the first row of the whole matrix.
    pub(super) first: u64,
    /// The index of the next row's first element, less that of a row.
    pub(super) width: u64,
    /// The rows of the whole matrix.
    pub(super) rows: Vec<Range<usize>>,
    /// The columns of the whole matrix.
    pub(super) cols: Vec<Range<usize>>,
}

impl RandomNumbers {
    /// The numbers of a layer of a run in step 0, whose gradient no other rank has a part of.
    pub fn new(seed: u64, path: &str) -> Self {
        Self {
            signs: PositionRng::new(seed, Purpose::Quantization, "hadamard").bits(0) as u16,
            rng: PositionRng::new(seed, Purpose::Quantization, path),
            step: 0,
            rows: None,
            cols: None,
        }
    }

    /// The numbers of a training step.
    #[must_use]
    pub fn with_step(mut self, step: u64) -> Self {
        self.step = step;
        self
    }

    /// The numbers of a gradient whose rows are these of the whole gradient of a micro-batch. The
    /// micro-batches before it in the step have `before` rows in all.
    #[must_use]
    pub fn with_rows(mut self, rows: impl Into<Arc<[Range<usize>]>>, before: u64) -> Self {
        self.rows = Some((rows.into(), before));
        self
    }

    /// The numbers of a gradient whose columns are these of `width` of the whole gradient.
    #[must_use]
    pub fn with_cols(mut self, cols: impl Into<Arc<[Range<usize>]>>, width: usize) -> Self {
        self.cols = Some((cols.into(), width));
        self
    }

    /// The signs of the Hadamard transform: bit `i` is set if row `i` is negated.
    pub(super) fn signs(&self) -> u16 {
        self.signs
    }

    /// The numbers for a gradient `[r, c]`, quantised for a product that sums over a dimension. Its
    /// two operands are rounded independently.
    pub(super) fn drawn(&self, [rows, cols]: [usize; 2], summed: SummedDim) -> Drawn {
        let stream = 2 * self.step + u64::from(summed == SummedDim::Rows);
        let (own, width) = match &self.cols {
            Some((own, width)) => (cut(own, cols), *width),
            None => (cut(&[], cols), cols),
        };
        let (held, before) = match &self.rows {
            Some((held, before)) => (cut(held, rows), *before),
            None => (cut(&[], rows), 0),
        };
        let width = width as u64;
        Drawn {
            rng: self.rng.with_stream(stream),
            first: before * width,
            width,
            rows: held,
            cols: own,
        }
    }
}

/// The first `len` positions of some ranges, which go on after the last: a transformed matrix is
/// padded at its end.
fn cut(ranges: &[Range<usize>], len: usize) -> Vec<Range<usize>> {
    let mut left = len;
    let mut all = Vec::with_capacity(ranges.len() + 1);
    for range in ranges {
        let end = range.end.min(range.start + left);
        left -= end - range.start;
        all.push(range.start..end);
    }
    let end = all.last().map_or(0, |range| range.end);
    all.push(end..end + left);
    all.retain(|range| !range.is_empty());
    all
}

impl Drawn {
    /// A number in `[0, 1)` for each element, row by row.
    pub(super) fn uniform(&self) -> Vec<f32> {
        let len = |ranges: &[Range<usize>]| ranges.iter().map(Range::len).sum::<usize>();
        let cols = len(&self.cols);
        let mut all = vec![0.0; len(&self.rows) * cols];
        let rows = self.rows.iter().cloned().flatten();
        for (row, mut out) in rows.zip(all.chunks_mut(cols.max(1))) {
            for range in &self.cols {
                let (own, rest) = out.split_at_mut(range.len());
                let first = self.first + row as u64 * self.width + range.start as u64;
                self.rng.fill_uniform(first, own);
                out = rest;
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: [usize; 2] = [48, 10];

    fn numbers() -> RandomNumbers {
        RandomNumbers::new(3, "layer").with_step(5)
    }

    #[test]
    fn parts_draw_the_numbers_of_the_whole() {
        let whole = numbers().drawn(WHOLE, SummedDim::Rows).uniform();
        let part = numbers()
            .with_rows([8..16, 40..48], 0)
            .with_cols([1..3, 7..10], 10);
        let part = part.drawn([16, 5], SummedDim::Rows).uniform();
        for (i, found) in part.into_iter().enumerate() {
            let row = [8, 40][i / 5 / 8] + i / 5 % 8;
            let col = [1, 2, 7, 8, 9][i % 5];
            assert_eq!(found, whole[row * 10 + col]);
        }
        let later = numbers()
            .with_rows([0..2, 2..4], 2)
            .drawn([4, 10], SummedDim::Rows);
        assert_eq!(later.uniform(), whole[20..60]);
    }

    #[test]
    fn other_layers_steps_and_operands_draw_other_numbers() {
        let base = numbers();
        let of = |numbers: &RandomNumbers, summed| numbers.drawn([4, 4], summed).uniform();
        let expected = of(&base, SummedDim::Rows);
        assert_eq!(of(&numbers(), SummedDim::Rows), expected);
        assert_ne!(of(&base, SummedDim::Cols), expected);
        let others = [
            base.with_step(6),
            RandomNumbers::new(3, "other").with_step(5),
            RandomNumbers::new(4, "layer").with_step(5),
        ];
        for other in &others {
            assert_ne!(of(other, SummedDim::Rows), expected);
        }
        let [same, seed] = [1, 2].map(|i| others[i].signs());
        assert_eq!(same, numbers().signs());
        assert_ne!(seed, numbers().signs());
    }

    #[test]
    fn rows_of_padding_follow_the_last() {
        assert_eq!(cut(&[4..6, 10..12], 7), [4..6, 10..12, 12..15]);
        assert_eq!(cut(&[4..6, 10..12], 3), [4..6, 10..11]);
        assert_eq!(cut(&[], 2), std::slice::from_ref(&(0..2)));
    }
}
