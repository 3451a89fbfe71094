//! Rotary position embedding (Su et al., 2021, arXiv:2104.09864), with the halves of a head rotated
//! against each other as Hugging Face and Megatron do (not neighbouring elements).

#[cfg(feature = "cuda")]
mod cube;
mod op;
pub(crate) mod reference;
mod table;

use burn::backend::Dispatch;
use burn::tensor::Tensor;

use op::RopeOps;
pub use table::{RopeConfig, RopeScaling, RopeTable};

/// Rotates each head by its position: with `x = [x1, x2]` in halves of the last dimension,
/// `[x1 * cos - x2 * sin, x2 * cos + x1 * sin]`.
///
/// Computed in f32 (f64 for f64), result in the dtype of `x`. The backward is the rotation by the
/// opposite angle and keeps only the table.
///
/// # Shapes
/// - `x`, result: `[s, b, h, d]`, where row `i` stands at the table's `i`-th position
///
/// # Panics
/// If the table is not for `s` positions and heads of `d`.
pub fn apply_rope(x: Tensor<4>, table: &RopeTable) -> Tensor<4> {
    let [s, _, _, d] = x.dims();
    let [positions, half] = table.cos().dims();
    assert!(
        (positions, 2 * half) == (s, d),
        "apply_rope: {s} rows of heads of {d}, the table has {positions} positions for heads of {}",
        2 * half
    );
    let broadcast = |t: &Tensor<2>| t.clone().reshape([s, 1, 1, half]).into_dispatch();
    let (cos, sin) = (broadcast(table.cos()), broadcast(table.sin()));
    Tensor::from_dispatch(<Dispatch as RopeOps>::rope(x.into_dispatch(), cos, sin))
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;
    use rstest::rstest;

    use super::*;
    use crate::testing::{
        assert_close, assert_same_bits, assert_same_function, constant, device, leaf, normal,
    };

    fn table(d: usize, positions: impl IntoIterator<Item = usize>) -> RopeTable {
        RopeConfig::new(d).init(positions, &device()).expect("a valid configuration")
    }

    #[rstest]
    fn values_and_gradients_are_those_of_the_reference(
        #[values([4, 2, 3, 16], [7, 1, 5, 6])] shape: [usize; 4],
        #[values((DType::F32, 1e-6), (DType::BF16, 3e-2))] (dtype, tolerance): (DType, f64),
    ) {
        let table = table(shape[3], 5..5 + shape[0]);
        let x = leaf(normal(shape).cast(dtype));
        assert_eq!(apply_rope(x.clone(), &table).dtype(), dtype);
        assert_same_function!(
            tolerance,
            [x],
            apply_rope(x.clone(), &table),
            reference::apply_rope(x.clone(), &table)
        );
    }

    #[test]
    fn a_rotation_keeps_lengths_and_depends_on_distance_only() {
        let (q, k) = (constant([1, 1, 1, 12]), constant([1, 1, 1, 12]));
        let at = |x: &Tensor<4>, p: usize| apply_rope(x.clone(), &table(12, [p]));
        let score = |i, j| (at(&q, i) * at(&k, j)).sum();
        assert_close(score(9, 2), score(107, 100), 1e-5);
        assert_close((at(&q, 31) * at(&q, 31)).sum(), (q.clone() * q.clone()).sum(), 1e-6);
        assert_same_bits(at(&q, 0), q);
    }

    #[test]
    fn a_list_of_positions_rotates_like_the_rows_of_the_whole() {
        let x = constant([8, 2, 3, 4]);
        let whole = apply_rope(x.clone(), &table(4, 0..8));
        // What a zigzag context-parallel rank holds: a chunk from the front and one from the back.
        let held =
            |t: Tensor<4>| Tensor::cat(vec![t.clone().narrow(0, 0, 2), t.narrow(0, 6, 2)], 0);
        assert_same_bits(apply_rope(held(x), &table(4, [0, 1, 6, 7])), held(whole));
    }

    #[test]
    #[should_panic(expected = "3 rows of heads of 8, the table has 4 positions for heads of 8")]
    fn a_table_of_other_positions_is_refused() {
        apply_rope(normal([3, 1, 1, 8]), &table(8, 0..4));
    }
}
