//! How many elements of a layer's matrices do not survive their quantisation.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::backend::tensor::FloatTensor;
use burn::tensor::{FloatDType, Int, Tensor};

use super::operands::{Quantization, QuantizedOps};
use super::recipe::MatrixRole;

/// The rows that are counted at a time, so that counting needs little memory. It is a multiple of
/// the rows of every block.
const ROWS: usize = 1024;

/// Counts the elements of a layer's matrices that saturate or underflow. Clones share the counts.
#[derive(Clone, Debug, Default)]
pub struct QuantizationCounts(Arc<Mutex<[Option<MatrixCounts>; 3]>>);

/// The counts of one matrix, over all passes since they were last taken, on this rank.
#[derive(Clone, Debug)]
pub struct MatrixCounts {
    /// `[4]` in f32: the number of elements that saturated, because their magnitude times the scale
    /// is larger than the largest number of the format; the number that underflowed, because they
    /// were not zero and became zero; the number that were not zero; and the largest magnitude.
    ///
    /// Nothing saturates where the scale follows the matrix itself
    /// ([`AmaxSource::Current`](crate::AmaxSource::Current)).
    pub numbers: Tensor<1>,
}

impl QuantizationCounts {
    /// Returns the counts of a matrix and begins new ones; `None` if it was not quantised.
    pub fn take(&self, role: MatrixRole) -> Option<MatrixCounts> {
        self.lock()[role as usize].take()
    }

    /// Counts the elements of `x`. `amax` is the magnitude that the scale is derived from, which may
    /// be smaller than those of `x` only if `may_saturate`.
    pub(super) fn count<B: QuantizedOps>(
        &self,
        x: &FloatTensor<B>,
        amax: Option<&FloatTensor<B>>,
        how: Quantization,
        may_saturate: bool,
    ) {
        let limit = amax
            .filter(|_| may_saturate)
            .map(|amax| limit::<B>(amax, &how));
        let x: Tensor<2> = B::wrap(x.clone());
        let [rows, _] = x.dims();
        let found = (0..rows).step_by(ROWS).map(|first| {
            let part = x.clone().narrow(0, first, ROWS.min(rows - first));
            counts_of_part::<B>(part, amax, limit.as_ref(), &how)
        });
        if let Some(numbers) = found.reduce(together) {
            self.add(how.role, numbers);
        }
    }

    fn add(&self, role: MatrixRole, new: Tensor<1>) {
        let place = &mut self.lock()[role as usize];
        let numbers = match place.take() {
            None => new,
            Some(old) => together(old.numbers, new),
        };
        *place = Some(MatrixCounts { numbers });
    }

    fn lock(&self) -> MutexGuard<'_, [Option<MatrixCounts>; 3]> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The counts of some rows, `[4]`.
fn counts_of_part<B: QuantizedOps>(
    x: Tensor<2>,
    amax: Option<&FloatTensor<B>>,
    limit: Option<&Tensor<1>>,
    how: &Quantization,
) -> Tensor<1> {
    let quantized = numbers::<B>(x.clone(), amax.cloned(), how);
    let nonzero = num_nonzero(x.clone());
    let underflowed = (nonzero.clone() - num_nonzero(quantized)).cast(FloatDType::F32);
    let nonzero = nonzero.cast(FloatDType::F32);
    let magnitudes = x.cast(FloatDType::F32).abs();
    let saturated = match limit {
        Some(limit) => {
            let above = magnitudes.clone().greater(limit.clone().unsqueeze());
            above.int().sum().cast(FloatDType::F32)
        }
        None => underflowed.zeros_like(),
    };
    Tensor::cat(vec![saturated, underflowed, nonzero, magnitudes.max()], 0)
}

/// The number of elements that are not zero, `[1]`. Unlike sums and differences of f32, those of
/// integers are exact.
fn num_nonzero(x: Tensor<2>) -> Tensor<1, Int> {
    x.not_equal_elem(0).int().sum()
}

/// The largest number that elements can stand for, `[1]`: that of an element which is too large.
fn limit<B: QuantizedOps>(amax: &FloatTensor<B>, how: &Quantization) -> Tensor<1> {
    let amax: Tensor<1> = B::wrap(amax.clone());
    let large = amax.clone().mul_scalar(4.0).unsqueeze();
    let largest = numbers::<B>(large, Some(B::unwrap(amax.clone())), how);
    // An operand may be padded with zeros. A scale that is no power of two is rounded: the magnitude
    // itself still fits.
    largest.max().max_pair(amax)
}

/// The numbers that elements stand for, in any order, perhaps with zeros in addition.
fn numbers<B: QuantizedOps>(
    x: Tensor<2>,
    amax: Option<FloatTensor<B>>,
    how: &Quantization,
) -> Tensor<2> {
    let found = B::quantize_matrix(B::unwrap(x), amax, how.clone());
    let operand = found.rows.or(found.cols);
    B::wrap(B::numbers_of(
        operand.expect("one dimension is summed over"),
    ))
}

/// The counts of two parts of a matrix.
fn together(a: Tensor<1>, b: Tensor<1>) -> Tensor<1> {
    let sums = a.clone().narrow(0, 0, 3) + b.clone().narrow(0, 0, 3);
    let largest = a.narrow(0, 3, 1).max_pair(b.narrow(0, 3, 1));
    Tensor::cat(vec![sums, largest], 0)
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use megaburn_autograd::testing::{leaf, normal, values};
    use rstest::rstest;

    use super::*;
    use crate::linear::LinearOptions;
    use crate::quantized::{
        AmaxSource, DelayedAmax, LinearQuantization, QuantizationRecipe, Scaling, SmallFloat,
        SummedDim, quantized_linear, quantized_numbers,
    };

    /// Numbers of very different magnitudes, some of them zero.
    fn spread(shape: [usize; 2]) -> Tensor<2> {
        let x = normal(shape).inner();
        let small = x.clone() * 1e-7;
        let is_small = normal(shape).inner().lower_elem(-0.5);
        let is_zero = normal(shape).inner().greater_elem(1.0);
        x.mask_where(is_small, small).mask_fill(is_zero, 0.0)
    }

    fn read(counts: &QuantizationCounts, role: MatrixRole) -> Vec<f64> {
        values(counts.take(role).unwrap().numbers)
    }

    /// The definition, element by element, for scales that follow the matrix.
    fn expected(x: Tensor<2>, recipe: QuantizationRecipe, role: MatrixRole) -> Vec<f64> {
        let summed = match role {
            MatrixRole::Weight => SummedDim::Rows,
            _ => SummedDim::Cols,
        };
        let after = values(quantized_numbers(x.clone(), recipe, role, summed));
        let before = values(x);
        let is_lost = |(x, q): (&f64, &f64)| *x != 0.0 && *q == 0.0;
        let lost = before.iter().zip(&after).filter(|&pair| is_lost(pair));
        let amax = before.iter().fold(0.0f64, |amax, x| amax.max(x.abs()));
        let nonzero = before.iter().filter(|x| **x != 0.0).count() as f64;
        vec![0.0, lost.count() as f64, nonzero, amax]
    }

    #[rstest]
    fn elements_that_become_zero_are_counted(
        #[values([3, 40, 24], [2 * ROWS + 19, 130, 9])] sizes: [usize; 3],
        #[values(Scaling::Tensor, Scaling::Blocks, Scaling::Microscaling)] scaling: Scaling,
    ) {
        let [t, inputs, outputs] = sizes;
        let recipe = QuantizationRecipe {
            scaling,
            forward: SmallFloat::E4m3,
            gradients: SmallFloat::E5m2,
            power_of_two_scales: false,
        };
        let counts = QuantizationCounts::default();
        let mut quantization = LinearQuantization::new(recipe);
        quantization.counts = Some(counts.clone());
        let [x, w] = [spread([t, inputs]), spread([inputs, outputs])];
        let dy = spread([t, outputs]);
        let options = LinearOptions::default();
        let y = quantized_linear(
            leaf(Tensor::from_inner(x.clone())),
            leaf(Tensor::from_inner(w.clone())),
            None,
            options,
            quantization.clone(),
        );
        (y * Tensor::from_inner(dy.clone())).sum().backward();
        let of_x = expected(x.clone(), recipe, MatrixRole::Input);
        assert!(scaling != Scaling::Tensor || of_x[1] > 0.1 * of_x[2]);
        assert_eq!(read(&counts, MatrixRole::Input), of_x);
        let of_w = expected(w.clone(), recipe, MatrixRole::Weight);
        assert_eq!(read(&counts, MatrixRole::Weight), of_w);
        let of_dy = expected(dy, recipe, MatrixRole::Gradient);
        assert_eq!(read(&counts, MatrixRole::Gradient), of_dy);
        // Passes add up, and one that is not trained on is not counted.
        for quantization in [
            quantization.without_record(),
            quantization.clone(),
            quantization,
        ] {
            let options = LinearOptions::default();
            quantized_linear(x.clone(), w.clone(), None, options, quantization);
        }
        let twice = [0.0, 2.0 * of_x[1], 2.0 * of_x[2], of_x[3]];
        assert_eq!(read(&counts, MatrixRole::Input), twice);
        assert!(counts.take(MatrixRole::Gradient).is_none());
    }

    /// With the scale of another matrix, what is too large saturates. Up to twice as much still fits
    /// if the scale was rounded down to a power of two.
    #[rstest]
    #[case(false, 2.0, 2)]
    #[case(true, 2.0, 1)]
    #[case(true, 1.75, 3)]
    fn elements_beyond_the_largest_number_are_counted(
        #[case] power_of_two_scales: bool,
        #[case] derived: f32,
        #[case] expected: u32,
    ) {
        let device = Device::flex();
        let delayed = DelayedAmax::new(None);
        delayed.set_derived(Some(Tensor::from_floats([derived], &device)));
        let counts = QuantizationCounts::default();
        let recipe = QuantizationRecipe {
            scaling: Scaling::Tensor,
            forward: SmallFloat::E4m3,
            gradients: SmallFloat::E4m3,
            power_of_two_scales,
        };
        let mut quantization = LinearQuantization::new(recipe);
        quantization.input = AmaxSource::Delayed(delayed);
        quantization.counts = Some(counts.clone());
        // The scale 448 / 2 is 128 as a power of two, with which 3.5 is the largest number.
        let x = Tensor::<2>::from_floats([[1.75, -2.0, 2.01], [0.0, -4.0, 1.0]], &device);
        let w = Tensor::<2>::ones([3, 2], &device);
        quantized_linear(x, w, None, LinearOptions::default(), quantization);
        let found = read(&counts, MatrixRole::Input);
        assert_eq!(found, [f64::from(expected), 0.0, 5.0, 4.0]);
    }
}
