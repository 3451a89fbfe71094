//! Linear maps of ranges of rows, each with its own matrix: experts.

mod choice;
mod gradients;
#[cfg(feature = "cuda")]
mod kernels;
#[cfg(feature = "cuda")]
mod launch;
mod op;
mod operands;
mod options;
mod products;
mod quantized;
#[cfg(test)]
mod reference;
mod rows;

use burn::tensor::Tensor;
use megaburn_autograd::arg_check::{self, float};

pub use choice::GroupedGemmChoice;
pub(crate) use gradients::put_gradient;
pub use options::{GroupWeight, GroupedOptions};
use rows::row_ranges;

use crate::quantized::{LinearQuantization, Scaling};

/// Multiplies each range of rows by its own matrix: the first `rows[0]` rows of `x` by the first
/// matrix, and so on. A range may be empty: its matrix is read and gets a gradient of zeros all the
/// same, so that ranks that share it do the same whatever their rows.
///
/// Values and gradients equal those of [`linear`](crate::linear) for each range; in the graph it is
/// one operation. The numbers of rows change with every call, so products are
/// [not tuned](crate::GemmAlgorithm::Deterministic).
///
/// With [`GroupedOptions::quantizations`] the matrices are quantised as those of
/// [`quantized_linear`](crate::quantized_linear): each range of rows, each matrix and each range of
/// the gradient has scales of its own.
///
/// # Shapes
/// - `x`: `[sum of rows, in]`
/// - result: `[sum of rows, out]`
///
/// # Panics
/// As [`linear`](crate::linear); if there is not one matrix per range, the matrices differ in
/// shape, or the ranges do not add up to the rows of `x`.
///
/// Source: Megatron-LM `megatron/core/transformer/moe/experts.py`, grouped GEMM.
pub fn grouped_linear(
    x: Tensor<2>,
    rows: &[usize],
    weights: Vec<GroupWeight>,
    options: GroupedOptions,
) -> Tensor<2> {
    let [num_rows, inputs] = x.dims();
    let shape = weights.first().map(|w| w.weight.dims());
    let [_, outputs] = shape.expect("grouped_linear: there must be at least one matrix");
    assert!(
        rows.len() == weights.len() && rows.iter().sum::<usize>() == num_rows,
        "grouped_linear: {} groups with {} rows do not match {} matrices and x {:?}",
        rows.len(),
        rows.iter().sum::<usize>(),
        weights.len(),
        x.dims()
    );
    let odd = weights
        .iter()
        .map(|w| w.weight.dims())
        .find(|dims| *dims != [inputs, outputs]);
    assert!(
        odd.is_none(),
        "grouped_linear: x {:?} and a matrix {odd:?} do not match",
        x.dims()
    );
    let matrices = weights.iter().map(|w| float("a matrix", &w.weight));
    arg_check::check(
        "grouped_linear",
        [float("x", &x)].into_iter().chain(matrices),
    );
    check_quantizations(&options.quantizations, weights.len());
    op::grouped(x, row_ranges(rows), weights, options)
}

/// Panics unless there is none, or one for each of `num` matrices, of one recipe.
fn check_quantizations(all: &[LinearQuantization], num: usize) {
    assert!(
        all.is_empty() || all.len() == num,
        "grouped_linear: {} quantizations do not match {num} matrices",
        all.len()
    );
    let are_equal = all.iter().all(|one| one.recipe == all[0].recipe);
    assert!(
        are_equal,
        "grouped_linear: the matrices are quantised by different recipes"
    );
    let is_nvfp4 = |one: &LinearQuantization| matches!(one.recipe.scaling, Scaling::Nvfp4(_));
    assert!(
        !all.iter().any(is_nvfp4),
        "grouped_linear: the recipe is NVFP4, which several matrices at once do not support"
    );
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;
    use megaburn_autograd::testing::{
        assert_close, assert_refused, constant, leaf, normal, values,
    };
    use megaburn_autograd::{MainGrad, OverlappedWgrads, RecomputeFn};
    use rstest::rstest;

    use super::*;

    fn grouped(
        x: Tensor<2>,
        rows: &[usize],
        weights: &[Tensor<2>],
        main_grads: Option<&[MainGrad]>,
        again: Option<RecomputeFn>,
    ) -> Tensor<2> {
        let group = |(i, w): (usize, &Tensor<2>)| GroupWeight {
            weight: w.clone(),
            main_grad: main_grads.map(|all| all[i].clone()),
        };
        let options = GroupedOptions {
            again,
            ..Default::default()
        };
        grouped_linear(
            x,
            rows,
            weights.iter().enumerate().map(group).collect(),
            options,
        )
    }

    #[rstest]
    fn values_and_gradients_are_those_of_separate_maps(
        #[values(&[3, 0, 5], &[0, 4, 0], &[7], &[1, 1, 2, 6])] rows: &[usize],
        #[values(false, true)] attached: bool,
        #[values(false, true)] forgotten: bool,
        #[values((DType::F32, 1e-6), (DType::BF16, 2e-2))] (dtype, tolerance): (DType, f64),
    ) {
        let num_rows = rows.iter().sum();
        for [inputs, outputs] in [[6, 4], [5, 9]] {
            let x = leaf(normal([num_rows, inputs]).cast(dtype));
            let all = rows
                .iter()
                .map(|_| leaf(normal([inputs, outputs]).cast(dtype)));
            let all: Vec<_> = all.collect();
            let main_grads: Vec<_> = rows.iter().map(|_| MainGrad::default()).collect();
            if attached {
                main_grads.iter().for_each(MainGrad::attach);
            }
            let source = x.clone().inner();
            let again = forgotten.then(|| RecomputeFn::new(move || source.clone()));
            let found = grouped(x.clone(), rows, &all, Some(&main_grads), again);
            let expected = reference::grouped_linear(x.clone(), rows, &all);
            assert_close(found.clone(), expected.clone(), tolerance);
            let dy = leaf(normal(found.dims()).cast(dtype));
            let found = (found * dy.clone()).sum().backward();
            let expected = (expected * dy).sum().backward();
            assert_close(
                x.grad(&found).unwrap(),
                x.grad(&expected).unwrap(),
                tolerance,
            );
            for (w, main_grad) in all.iter().zip(&main_grads) {
                let expected = w
                    .grad(&expected)
                    .unwrap_or_else(|| w.clone().inner().zeros_like());
                let dw = if attached {
                    main_grad.take()
                } else {
                    w.grad(&found)
                };
                assert_close(
                    dw.unwrap(),
                    expected.cast(if attached { DType::F32 } else { dtype }),
                    tolerance,
                );
                assert!(!attached || w.grad(&found).is_none());
            }
        }
    }

    #[test]
    fn gradients_put_beside_something_are_there_when_they_are_computed() {
        let x = leaf(normal([3, 4]));
        let w = [leaf(normal([4, 2])), leaf(normal([4, 2]))];
        let group = |w: &Tensor<2>, main_grad: &MainGrad| GroupWeight {
            weight: w.clone(),
            main_grad: Some(main_grad.clone()),
        };
        let run = |overlapped_wgrads: Option<OverlappedWgrads>| {
            let sums = [MainGrad::default(), MainGrad::default()];
            sums.iter().for_each(MainGrad::attach);
            let groups = w.iter().zip(&sums).map(|(w, sum)| group(w, sum)).collect();
            let options = GroupedOptions {
                overlapped_wgrads,
                ..Default::default()
            };
            grouped_linear(x.clone(), &[2, 1], groups, options)
                .sum()
                .backward();
            sums
        };
        let expected = run(None).map(|sum| values(sum.take().unwrap()));
        let overlapped_wgrads = OverlappedWgrads::default();
        let found = run(Some(overlapped_wgrads.clone()));
        assert!(found.iter().all(|sum| sum.take().is_none()));
        overlapped_wgrads.compute();
        assert_eq!(found.map(|sum| values(sum.take().unwrap())), expected);
    }

    /// The first matrix is frozen, so that another one carries the graph.
    #[test]
    fn sums_get_gradients_of_rows_that_need_none() {
        let x = constant([3, 4]);
        let dy = constant([3, 2]);
        let w = [constant([4, 2]), leaf(normal([4, 2])), leaf(normal([4, 2]))];
        let sums = [0; 3].map(|_| MainGrad::default());
        sums.iter().for_each(MainGrad::attach);
        let y = grouped(
            Tensor::from_inner(x.clone()),
            &[1, 1, 1],
            &w,
            Some(&sums),
            None,
        );
        (y * Tensor::from_inner(dy.clone())).sum().backward();
        assert!(sums[0].take().is_none());
        for (i, sum) in sums.iter().enumerate().skip(1) {
            let [x, dy] = [&x, &dy].map(|rows| rows.clone().narrow(0, i, 1));
            assert_close(sum.take().unwrap(), x.transpose().matmul(dy), 1e-6);
        }
    }

    #[test]
    fn no_rows_at_all_read_every_matrix_and_give_gradients_of_0() {
        let x = leaf(normal([0, 4]));
        let w = [leaf(normal([4, 3])), leaf(normal([4, 3]))];
        let y = grouped(x, &[0, 0], &w, None, None);
        assert_eq!(y.dims(), [0, 3]);
        let grads = y.sum().backward();
        w.iter()
            .for_each(|w| assert_eq!(values(w.grad(&grads).unwrap()), [0.0; 12]));
    }

    #[test]
    fn frozen_matrices_get_no_gradient() {
        let x = leaf(normal([3, 4]));
        let w = [constant([4, 3]), leaf(normal([4, 3]))];
        let main_grads = [MainGrad::default(), MainGrad::default()];
        main_grads.iter().for_each(MainGrad::attach);
        grouped(x, &[2, 1], &w, Some(&main_grads), None)
            .sum()
            .backward();
        assert!(main_grads[0].take().is_none() && main_grads[1].take().is_some());
    }

    #[rstest]
    #[case(&[2, 2], &[[4, 3], [4, 3]], "2 groups with 4 rows do not match 2 matrices and x [3, 4]")]
    #[case(&[3], &[[4, 3], [4, 3]], "1 groups with 3 rows do not match 2 matrices")]
    #[case(&[1, 2], &[[4, 3], [4, 2]], "x [3, 4] and a matrix Some([4, 2]) do not match")]
    fn what_does_not_fit_is_refused(
        #[case] rows: &[usize],
        #[case] shapes: &[[usize; 2]],
        #[case] message: &str,
    ) {
        let weights: Vec<_> = shapes.iter().map(|&shape| constant(shape)).collect();
        assert_refused(
            || grouped(constant([3, 4]), rows, &weights, None, None),
            message,
        );
    }
}
