use burn::tensor::DType;

use crate::tensor::MatrixView;

/// Everything that determines how a product is computed, except the addresses of its matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) batch: usize,
    pub(super) a: MatrixView,
    pub(super) b: MatrixView,
    pub(super) out: MatrixView,
    pub(super) input: DType,
    pub(super) output: DType,
    pub(super) bias: bool,
    pub(super) add: bool,
    pub(super) tf32: bool,
}

impl Key {
    /// Refuses, with a reason, operands that cuBLASLt would read or write wrongly, because it
    /// checks nothing.
    pub(super) fn new(
        [a, b, out]: [MatrixView; 3],
        [of_a, of_b, output]: [DType; 3],
        bias: Option<(DType, usize)>,
        add: bool,
        tf32: bool,
    ) -> Result<Self, String> {
        let m = a.rows;
        let k = a.cols;
        let n = b.cols;
        if !super::takes(of_a, of_b, of_a) {
            return Err("they must both be bf16, f16 or f32".into());
        }
        if !super::takes(of_a, of_b, output) {
            return Err(format!("the result cannot be {}", output.name()));
        }
        if b.rows != k || (out.rows, out.cols) != (m, n) {
            let out = [out.rows, out.cols];
            return Err(format!(
                "their sizes do not match each other or the result, {out:?}"
            ));
        }
        if (a.batch, b.batch) != (out.batch, out.batch) {
            let batches = [a.batch, b.batch, out.batch];
            return Err(format!("the batch sizes {batches:?} differ"));
        }
        if let Some((dtype, len)) = bias
            && (dtype != output || len != n)
        {
            let dtype = dtype.name();
            return Err(format!(
                "a bias of {len} {dtype} elements does not match {n} output columns of {}",
                output.name()
            ));
        }
        let input = of_a;
        let bias = bias.is_some();
        let tf32 = tf32 && input == DType::F32;
        Ok(Self {
            m,
            n,
            k,
            batch: a.batch,
            a,
            b,
            out,
            input,
            output,
            bias,
            add,
            tf32,
        })
    }
}

impl Key {
    /// The token dimension: the rows of `a` and the result or, if `a` is transposed as for weight
    /// gradients, the dimension that is summed over. The other sizes belong to the layer. `None` if
    /// both are transposed.
    pub(super) fn rows(&self) -> Option<usize> {
        match (self.a.transposed, self.b.transposed) {
            (false, _) => Some(self.m),
            (true, false) => Some(self.k),
            (true, true) => None,
        }
    }

    /// A copy of the key with another number of rows, if it has one.
    pub(super) fn with_rows(&self, rows: usize) -> Self {
        let mut other = *self;
        if !self.a.transposed {
            other.m = rows;
            other.a.rows = rows;
            other.out.rows = rows;
        } else if !self.b.transposed {
            other.k = rows;
            other.a.cols = rows;
            other.b.rows = rows;
        }
        other
    }

    /// A copy of the key with its number of rows rounded up by at most an eighth.
    pub(super) fn round(&self) -> Self {
        let up = |n: usize| n.next_multiple_of((n.next_power_of_two() / 16).max(1));
        self.rows().map_or(*self, |rows| self.with_rows(up(rows)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_rounded_and_no_other_size() {
        use DType::{BF16, F32};
        let view = |rows, cols, transposed| {
            let ld = if transposed { rows } else { cols };
            MatrixView {
                rows,
                cols,
                ld,
                transposed,
                batch: 1,
                batch_stride: 0,
            }
        };
        let key = |[m, k, n]: [usize; 3], a_transposed, b_transposed, out| {
            let a = view(m, k, a_transposed);
            let b = view(k, n, b_transposed);
            Key::new(
                [a, b, view(m, n, false)],
                [BF16, BF16, out],
                None,
                false,
                false,
            )
            .unwrap()
        };
        for is_transposed in [false, true] {
            let of = |rows| key([rows, 48, 7], false, is_transposed, BF16).round();
            assert_eq!(of(1025), of(1152));
            assert_eq!(of(1025), key([1152, 48, 7], false, is_transposed, BF16));
            assert_ne!(of(1025), of(1153));
        }
        let of = |rows| key([48, rows, 7], true, false, F32).round();
        assert_eq!(of(1000), key([48, 1024, 7], true, false, F32));
        assert_eq!(of(5), key([48, 5, 7], true, false, F32));
        let both = key([48, 1000, 7], true, true, F32);
        assert_eq!(both.round(), both);
    }

    fn view(shape: [usize; 3]) -> MatrixView {
        let [_, rows, cols] = shape;
        MatrixView::new(&shape, &[rows * cols, cols, 1]).unwrap()
    }

    #[test]
    fn what_does_not_fit_is_refused_with_the_numbers() {
        use DType::{BF16, F16, F32, F64};
        let good = [[2, 3, 5], [2, 5, 7], [2, 3, 7]];
        let key = |shapes: [[usize; 3]; 3], dtypes, bias| {
            Key::new(shapes.map(view), dtypes, bias, false, true)
        };
        let fine = key(good, [BF16, BF16, F32], Some((F32, 7))).unwrap();
        assert_eq!(
            (fine.m, fine.n, fine.k, fine.batch, fine.tf32),
            (3, 7, 5, 2, false)
        );
        for (shapes, dtypes, bias, why) in [
            (good, [BF16, F16, F32], None, "both be bf16, f16 or f32"),
            (good, [F64, F64, F64], None, "both be bf16, f16 or f32"),
            (good, [F32, F32, BF16], None, "the result cannot be bf16"),
            (
                [[2, 3, 5], [2, 6, 7], [2, 3, 7]],
                [F32; 3],
                None,
                "do not match",
            ),
            (
                [[2, 3, 5], [2, 5, 7], [2, 3, 8]],
                [F32; 3],
                None,
                "the result, [3, 8]",
            ),
            (
                [[2, 3, 5], [4, 5, 7], [2, 3, 7]],
                [F32; 3],
                None,
                "batches of [2, 4, 2]",
            ),
            (good, [BF16; 3], Some((F32, 7)), "a bias of 7 f32"),
            (good, [BF16; 3], Some((BF16, 6)), "a bias of 6 bf16"),
        ] {
            let error = key(shapes, dtypes, bias).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
