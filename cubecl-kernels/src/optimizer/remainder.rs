//! f32 masters of bf16 parameters, stored as the 16 bits that the parameter does not have.

use burn::tensor::{DType, Tensor, TensorData, bf16};
use megaburn_autograd::arg_check::{self, float};

#[cfg(feature = "cuda")]
use super::launch;
#[cfg(feature = "cuda")]
use crate::gpu::is_on_gpu;

/// The f32 masters of bf16 parameters whose [`master_remainder`] was kept.
///
/// A bf16 number is the upper half of an f32 number, so a parameter that was rounded to nearest and
/// the signed difference of the bits give the master back.
///
/// # Shapes
/// - `param`: `[n]`, bf16; `remainder`: `[n]`; without autodiff
/// - result: `[n]`, f32
///
/// # Panics
/// If the lengths differ, or one of the tensors is not bf16.
pub fn joined_master(param: Tensor<1>, remainder: Tensor<1>) -> Tensor<1> {
    let name = "joined_master";
    check(name, "remainder", &remainder, &[DType::BF16], &param);
    let [param, remainder] = [param, remainder].map(Tensor::inner);
    if param.dims() == [0] {
        return param.cast(DType::F32);
    }
    #[cfg(feature = "cuda")]
    if is_on_gpu(&param) {
        return launch::remainder::joined_master(param, remainder);
    }
    let device = param.device();
    let pairs = elements(param).into_iter().zip(elements(remainder));
    let masters: Vec<f32> = pairs.map(|(param, rest)| joined(param, rest)).collect();
    let data = TensorData::from(masters.as_slice());
    Tensor::from_data(data, (&device, DType::F32))
}

/// What a bf16 parameter lacks of its f32 master: the difference of their bits, as a signed 16-bit
/// number. The parameter must be the master rounded to nearest, the even one of two.
///
/// Of the 65,537 masters that are rounded to an even parameter, one does not fit: the one exactly
/// between it and the next larger magnitude. It is kept as the f32 number before it, which rounds
/// to the same parameter. All others are kept exactly.
///
/// The result has the type bf16 only because Burn's float tensors have no 16-bit integers: its
/// elements are bits that only [`joined_master`] may read as numbers.
///
/// Source: Transformer Engine's `FusedAdam(store_param_remainders=True)`, which rounds such masters
/// away from zero instead.
///
/// # Shapes
/// - `master`: `[n]`, f32; `param`: `[n]`, bf16; without autodiff
/// - result: `[n]`
///
/// # Panics
/// If the lengths differ, or a tensor has another type than these.
pub fn master_remainder(master: Tensor<1>, param: Tensor<1>) -> Tensor<1> {
    let name = "master_remainder";
    check(name, "master", &master, &[DType::F32], &param);
    let [master, param] = [master, param].map(Tensor::inner);
    if param.dims() == [0] {
        return param;
    }
    #[cfg(feature = "cuda")]
    if is_on_gpu(&param) {
        return launch::remainder::master_remainder(master, param);
    }
    let device = param.device();
    let masters: Vec<f32> = master.into_data().try_to_vec().expect("the master is f32");
    let pairs = masters.into_iter().zip(elements(param));
    let bits: Vec<bf16> = pairs.map(|(master, param)| rest(master, param)).collect();
    let data = TensorData::from(bits.as_slice());
    Tensor::from_data(data, (&device, DType::BF16))
}

fn joined(param: bf16, remainder: bf16) -> f32 {
    let upper = u32::from(param.to_bits()) << 16;
    f32::from_bits(upper.wrapping_add_signed(i32::from(remainder.to_bits() as i16)))
}

fn rest(master: f32, param: bf16) -> bf16 {
    let upper = u32::from(param.to_bits()) << 16;
    let difference = master.to_bits().wrapping_sub(upper) as i32;
    // NaN, which may be rounded to another NaN, stays NaN.
    bf16::from_bits(difference.clamp(i16::MIN.into(), i16::MAX.into()) as u16)
}

fn check(
    name: &str,
    what: &'static str,
    x: &Tensor<1>,
    dtype: &'static [DType],
    param: &Tensor<1>,
) {
    let operands = [
        float("the parameter", param).of(&[DType::BF16]),
        float(what, x).of(dtype),
    ];
    arg_check::check(name, operands);
    let [[found], [len]] = [x.dims(), param.dims()];
    assert_eq!(
        found, len,
        "{name}: {what} has {found} elements, but the parameter has {len}"
    );
}

fn elements(x: Tensor<1>) -> Vec<bf16> {
    x.into_data().try_to_vec().expect("the tensor is bf16")
}

#[cfg(test)]
mod tests {
    use megaburn_autograd::testing::{assert_refused, constant, device};
    use rstest::rstest;

    use super::*;

    fn tensor(values: &[f32]) -> Tensor<1> {
        Tensor::from_data(TensorData::from(values), (&device().inner(), DType::F32))
    }

    /// The masters after a parameter has been made of each, and the parameters of both.
    fn kept(masters: &[f32]) -> (Vec<u32>, [Vec<u16>; 2]) {
        let bits = |x: Tensor<1>| elements(x).into_iter().map(bf16::to_bits).collect();
        let master = tensor(masters);
        let param = master.clone().cast(DType::BF16);
        let remainder = master_remainder(master, param.clone());
        let joined = joined_master(param.clone(), remainder);
        let again = joined.clone().cast(DType::BF16);
        let found: Vec<f32> = joined.into_data().try_to_vec().unwrap();
        (
            found.into_iter().map(f32::to_bits).collect(),
            [bits(param), bits(again)],
        )
    }

    /// Every lower half of the bits, with upper halves that are even and odd, the smallest and the
    /// largest, of both signs.
    #[rstest]
    #[case(0x3f80)]
    #[case(0x3f81)]
    #[case(0xbf80)]
    #[case(0xbf7f)]
    #[case(0x0000)]
    #[case(0x8000)]
    #[case(0x007f)]
    #[case(0x7f7e)]
    #[case(0xff7f)]
    fn masters_are_kept_to_the_bit(#[case] upper: u32) {
        let bits: Vec<u32> = (0..1 << 16).map(|lower| upper << 16 | lower).collect();
        let masters: Vec<f32> = bits.iter().map(|bits| f32::from_bits(*bits)).collect();
        let (mut found, [param, again]) = kept(&masters);
        assert_eq!(param, again);
        if upper.is_multiple_of(2) {
            // Exactly between two parameters, of which the lower one is even.
            assert_eq!(found[0x8000], bits[0x7fff]);
            found[0x8000] = bits[0x8000];
        }
        assert!(found == bits);
    }

    #[test]
    fn what_is_not_finite_stays_so() {
        let masters = [
            f32::NAN,
            -f32::NAN,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::MAX,
        ];
        let (found, _) = kept(&masters);
        let found: Vec<f32> = found.into_iter().map(f32::from_bits).collect();
        assert!(found[0].is_nan() && found[1].is_nan());
        assert_eq!(found[2..], masters[2..]);
        // A NaN that another device rounded.
        for (master, param) in [(-f32::NAN, 0x7fff), (f32::NAN, 0xffff), (f32::NAN, 0x7fc0)] {
            let param = bf16::from_bits(param);
            assert!(joined(param, rest(master, param)).is_nan());
        }
    }

    #[test]
    fn a_parameter_without_a_remainder_is_its_master() {
        let param = constant([37]).cast(DType::BF16);
        let zeros = param.zeros_like();
        let master = joined_master(param.clone(), zeros);
        assert_eq!(master.into_data(), param.cast(DType::F32).into_data());
        let none = || Tensor::<1>::empty([0], (&device().inner(), DType::BF16));
        assert_eq!(joined_master(none(), none()).dims(), [0]);
    }

    #[rstest]
    #[case(|| joined_master(constant([4]), constant([4]).cast(DType::BF16)), "joined_master: the parameter is f32, not bf16")]
    #[case(|| master_remainder(constant([4]).cast(DType::BF16), constant([4]).cast(DType::BF16)), "master is bf16, not f32")]
    #[case(|| master_remainder(constant([5]), constant([4]).cast(DType::BF16)), "master has 5 elements, but the parameter has 4")]
    fn bad_input_is_refused(#[case] call: fn() -> Tensor<1>, #[case] message: &str) {
        assert_refused(call, message);
    }
}
