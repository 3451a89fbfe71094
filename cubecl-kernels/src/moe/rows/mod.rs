use burn::tensor::{DType, Int, Tensor};

use crate::primitive::compute_dtype;

/// The rows that `index` names, in its order; some may be named often, others never. Without a graph.
///
/// # Shapes
/// `x`: `[m, n]`, `index`: `[r]`, result `[r, n]`
pub fn take_rows(x: Tensor<2>, index: Tensor<1, Int>) -> Tensor<2> {
    x.select(0, index)
}

/// The sums of the rows that each row of `index` names; `m` names none. The transpose of [`take_rows`]:
/// what was taken there often is summed here, in f32, in the order of `index`. Without a graph.
///
/// # Shapes
/// `y`: `[m, n]`, `index`: `[t, k]`, result `[t, n]`
pub fn sum_rows(y: Tensor<2>, index: Tensor<2, Int>) -> Tensor<2> {
    let ([_, n], [t, k], dtype) = (y.dims(), index.dims(), y.dtype());
    let none = Tensor::zeros([1, n], (&y.device(), dtype));
    let terms = Tensor::cat(vec![y, none], 0).select(0, index.reshape([t * k]));
    if k == 1 {
        return terms;
    }
    let wide: DType = compute_dtype(dtype).into();
    terms.reshape([t, k, n]).cast(wide).sum_dim(1).reshape([t, n]).cast(dtype)
}

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;

    use super::*;
    use crate::testing::{constant, values};

    fn ids<const D: usize>(ids: Vec<i64>, shape: [usize; D]) -> Tensor<D, Int> {
        Tensor::from_data(TensorData::new(ids, shape), &crate::testing::device().inner())
    }

    #[test]
    fn rows_are_taken_and_summed() {
        let x = constant([3, 2]).inner();
        let of = values(x.clone());
        let taken = take_rows(x.clone(), ids(vec![2, 0, 2, 1], [4]));
        assert_eq!(values(taken), [of[4], of[5], of[0], of[1], of[4], of[5], of[2], of[3]]);
        let sums = values(sum_rows(x.clone(), ids(vec![2, 0, 3, 1, 3, 3], [3, 2])));
        let expected = [of[4] + of[0], of[5] + of[1], of[2], of[3], 0.0, 0.0];
        sums.iter().zip(expected).for_each(|(a, b)| assert!((a - b).abs() < 1e-6));
        assert_eq!(
            values(sum_rows(Tensor::empty([0, 2], &x.device()), ids(vec![0, 0], [2, 1]))),
            [0.0; 4]
        );
    }

    #[test]
    fn narrow_rows_are_summed_wide() {
        let ones = Tensor::<2>::ones([300, 1], &crate::testing::device().inner());
        let all = ids((0..300).collect(), [1, 300]);
        assert_eq!(values(sum_rows(ones.cast(DType::BF16), all)), [300.0]);
    }
}
