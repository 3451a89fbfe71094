//! Rotary position embedding (Su et al., 2021, arXiv:2104.09864), of full heads or a part of each,
//! which rotates the two halves or neighboring elements against each other.

mod checks;
mod fallback;
#[cfg(feature = "cuda")]
mod kernels;
#[cfg(feature = "cuda")]
mod launch;
mod long;
mod op;
mod packed;
pub(crate) mod reference;
mod scaling;
mod table;
mod yarn;

use burn::tensor::Tensor;
use megaburn_autograd::arg_check::{self, float};
use megaburn_autograd::{fused, with_autodiff_of};

pub use long::LongRopeScaling;
use op::Rope;
pub use packed::packed_positions;
pub use scaling::RopeScaling;
pub use table::{RopeConfig, RopeLayout, RopeTable};
pub use yarn::YarnScaling;

/// Rotates the pairs `(x1, x2)` of each head by the angles of its position:
/// `(x1 * cos - x2 * sin, x2 * cos + x1 * sin)`.
///
/// The table's [`RopeConfig`] defines which elements form pairs, and whether the end of a head
/// passes through unchanged. Computed in f32 (f64 for f64); the result has the dtype of `x`. The
/// backward pass rotates by the opposite angle and saves only the table. A table's factor
/// ([`YarnScaling`]) multiplies the results of both passes.
///
/// # Shapes
/// - `x`, result: `[s, b, h, d]`, where row `i` is at the table's `i`-th position, which is per
///   sequence or common to all
///
/// # Panics
/// If the table is not for `s` positions and heads of size `d`, or for another number of sequences
/// than `b`.
pub fn apply_rope(x: Tensor<4>, table: &RopeTable) -> Tensor<4> {
    arg_check::check(
        "apply_rope",
        [float("x", &x), float("the table", table.cos())],
    );
    let [s, b, _, d] = x.dims();
    let [positions, each, half] = table.cos().dims();
    let head = table.head_dim();
    assert!(
        (positions, head) == (s, d),
        "apply_rope: x has {s} positions and head_dim {d}, but the table has {positions} \
        positions and head_dim {head}"
    );
    assert!(
        each == 1 || each == b,
        "apply_rope: x has {b} sequences, but the table is for {each}"
    );
    let broadcast = |t: &Tensor<3>| t.clone().inner().reshape([s, each, 1, half]);
    let rope = Rope {
        cos: broadcast(table.cos()),
        sin: broadcast(table.sin()),
        layout: table.layout(),
    };
    let x = with_autodiff_of(x, &table.cos().device());
    fused(rope, [x.into_dispatch()])
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;
    use megaburn_autograd::testing::{
        assert_close, assert_refused, assert_same_bits, assert_same_function, constant, device,
        leaf, normal, quantized, values,
    };
    use rstest::rstest;

    use super::*;

    fn table(d: usize, positions: impl IntoIterator<Item = usize>) -> RopeTable {
        RopeConfig::new(d)
            .init(positions, &device())
            .expect("a valid configuration")
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
        let q = constant([1, 1, 1, 12]);
        let k = constant([1, 1, 1, 12]);
        let at = |x: &Tensor<4>, p: usize| apply_rope(x.clone(), &table(12, [p]));
        let score = |i, j| (at(&q, i) * at(&k, j)).sum();
        assert_close(score(9, 2), score(107, 100), 1e-5);
        assert_close(
            (at(&q, 31) * at(&q, 31)).sum(),
            (q.clone() * q.clone()).sum(),
            1e-6,
        );
        assert_same_bits(at(&q, 0), q);
    }

    #[test]
    fn a_list_of_positions_rotates_like_the_rows_of_the_whole() {
        let x = constant([8, 2, 3, 4]);
        let whole = apply_rope(x.clone(), &table(4, 0..8));
        // A zigzag context-parallel rank holds one chunk from the front and one from the back.
        let held =
            |t: Tensor<4>| Tensor::cat(vec![t.clone().narrow(0, 0, 2), t.narrow(0, 6, 2)], 0);
        assert_same_bits(apply_rope(held(x), &table(4, [0, 1, 6, 7])), held(whole));
    }

    #[rstest]
    fn layouts_parts_and_positions_of_each_sequence_are_those_of_the_reference(
        #[values(RopeLayout::Halves, RopeLayout::Interleaved)] layout: RopeLayout,
        #[values(([4, 2, 3, 16], 0.5), ([7, 3, 2, 10], 0.4), ([5, 2, 1, 6], 1.0))] (shape, part): (
            [usize; 4],
            f64,
        ),
        #[values(false, true)] each: bool,
    ) {
        let [s, b, _, d] = shape;
        let config = RopeConfig::new(d)
            .with_layout(layout)
            .with_rotary_percent(part);
        let sequences: Vec<Vec<usize>> = (0..b)
            .map(|b| packed_positions(&[0, b + 1, s]).expect("they ascend"))
            .collect();
        let table = if each {
            config.init_each(&sequences, &device())
        } else {
            config.init(sequences[0].iter().copied(), &device())
        };
        let table = table.expect("a valid configuration");
        let x = normal(shape);
        assert_same_function!(
            1e-6,
            [x],
            apply_rope(x.clone(), &table),
            reference::apply_rope(x.clone(), &table)
        );
    }

    // From Python: angles t = p * 100.0 ** -(2 * i / 4) with p = 3, for x = [1, 2, 3, 4, 5, 6].
    #[rstest]
    #[case(RopeLayout::Halves, [-1.413352521, 0.728592152, -2.828857482, 4.412386370])]
    #[case(RopeLayout::Interleaved, [-1.272232513, -1.838864985, 1.683928641, 4.707906576])]
    fn elements_are_paired_as_the_layout_says(
        #[case] layout: RopeLayout,
        #[case] rotated: [f64; 4],
    ) {
        let config = RopeConfig::new(6).with_theta(100.0).with_layout(layout);
        let table = config
            .with_rotary_percent(2.0 / 3.0)
            .init([3], &device())
            .expect("valid");
        let x = Tensor::<1>::from_floats([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &device());
        let expected = Tensor::<1>::from_floats(rotated.map(|x| x as f32), &device());
        let y = apply_rope(x.reshape([1, 1, 1, 6]), &table).reshape([6]);
        assert_close(y.clone().narrow(0, 0, 4), expected, 1e-6);
        assert_eq!(values(y.narrow(0, 4, 2)), [5.0, 6.0]);
    }

    /// Transformers' `apply_rotary_pos_emb_interleave` reorders neighbors into halves, for queries
    /// as well as keys, and rotates those.
    #[test]
    fn neighbours_give_the_scores_of_transformers() {
        let q = constant([5, 2, 3, 8]);
        let k = constant([5, 2, 1, 8]);
        let config = RopeConfig::new(8).with_theta(100.0);
        let [neighbours, halves] = [RopeLayout::Interleaved, RopeLayout::Halves].map(|layout| {
            config
                .clone()
                .with_layout(layout)
                .init(3..8, &device())
                .unwrap()
        });
        let apart = |x: &Tensor<4>| {
            let [s, b, h, d] = x.dims();
            x.clone()
                .reshape([s, b, h, d / 2, 2])
                .swap_dims(3, 4)
                .reshape([s, b, h, d])
        };
        let scores = |q: Tensor<4>, k: Tensor<4>| {
            let [q, k] = [q, k].map(|x| x.permute([1, 2, 0, 3]));
            q.matmul(k.transpose())
        };
        let found = scores(
            apply_rope(q.clone(), &neighbours),
            apply_rope(k.clone(), &neighbours),
        );
        let [q, k] = [q, k].map(|x| reference::apply_rope(apart(&x), &halves));
        assert_close(found, scores(q, k), 1e-6);
    }

    #[test]
    fn packed_documents_are_rotated_as_if_alone() {
        let x = constant([7, 2, 3, 8]);
        let packed = apply_rope(x.clone(), &table(8, packed_positions(&[0, 3, 7]).unwrap()));
        let alone = |start, len| apply_rope(x.clone().narrow(0, start, len), &table(8, 0..len));
        assert_same_bits(packed, Tensor::cat(vec![alone(0, 3), alone(3, 4)], 0));
    }

    #[rstest]
    fn views_are_rotated_as_their_copies(
        #[values(RopeLayout::Halves, RopeLayout::Interleaved)] layout: RopeLayout,
    ) {
        let x = normal([2, 6, 5, 10]);
        let one = normal([5, 2, 1, 8]);
        let config = RopeConfig::new(8)
            .with_layout(layout)
            .with_rotary_percent(0.5);
        let table = config.init(3..8, &device()).expect("valid");
        // Swap positions and sequences, and take some of the heads and of each head's elements.
        let view = || {
            x.clone()
                .permute([2, 0, 1, 3])
                .narrow(2, 2, 3)
                .narrow(3, 1, 8)
        };
        let slow = reference::apply_rope(view(), &table);
        assert_same_function!(1e-6, [x], apply_rope(view(), &table), slow);
        let view = || one.clone().expand([5, 2, 3, 8]);
        let slow = reference::apply_rope(view(), &table);
        assert_same_function!(2e-6, [one], apply_rope(view(), &table), slow);
    }

    #[rstest]
    #[case([0, 2, 3, 4])]
    #[case([2, 0, 3, 4])]
    #[case([2, 2, 0, 4])]
    fn nothing_is_rotated_to_nothing(#[case] shape: [usize; 4]) {
        let x = normal(shape);
        let y = apply_rope(x.clone(), &table(4, 0..shape[0]));
        assert_eq!(y.dims(), shape);
        assert_eq!(x.grad(&y.sum().backward()).unwrap().dims(), shape);
    }

    fn of_each(shape: [usize; 4]) {
        let table = RopeConfig::new(4)
            .init_each(&[[0], [1], [2]], &device())
            .unwrap();
        apply_rope(normal(shape), &table);
    }

    #[rstest]
    #[case(|| of_each([1, 2, 1, 4]), "apply_rope: x has 2 sequences, but the table is for 3")]
    #[case(|| of_each([1, 0, 1, 4]), "apply_rope: x has 0 sequences, but the table is for 3")]
    #[case(
        || drop(apply_rope(normal([3, 1, 1, 8]), &table(8, 0..4))),
        "x has 3 positions and head_dim 8, but the table has 4 positions and head_dim 8"
    )]
    #[case(
        || drop(apply_rope(normal([3, 1, 1, 6]), &table(8, 0..3))),
        "x has 3 positions and head_dim 6, but the table has 3 positions and head_dim 8"
    )]
    #[case(|| drop(apply_rope(quantized([3, 1, 1, 8]), &table(8, 0..3))), "apply_rope: x is qfloat")]
    fn bad_input_is_refused(#[case] call: fn(), #[case] message: &str) {
        assert_refused(call, message);
    }
}
