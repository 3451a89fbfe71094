//! Copies rectangles of matrices between byte buffers, transposing and casting them.

use burn::tensor::DType;

use crate::cast;

/// A rectangle of a row-major matrix in memory, in elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MatrixBlock {
    /// Offset of the first element.
    pub(crate) start: usize,
    /// Distance from the start of a row to the start of the next.
    pub(crate) stride: usize,
}

/// Size of a tile of the destination in elements: 64 KiB of f32, which stay in the L2 cache. Each
/// line of the source and the destination is touched by one tile only (or two, at its ends). Tiles
/// write long runs, because writing to another page of the destination each time is slow.
const ROWS: usize = 64;
const COLS: usize = 256;
/// Bytes of the widest element.
const WIDEST: usize = 8;

/// Copies rectangles of elements from one type to another.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MatrixCopy {
    copy: cast::Copy,
    from: usize,
    to: usize,
}

impl MatrixCopy {
    /// `None` if [`cast::copy`] returns `None`.
    pub(crate) fn new(from: DType, to: DType) -> Option<Self> {
        Some(Self {
            copy: cast::copy(from, to)?,
            from: from.size(),
            to: to.size(),
        })
    }

    /// Copies consecutive elements to the destination, starting at element `to`.
    pub(crate) fn run(&self, source: &[u8], dest: &mut [u8], to: usize) {
        let bytes = source.len() / self.from * self.to;
        (self.copy)(source, &mut dest[to * self.to..][..bytes]);
    }

    /// Copies `rows` rows of `cols` elements.
    pub(crate) fn straight(
        &self,
        (source, a): (&[u8], MatrixBlock),
        (dest, b): (&mut [u8], MatrixBlock),
        (rows, cols): (usize, usize),
    ) {
        // Full rows on both sides form a single run.
        let whole = a.stride == cols && b.stride == cols;
        let (rows, cols) = if whole {
            (1, rows * cols)
        } else {
            (rows, cols)
        };
        for row in 0..rows {
            let from = a.start + row * a.stride;
            let to = b.start + row * b.stride;
            (self.copy)(
                &source[from * self.from..(from + cols) * self.from],
                &mut dest[to * self.to..(to + cols) * self.to],
            );
        }
    }

    /// Copies a source of `cols` rows of `rows` elements to `rows` rows of `cols` elements.
    pub(crate) fn transposed(
        &self,
        source: (&[u8], MatrixBlock),
        dest: (&mut [u8], MatrixBlock),
        shape: (usize, usize),
    ) {
        match self.to {
            1 => self.tiles::<1>(source, dest, shape),
            2 => self.tiles::<2>(source, dest, shape),
            4 => self.tiles::<4>(source, dest, shape),
            _ => self.tiles::<8>(source, dest, shape),
        }
    }

    fn tiles<const N: usize>(
        &self,
        (source, a): (&[u8], MatrixBlock),
        (dest, b): (&mut [u8], MatrixBlock),
        (rows, cols): (usize, usize),
    ) {
        let mut tile = [0; ROWS * COLS * WIDEST];
        let tile = &mut tile[..ROWS * COLS * N];
        let dest = dest.as_chunks_mut::<N>().0;
        for col in (0..cols).step_by(COLS) {
            let num_cols = COLS.min(cols - col);
            for row in (0..rows).step_by(ROWS) {
                let num_rows = ROWS.min(rows - row);
                for (c, line) in tile.chunks_mut(ROWS * N).take(num_cols).enumerate() {
                    let from = (a.start + (col + c) * a.stride + row) * self.from;
                    let run = &source[from..from + num_rows * self.from];
                    (self.copy)(run, &mut line[..num_rows * N]);
                }
                let lines = &tile.as_chunks::<N>().0.as_chunks::<ROWS>().0[..num_cols];
                for r in 0..num_rows {
                    let to = b.start + (row + r) * b.stride + col;
                    let run = &mut dest[to..to + num_cols];
                    run.iter_mut()
                        .zip(lines)
                        .for_each(|(to, line)| *to = line[r]);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Rectangles anywhere in their matrices, for every element width.
        #[test]
        fn a_rectangle_lands_where_it_belongs_and_nothing_else_changes(
            (rows, cols) in (1usize..150, 1usize..300),
            (start_a, more_a, start_b, more_b) in (0usize..70, 0usize..9, 0usize..70, 0usize..9),
            size in prop::sample::select(vec![DType::U8, DType::BF16, DType::F32, DType::F64]),
            seed in any::<u8>(),
        ) {
            let copy = MatrixCopy::new(size, size).unwrap();
            let n = size.size();
            for transposed in [false, true] {
                let (lines, width) = if transposed { (cols, rows) } else { (rows, cols) };
                let a = MatrixBlock { start: start_a, stride: width + more_a };
                let b = MatrixBlock { start: start_b, stride: cols + more_b };
                let len = (start_a + lines * a.stride) * n;
                let source: Vec<u8> = (0..len).map(|i| (i as u8).wrapping_mul(31) ^ (i >> 8) as u8 ^ seed).collect();
                let mut dest = vec![0xAB; (start_b + rows * b.stride) * n];
                let mut expected = dest.clone();
                for r in 0..rows {
                    for c in 0..cols {
                        let from = a.start + if transposed { c * a.stride + r } else { r * a.stride + c };
                        let to = b.start + r * b.stride + c;
                        expected[to * n..(to + 1) * n].copy_from_slice(&source[from * n..(from + 1) * n]);
                    }
                }
                match transposed {
                    false => copy.straight((&source, a), (&mut dest, b), (rows, cols)),
                    true => copy.transposed((&source, a), (&mut dest, b), (rows, cols)),
                }
                prop_assert!(dest == expected, "{rows} x {cols}, transposed: {transposed}");
            }
        }
    }
}
