//! A maximum that propagates NaN, built from one that drops it.

use burn::{
    backend::{Backend, TensorMetadata, tensor::FloatTensor},
    tensor::{FloatDType, Shape, Slice},
};
use megaburn_autograd::backend_ops::bool_dtype;

/// The elementwise maximum over the members, NaN where any member has NaN, although `max` may drop
/// NaN as NCCL's does. NaN is sent as minus infinity, together with a second row that marks its
/// positions.
///
/// This sends twice the data, which is acceptable because maxima are taken of statistics with one
/// number per row.
pub(crate) fn nan_propagating_max<B: Backend, E>(
    x: FloatTensor<B>,
    max: impl FnOnce(FloatTensor<B>) -> Result<FloatTensor<B>, E>,
) -> Result<FloatTensor<B>, E> {
    let shape = x.shape();
    let device = x.device();
    let count = shape.num_elements();
    let dtype = FloatDType::from(x.dtype());
    let bools = bool_dtype::<B>(&device);
    let x = B::float_reshape(x, Shape::new([1, count]));
    let nan = B::float_is_nan(x.clone(), bools);
    let values = B::float_mask_fill(x, nan.clone(), f64::NEG_INFINITY.into());
    let marks = B::bool_into_float(nan, dtype);
    let both = max(B::float_cat(vec![values, marks], 0))?;
    let row = |index: usize| {
        let rows = Slice::from(index..index + 1);
        B::float_slice(both.clone(), &[rows, Slice::from(0..count)])
    };
    let nan = B::float_greater_elem(row(1), 0.5.into(), bools);
    Ok(B::float_reshape(
        B::float_mask_fill(row(0), nan, f64::NAN.into()),
        shape,
    ))
}

#[cfg(test)]
mod tests {
    use burn::{
        backend::Flex,
        tensor::{Device, Tensor},
    };

    use super::*;

    /// A maximum over two members that behaves like NCCL's: NaN only where both have it.
    fn dropping(x: [f32; 2]) -> f32 {
        x[0].max(x[1])
    }

    #[test]
    fn nan_of_any_member_stays_and_nothing_else_changes() {
        let inf = f32::INFINITY;
        let mine = [1.0, f32::NAN, -inf, inf, f32::NAN, -2.0];
        let other = [3.0, 7.0, -inf, 0.0, inf, f32::NAN];
        let [mine, other] = [mine, other].map(|x| {
            let x =
                Tensor::<2>::from_data([[x[0], x[1], x[2]], [x[3], x[4], x[5]]], &Device::flex());
            x.try_into_primitive::<Flex>().unwrap()
        });
        // Capture what the other member sends: run the same function and stop at its call of `max`.
        let sent = nan_propagating_max::<Flex, _>(other, Err).unwrap_err();
        let got = nan_propagating_max::<Flex, ()>(mine, |mine| {
            let [mine, theirs] = [mine, sent].map(|x| {
                Tensor::<2>::from_primitive::<Flex>(x)
                    .into_data()
                    .try_to_vec::<f32>()
                    .unwrap()
            });
            let all: Vec<f32> = mine
                .into_iter()
                .zip(theirs)
                .map(|(a, b)| dropping([a, b]))
                .collect();
            let all = Tensor::<1>::from_data(all.as_slice(), &Device::flex()).reshape([2, 6]);
            Ok(all.try_into_primitive::<Flex>().unwrap())
        });
        let got = Tensor::<2>::from_primitive::<Flex>(got.unwrap());
        assert_eq!(got.dims(), [2, 3]);
        let got = got.into_data().try_to_vec::<f32>().unwrap();
        let expected = [3.0, f32::NAN, -inf, inf, f32::NAN, f32::NAN];
        let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
        assert!(got.iter().zip(&expected).all(same), "{got:?}");
    }
}
