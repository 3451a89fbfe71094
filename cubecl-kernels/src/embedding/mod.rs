//! Vectors of tokens out of a table, with the table's gradient summed in f32.

#[cfg(feature = "cuda")]
mod cube;
mod op;
pub(crate) mod reference;
mod rows;

use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor};

use crate::MainGrad;
use op::EmbeddingOps;

/// How [`embedding`] reads its table, and where the table's gradient goes.
#[derive(Clone, Debug, Default)]
pub struct EmbeddingOptions {
    /// The id of the table's first row, where the table is a part of a longer one: ids of other parts
    /// give zeros. None: the table is whole, and every id has a row.
    pub first: Option<usize>,
    /// Sums the table's gradient, once attached; none: an ordinary gradient.
    pub main_grad: Option<MainGrad>,
}

/// The rows of `table` that `ids` name, in the dtype of the table.
///
/// The gradient of a row is the sum of those of its tokens in f32 (f64 for f64), in their order: the
/// same bits each time. In bf16, of a token that comes some hundred times only the first few would
/// count in full.
///
/// # Shapes
/// - `table`: `[rows, d]`
/// - `ids`: `[s, b]`
/// - result: `[s, b, d]`
pub fn embedding(table: Tensor<2>, ids: Tensor<2, Int>, options: EmbeddingOptions) -> Tensor<3> {
    let (table, ids) = (table.into_dispatch(), ids.into_dispatch());
    Tensor::from_dispatch(<Dispatch as EmbeddingOps>::token_vectors(table, ids, options))
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, TensorData, module};
    use rstest::rstest;

    use super::*;
    use crate::reference;
    use crate::testing::{
        assert_close, assert_same_bits, assert_same_function, device, leaf, normal, values,
    };

    fn ids<const N: usize>(shape: [usize; 2], ids: [i64; N]) -> Tensor<2, Int> {
        let data: Vec<i64> = ids.into_iter().cycle().take(shape[0] * shape[1]).collect();
        Tensor::from_data(TensorData::new(data, shape), &device().inner())
    }

    fn part(first: Option<usize>) -> EmbeddingOptions {
        EmbeddingOptions { first, main_grad: None }
    }

    #[rstest]
    fn values_and_gradients_are_those_of_the_reference(
        #[values(None, Some(0), Some(3))] first: Option<usize>,
        #[values((DType::F32, 1e-6), (DType::BF16, 1e-2))] (dtype, tolerance): (DType, f64),
    ) {
        let table = leaf(normal([7, 5]).cast(dtype));
        let ids = match first {
            None => ids([6, 2], [1, 6, 0, 1, 1]),
            Some(_) => ids([6, 2], [1, 9, 4, 12, 4, 2, 3]),
        };
        assert_same_function!(
            tolerance,
            [table],
            embedding(table.clone(), ids.clone(), part(first)),
            reference::embedding(table.clone(), ids.clone(), part(first))
        );
    }

    #[test]
    fn a_whole_f32_table_is_bit_for_bit_burns() {
        let (table, ids) = (normal([9, 4]), ids([5, 3], [8, 0, 3, 3, 1]));
        let (ours, burns) = (
            embedding(table.clone(), ids.clone(), part(None)),
            module::embedding(table.clone(), ids),
        );
        assert_same_bits(ours.clone(), burns.clone());
        let grad = |y: Tensor<3>| table.grad(&y.powf_scalar(2.0).sum().backward()).unwrap();
        assert_same_bits(grad(ours), grad(burns));
    }

    #[test]
    fn the_gradient_of_a_frequent_token_is_not_lost_in_bf16() {
        // 256 + 1 is no bf16: added one by one, a thousand ones stay 256.
        let table = leaf(normal([3, 2]).cast(DType::BF16));
        let y = embedding(table.clone(), ids([1000, 1], [1]), part(None));
        let grad = table.grad(&y.sum().backward()).unwrap();
        assert_eq!(values(grad), [0.0, 0.0, 1000.0, 1000.0, 0.0, 0.0]);
    }

    #[rstest]
    #[case(DType::F32)]
    #[case(DType::BF16)]
    fn an_attached_main_grad_takes_the_gradients_sum(#[case] dtype: DType) {
        let main_grad = MainGrad::default();
        main_grad.attach();
        let options = EmbeddingOptions { first: Some(2), main_grad: Some(main_grad.clone()) };
        let table = leaf(normal([4, 3]).cast(dtype));
        let exact = leaf(table.clone().cast(DType::F32));
        let mut expected: Option<Tensor<2>> = None;
        for round in 0..3 {
            let ids = ids([6, 2], [2, 5, round, 7, 3]);
            let y = embedding(table.clone(), ids.clone(), options.clone());
            assert!(table.grad(&(y * 0.5).sum().backward()).is_none());
            let y = embedding(exact.clone(), ids, part(Some(2)));
            let grad = exact.grad(&(y * 0.5).sum().backward()).unwrap();
            expected = Some(expected.map_or(grad.clone(), |sum| sum + grad));
        }
        let sum = main_grad.take().expect("three gradients");
        assert_eq!(sum.dtype(), DType::F32);
        assert_close(sum, expected.unwrap(), 1e-6);
    }
}
