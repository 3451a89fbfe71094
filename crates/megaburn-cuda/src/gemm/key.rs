use burn::tensor::DType;

use super::element::{Element, Fp8Kind};
use super::fp8_matrix::Fp8Scaling;
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
    pub(super) of_a: Element,
    pub(super) of_b: Element,
    pub(super) output: DType,
    pub(super) tokens: Option<Tokens>,
    pub(super) bias: bool,
    pub(super) add: bool,
    pub(super) tf32: bool,
    pub(super) fast_accum: bool,
    /// What shares a scale in `a` and `b`, if they are FP8 matrices.
    pub(super) scaling: [Fp8Scaling; 2],
}

/// The dimension of a product whose size is the number of tokens. The other sizes belong to the
/// layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Tokens {
    /// The rows of `a` and of the result, as in activations and their gradients.
    Rows,
    /// The dimension that is summed over, as in weight gradients.
    Inner,
}

impl Key {
    /// The key of a product of floats. Refuses, with a reason, operands that cuBLASLt would read or
    /// write wrongly, because it checks nothing.
    pub(super) fn new(
        views: [MatrixView; 3],
        [of_a, of_b, output]: [DType; 3],
        bias: Option<(DType, usize)>,
        add: bool,
        tf32: bool,
    ) -> Result<Self, String> {
        if !super::takes(of_a, of_b, of_a) {
            return Err("they must both be bf16, f16 or f32".into());
        }
        if !super::takes(of_a, of_b, output) {
            return Err(format!("the result cannot be {}", output.name()));
        }
        let elements = [of_a, of_b].map(Element::Float);
        let key = Self::of(views, elements, output, add)?;
        let n = key.n;
        if let Some((dtype, len)) = bias
            && (dtype != output || len != n)
        {
            let dtype = dtype.name();
            return Err(format!(
                "a bias of {len} {dtype} elements does not match {n} output columns of {}",
                output.name()
            ));
        }
        let tokens = match (key.a.transposed, key.b.transposed) {
            (false, _) => Some(Tokens::Rows),
            (true, false) => Some(Tokens::Inner),
            (true, true) => None,
        };
        Ok(Self {
            bias: bias.is_some(),
            tf32: tf32 && of_a == DType::F32,
            tokens,
            ..key
        })
    }

    /// The key of a product of FP8 matrices; `b` is the view of the second matrix's transpose.
    /// Refuses what cuBLASLt cannot compute, with the sizes.
    pub(super) fn fp8(
        views: [MatrixView; 3],
        operands: [(Fp8Kind, Fp8Scaling); 2],
        output: DType,
        add: bool,
        tokens: Tokens,
        fast_accum: bool,
    ) -> Result<Self, String> {
        let kinds = operands.map(|(kind, _)| kind);
        let scaling = operands.map(|(_, scaling)| scaling);
        let have_one_scale = scaling.map(|scaling| scaling == Fp8Scaling::Matrix);
        if have_one_scale[0] != have_one_scale[1] || scaling == [Fp8Scaling::Blocks; 2] {
            return Err(format!(
                "cuBLASLt cannot multiply matrices whose scales are {:?} and {:?}",
                scaling[0], scaling[1]
            ));
        }
        if kinds == [Fp8Kind::E5m2; 2] {
            return Err(
                "cuBLASLt cannot multiply e5m2 by e5m2: cast one of the two to e4m3".into(),
            );
        }
        if !matches!(output, DType::BF16 | DType::F16 | DType::F32) {
            return Err(format!(
                "the result cannot be {}, only bf16, f16 or f32",
                output.name()
            ));
        }
        let key = Self::of(views, kinds.map(Element::Fp8), output, add)?;
        if key.a.transposed || !key.b.transposed {
            return Err("the rows of both must be contiguous".into());
        }
        let of_16 = |size: usize| size.is_multiple_of(16);
        let Self {
            n, k, a, b, out, ..
        } = key;
        if !of_16(k) || !of_16(n) {
            return Err(format!(
                "the {k} columns of both and the {n} rows of the second must be multiples of 16: \
                pad them with zeros"
            ));
        }
        if !of_16(a.ld) || !of_16(b.ld) || !of_16(out.ld * output.size()) {
            return Err(format!(
                "rows must begin at multiples of 16 bytes: those of the two begin every {} and \
                {} bytes, those of the result every {}",
                a.ld,
                b.ld,
                out.ld * output.size()
            ));
        }
        Ok(Self {
            tokens: Some(tokens),
            fast_accum: fast_accum && have_one_scale[0],
            scaling,
            ..key
        })
    }

    /// The key of matrices whose sizes match.
    fn of(
        [a, b, out]: [MatrixView; 3],
        [of_a, of_b]: [Element; 2],
        output: DType,
        add: bool,
    ) -> Result<Self, String> {
        let m = a.rows;
        let k = a.cols;
        let n = b.cols;
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
        Ok(Self {
            m,
            n,
            k,
            batch: a.batch,
            a,
            b,
            out,
            of_a,
            of_b,
            output,
            tokens: None,
            bias: false,
            add,
            tf32: false,
            fast_accum: false,
            scaling: [Fp8Scaling::Matrix; 2],
        })
    }

    /// Whether the operands are FP8 matrices, which have scales.
    pub(super) fn is_fp8(&self) -> bool {
        matches!(self.of_a, Element::Fp8(_))
    }

    /// The number of tokens; `None` if it is unknown which size that is.
    pub(super) fn rows(&self) -> Option<usize> {
        self.tokens.map(|tokens| match tokens {
            Tokens::Rows => self.m,
            Tokens::Inner => self.k,
        })
    }

    /// A copy of the key with another number of tokens, if it has one.
    pub(super) fn with_rows(&self, rows: usize) -> Self {
        let mut other = *self;
        match self.tokens {
            Some(Tokens::Rows) => {
                other.m = rows;
                other.a.rows = rows;
                other.out.rows = rows;
            }
            Some(Tokens::Inner) => {
                other.k = rows;
                other.a.cols = rows;
                other.b.rows = rows;
                // Where tokens are the contiguous dimension, their number is the distance of rows.
                if !other.a.transposed {
                    other.a.ld = rows;
                }
                if other.b.transposed {
                    other.b.ld = rows;
                }
            }
            None => {}
        }
        other
    }

    /// A copy of the key with its number of tokens rounded up by at most an eighth. A multiple of
    /// 16 stays one.
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

    /// The views of `[m, k]` and the transpose of `[n, k]`, whose rows are `pitch` apart, and of
    /// their product.
    fn k_major([m, n, k]: [usize; 3], pitch: usize) -> [MatrixView; 3] {
        let view = |rows, cols, pitch| MatrixView::new(&[rows, cols], &[pitch, 1]).unwrap();
        [
            view(m, k, pitch),
            view(n, k, pitch).swapped(),
            view(m, n, n),
        ]
    }

    const MIXED: [(Fp8Kind, Fp8Scaling); 2] = [
        (Fp8Kind::E5m2, Fp8Scaling::Matrix),
        (Fp8Kind::E4m3, Fp8Scaling::Matrix),
    ];

    #[test]
    fn tokens_of_fp8_products_are_where_they_are_said_to_be() {
        let key = |sizes, pitch, tokens| {
            Key::fp8(
                k_major(sizes, pitch),
                MIXED,
                DType::F32,
                true,
                tokens,
                false,
            )
            .unwrap()
        };
        let rows = key([1025, 64, 48], 48, Tokens::Rows).round();
        assert_eq!(rows, key([1152, 64, 48], 48, Tokens::Rows));
        let inner = key([1025, 64, 272], 272, Tokens::Inner).round();
        assert_eq!(inner, key([1025, 64, 288], 288, Tokens::Inner));
        assert_eq!(
            inner.with_rows(0),
            key([1025, 64, 48], 64, Tokens::Inner).with_rows(0)
        );
        assert_ne!(
            inner.with_rows(0),
            key([1025, 48, 48], 64, Tokens::Inner).with_rows(0)
        );
        for size in (16..5000).step_by(16) {
            assert_eq!(key([1, 16, size], size, Tokens::Inner).round().k % 16, 0);
        }
    }

    #[test]
    fn fp8_matrices_that_cublaslt_cannot_multiply_are_refused() {
        let key =
            |views, operands, output| Key::fp8(views, operands, output, false, Tokens::Rows, true);
        let scaled = |scaling: [Fp8Scaling; 2]| scaling.map(|scaling| (Fp8Kind::E4m3, scaling));
        let fine = key(k_major([3, 32, 48], 64), MIXED, DType::BF16).unwrap();
        assert_eq!((fine.m, fine.n, fine.k), (3, 32, 48));
        assert!(fine.fast_accum);
        use Fp8Scaling::{Blocks, Matrix, Neighbors};
        for scaling in [[Neighbors, Blocks], [Blocks, Neighbors], [Neighbors; 2]] {
            let views = k_major([128, 256, 384], 384);
            let fine = key(views, scaled(scaling), DType::BF16).unwrap();
            assert_eq!((fine.scaling, fine.fast_accum), (scaling, false));
        }
        let of_columns = MatrixView::new(&[48, 16], &[16, 1]).unwrap().swapped();
        let [_, b, out] = k_major([16, 32, 48], 48);
        let swapped = [of_columns, b, out];
        for (views, operands, output, why) in [
            (
                k_major([128, 128, 128], 128),
                scaled([Blocks; 2]),
                DType::BF16,
                "Blocks and Blocks",
            ),
            (
                k_major([128, 128, 128], 128),
                scaled([Matrix, Blocks]),
                DType::BF16,
                "Matrix and Blocks",
            ),
            (
                k_major([3, 32, 48], 48),
                [MIXED[0]; 2],
                DType::BF16,
                "e5m2 by e5m2",
            ),
            (k_major([3, 32, 48], 48), MIXED, DType::F64, "cannot be f64"),
            (
                k_major([3, 32, 40], 48),
                MIXED,
                DType::F32,
                "the 40 columns of both",
            ),
            (
                k_major([3, 24, 48], 48),
                MIXED,
                DType::F32,
                "the 24 rows of the second",
            ),
            (
                k_major([3, 32, 48], 56),
                MIXED,
                DType::F32,
                "every 56 and 56 bytes",
            ),
            (swapped, MIXED, DType::F32, "must be contiguous"),
        ] {
            let error = key(views, operands, output).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
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
                "batch sizes [2, 4, 2]",
            ),
            (good, [BF16; 3], Some((F32, 7)), "a bias of 7 f32"),
            (good, [BF16; 3], Some((BF16, 6)), "a bias of 6 bf16"),
        ] {
            let error = key(shapes, dtypes, bias).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
