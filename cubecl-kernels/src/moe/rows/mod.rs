//! Permute and unpermute: gathers rows of a matrix by index, and sums them back.
//!
//! Source: Megatron-LM `megatron/core/transformer/moe/moe_utils.py`, `permute` and `unpermute`.

#[cfg(feature = "cuda")]
mod kernels;
#[cfg(feature = "cuda")]
mod launch;
mod reference;

#[cfg(feature = "cuda")]
use burn::tensor::DType;
use burn::tensor::{Int, Tensor};
use megaburn_autograd::arg_check::{self, float, int};

/// Gathers the rows that `index` names, in its order. A row may be named several times or never.
/// The result has no autodiff graph.
///
/// # Shapes
/// `x`: `[m, n]`, `index`: `[r]`, result `[r, n]` in the dtype of `x`
///
/// # Panics
/// On a CPU for an index without a row. On a GPU the host does not read the indices; that row of
/// the result is NaN.
pub fn permute(x: Tensor<2>, index: Tensor<1, Int>) -> Tensor<2> {
    arg_check::check("permute", [float("x", &x), int("index", &index)]);
    let [m, n] = x.dims();
    let [r] = index.dims();
    check("permute", m);
    if r * n == 0 {
        return Tensor::empty([r, n], (&x.device(), x.dtype()));
    }
    #[cfg(feature = "cuda")]
    if super::launch::on_gpu(&x) {
        return launch::permute(x, index);
    }
    reference::permute(x, index)
}

/// Sums the rows that each row of `index` names; the index `m` names no row.
///
/// This is the transpose of [`permute`]: rows that it gathers several times are summed here, in f32
/// and in the order of `index`, so the result is deterministic. The result has no autodiff graph.
///
/// # Shapes
/// `y`: `[m, n]`, `index`: `[t, k]`, result `[t, n]` in the dtype of `y`
///
/// # Panics
/// As [`permute`].
pub fn unpermute(y: Tensor<2>, index: Tensor<2, Int>) -> Tensor<2> {
    arg_check::check("unpermute", [float("y", &y), int("index", &index)]);
    let [m, n] = y.dims();
    let [t, k] = index.dims();
    check("unpermute", m);
    if t * n == 0 || k == 0 {
        return Tensor::zeros([t, n], (&y.device(), y.dtype()));
    }
    #[cfg(feature = "cuda")]
    if y.dtype() != DType::F64 && super::launch::on_gpu(&y) {
        return launch::unpermute(y, index);
    }
    reference::unpermute(y, index)
}

/// Panics if there are more rows than the kernels can count in 32 bits.
fn check(op: &str, rows: usize) {
    assert!(
        rows < i32::MAX as usize,
        "{op}: {rows} rows are too many for 32-bit indices"
    );
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, TensorData};
    use megaburn_autograd::testing::{assert_close, assert_refused, constant, quantized, values};
    use rstest::rstest;

    use super::*;

    fn ids<const D: usize>(ids: Vec<i64>, shape: [usize; D]) -> Tensor<D, Int> {
        Tensor::from_data(
            TensorData::new(ids, shape),
            &megaburn_autograd::testing::device().inner(),
        )
    }

    #[test]
    fn rows_are_taken_and_summed() {
        let x = constant([3, 2]).inner();
        let of = values(x.clone());
        let taken = permute(x.clone(), ids(vec![2, 0, 2, 1], [4]));
        assert_eq!(
            values(taken),
            [of[4], of[5], of[0], of[1], of[4], of[5], of[2], of[3]]
        );
        let sums = values(unpermute(x.clone(), ids(vec![2, 0, 3, 1, 3, 3], [3, 2])));
        let expected = [of[4] + of[0], of[5] + of[1], of[2], of[3], 0.0, 0.0];
        sums.iter()
            .zip(expected)
            .for_each(|(a, b)| assert!((a - b).abs() < 1e-6));
        assert_eq!(
            values(unpermute(
                Tensor::empty([0, 2], &x.device()),
                ids(vec![0, 0], [2, 1])
            )),
            [0.0; 4]
        );
    }

    #[test]
    fn narrow_rows_are_summed_wide() {
        let ones = Tensor::<2>::ones([300, 1], &megaburn_autograd::testing::device().inner());
        let all = ids((0..300).collect(), [1, 300]);
        assert_eq!(values(unpermute(ones.cast(DType::BF16), all)), [300.0]);
    }

    /// The expected sums, computed on the host.
    fn summed(y: &[f64], n: usize, index: &[i64], k: usize) -> Vec<f64> {
        let rows = index.chunks(k).flat_map(|rows| {
            let row = |&row: &i64| {
                y.chunks(n)
                    .nth(row as usize)
                    .map_or(vec![0.0; n], Vec::from)
            };
            let add = |a: Vec<f64>, b: Vec<f64>| a.iter().zip(b).map(|(a, b)| a + b).collect();
            rows.iter().map(row).reduce(add).unwrap_or_default()
        });
        rows.collect()
    }

    #[rstest]
    fn sums_are_those_of_the_host(
        #[values([5, 4], [3, 7], [1, 1], [0, 3])] of: [usize; 2],
        #[values([4, 2], [3, 1], [0, 2], [2, 5])] shape: [usize; 2],
        #[values((DType::F32, 1e-6), (DType::F64, 1e-12), (DType::BF16, 1e-2))]
        (dtype, tolerance): (DType, f64),
        #[values(DType::I32, DType::I64)] of_index: DType,
    ) {
        let [m, n] = of;
        let [t, k] = shape;
        let y = constant([m, n]).inner().cast(dtype);
        let index: Vec<i64> = (0..t * k)
            .map(|i| ((i * 7 + i / 3) % (m + 1)) as i64)
            .collect();
        let expected = summed(&values(y.clone()), n, &index, k);
        let expected = TensorData::new(expected, [t, n]);
        let on = (&y.device(), DType::F64);
        let found = unpermute(y.clone(), ids(index.clone(), [t, k]).cast(of_index));
        assert_eq!(found.dtype(), dtype);
        if t > 0 {
            assert_close(found, Tensor::from_data(expected, on), tolerance);
        }
        // With one row each, the sums equal the gathered rows.
        let some: Vec<i64> = index.into_iter().filter(|&row| row < m as i64).collect();
        let len = some.len();
        let taken = permute(y.clone(), ids(some.clone(), [len]).cast(of_index));
        assert_eq!(taken.dims(), [len, n]);
        assert_eq!(values(taken), summed(&values(y), n, &some, 1));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let x = || constant([3, 2]).inner();
        assert_refused(|| permute(x(), ids(vec![3], [1])), "index 3 out of bounds");
        assert_refused(
            || unpermute(x(), ids(vec![0, 4], [1, 2])),
            "index 4 out of bounds",
        );
        assert_refused(
            || permute(quantized([4, 4]), ids(vec![0], [1])),
            "x is qfloat",
        );
        let narrow = ids(vec![0], [1, 1]).cast(DType::U8);
        assert_refused(
            || unpermute(x(), narrow),
            "unpermute: index is u8, not i64 or i32",
        );
    }
}
