//! Embedding lookup whose table gradient is summed in f32.

mod fallback;
#[cfg(feature = "cuda")]
mod kernels;
#[cfg(feature = "cuda")]
mod launch;
mod op;
mod options;
pub(crate) mod reference;

use burn::tensor::{Int, Tensor};
use megaburn_autograd::arg_check::{self, float, int};
use megaburn_autograd::{fused, with_autodiff_of};

use op::Lookup;
pub use options::EmbeddingOptions;

/// Looks up the rows of `table` that `ids` name, in the dtype of the table.
///
/// The gradient of a row is the sum over its tokens in f32 (f64 for f64), in token order, so the
/// result is deterministic. Summed in bf16, only the first few hundred occurrences of a token would
/// count in full.
///
/// # Shapes
/// - `table`: `[rows, d]`
/// - `ids`: `[s, b]`
/// - result: `[s, b, d]`
///
/// # Panics
/// If the table has no row or ids beyond 32 bits, or the main gradient has another shape than the
/// table; on a CPU also for an id without a row in an unsharded table. On a GPU the host does not
/// read the ids; the vector of such an id is NaN.
pub fn embedding(table: Tensor<2>, ids: Tensor<2, Int>, options: EmbeddingOptions) -> Tensor<3> {
    arg_check::check("embedding", [float("the table", &table), int("ids", &ids)]);
    let [rows, d] = table.dims();
    let first = options.first.unwrap_or(0);
    assert!(
        rows > 0 && first.saturating_add(rows) <= i32::MAX as usize,
        "embedding: a table of {rows} rows from id {first} on must have at least one row, and \
        its ids must fit in 32 bits"
    );
    if let Some(main_grad) = &options.main_grad {
        main_grad.check("embedding", [rows, d]);
        main_grad.notify_use();
    }
    let table = with_autodiff_of(table, &ids.device());
    let ids = ids.inner();
    fused(Lookup { ids, options }, [table.into_dispatch()])
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, TensorData, module};
    use megaburn_autograd::MainGrad;
    use megaburn_autograd::testing::{
        assert_close, assert_refused, assert_same_bits, assert_same_function, device, leaf, normal,
        quantized, values,
    };
    use rstest::rstest;

    use super::*;
    use crate::reference;

    fn ids<const N: usize>(shape: [usize; 2], ids: [i64; N]) -> Tensor<2, Int> {
        let data: Vec<i64> = ids.into_iter().cycle().take(shape[0] * shape[1]).collect();
        Tensor::from_data(TensorData::new(data, shape), &device().inner())
    }

    fn part(first: Option<usize>) -> EmbeddingOptions {
        EmbeddingOptions {
            first,
            main_grad: None,
        }
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
        let table = normal([9, 4]);
        let ids = ids([5, 3], [8, 0, 3, 3, 1]);
        let ours = embedding(table.clone(), ids.clone(), part(None));
        let burns = module::embedding(table.clone(), ids);
        assert_same_bits(ours.clone(), burns.clone());
        let grad = |y: Tensor<3>| table.grad(&y.powf_scalar(2.0).sum().backward()).unwrap();
        assert_same_bits(grad(ours), grad(burns));
    }

    #[test]
    fn the_gradient_of_a_frequent_token_is_not_lost_in_bf16() {
        // 257 is not representable in bf16: added one by one, a thousand ones stay at 256.
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
        let options = EmbeddingOptions {
            first: Some(2),
            main_grad: Some(main_grad.clone()),
        };
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

    #[test]
    fn tables_and_ids_may_be_views() {
        let table = normal([5, 9]);
        let ids = ids([2, 6], [1, 6, 0, 1, 1, 3]).swap_dims(0, 1);
        let view = || table.clone().transpose().narrow(0, 1, 7);
        let slow = reference::embedding(view(), ids.clone(), part(None));
        assert_same_function!(
            1e-6,
            [table],
            embedding(view(), ids.clone(), part(None)),
            slow
        );
    }

    #[rstest]
    fn no_tokens_have_no_vectors(#[values(None, Some(3))] first: Option<usize>) {
        let table = normal([4, 3]);
        let y = embedding(
            table.clone(),
            Tensor::empty([0, 2], &device().inner()),
            part(first),
        );
        assert_eq!(y.dims(), [0, 2, 3]);
        assert_eq!(values(table.grad(&y.sum().backward()).unwrap()), [0.0; 12]);
    }

    fn of(table: Tensor<2>, id: i64, first: Option<usize>) {
        embedding(table, ids([1, 2], [id]), part(first));
    }

    #[rstest]
    #[case::no_rows(|| of(normal([0, 3]), 0, Some(2)), "embedding: a table of 0 rows from id 2 on must have at least one row")]
    #[case::beyond(|| of(normal([2, 3]), 0, Some(usize::MAX)), "its ids must fit in 32 bits")]
    #[case::above(|| of(normal([7, 3]), 7, None), "index 7 out of bounds for dimension of size 7")]
    #[case::below(|| of(normal([7, 3]), -1, None), "index -1 out of bounds for dimension of size 7")]
    #[case::dtype(|| of(quantized([4, 4]), 0, None), "embedding: the table is qfloat")]
    #[case::dtype_of_ids(
        || drop(embedding(normal([4, 4]), ids([1, 2], [1]).cast(DType::U8), part(Some(2)))),
        "embedding: ids is u8, not i64 or i32"
    )]
    fn bad_input_is_refused(#[case] call: fn(), #[case] message: &str) {
        assert_refused(call, message);
    }
}
