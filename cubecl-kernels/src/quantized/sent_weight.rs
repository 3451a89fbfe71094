//! Weights that ranks send each other in FP8.

use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::{DType, Tensor, TensorData, bf16};
use megaburn_autograd::arg_check::{self, float};

use super::format::SmallFloat;
#[cfg(feature = "cuda")]
use super::launch;
use super::recipe::{QuantizationRecipe, Scaling};
use super::scale::{self, Scale};
#[cfg(feature = "cuda")]
use crate::gpu::is_on_gpu;

/// The largest magnitude that the weight of a layer had before it was rounded to FP8 to be sent.
/// The layer derives its scale from it: that of the rounded weight may be another one. `None` if the
/// weight was not rounded. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct SentAmax(Arc<Mutex<Option<Tensor<1>>>>);

impl SentAmax {
    /// Sets the magnitude, `[1]` in f32, over all ranks that hold a part of the weight.
    pub fn set(&self, amax: Option<Tensor<1>>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = amax;
    }

    /// The magnitude.
    pub fn get(&self) -> Option<Tensor<1>> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

/// The scale with which a weight is sent in E4M3. A layer that quantises the weight with the same
/// scale gets the same numbers as from the weight itself.
///
/// Source: PyTorch torchao, `enable_fsdp_float8_all_gather`; Megatron-LM `--fp8-param-gather`.
#[derive(Clone, Debug)]
pub struct SentScale {
    /// The magnitude that it is derived from, `[1]` in f32.
    pub amax: Tensor<1>,
    /// Whether it is rounded down to a power of two.
    pub power_of_two: bool,
}

impl SentScale {
    /// The E4M3 numbers of a part of a weight, two in each element: for an odd number of elements,
    /// the last one has the number 0 too. It may be written to `room`.
    ///
    /// The result has the type bf16 only because Burn has no tensors of e4m3 numbers: its elements
    /// are bits that only [`unpacked`](Self::unpacked) may read.
    ///
    /// # Shapes
    /// - `x`: `[n]`, bf16, without autodiff; `room` and the result: `[ceil(n / 2)]`
    ///
    /// # Panics
    /// If `x` is not bf16.
    pub fn packed(&self, x: Tensor<1>, room: Option<Tensor<1>>) -> Tensor<1> {
        let weight = float("the weight", &x).of(&[DType::BF16]);
        arg_check::check("SentScale::packed", [weight]);
        let device = x.device();
        if x.dims() == [0] {
            return x;
        }
        #[cfg(feature = "cuda")]
        if is_on_gpu(&x) {
            return launch::packed_weight(x, self, room);
        }
        let _ = room;
        let scale = self.scale();
        let values: Vec<bf16> = x.into_data().try_to_vec().expect("the weight is bf16");
        let code = |x: &bf16| u16::from(code_of(f32::from(*x) * scale.factor));
        let pair = |pair: &[bf16]| {
            let second = pair.get(1).map_or(0, code);
            bf16::from_bits(code(&pair[0]) | second << 8)
        };
        let words: Vec<bf16> = values.chunks(2).map(pair).collect();
        Tensor::from_data(TensorData::from(words.as_slice()), (&device, DType::BF16))
    }

    /// The numbers of a part of a weight that was [packed](Self::packed), in bf16. With a power of
    /// two as scale, they are exact. They may be written to `room`, whose memory may extend beyond
    /// its end.
    ///
    /// # Shapes
    /// - `packed`: `[ceil(len / 2)]`; `room` and the result: `[len]`
    ///
    /// # Panics
    /// If `packed` has another length or is not bf16.
    pub fn unpacked(&self, packed: Tensor<1>, len: usize, room: Option<Tensor<1>>) -> Tensor<1> {
        let name = "SentScale::unpacked";
        arg_check::check(name, [float("the weight", &packed).of(&[DType::BF16])]);
        let ([found], expected) = (packed.dims(), len.div_ceil(2));
        assert_eq!(
            found, expected,
            "{name}: {found} elements were sent, but {len} numbers take {expected}"
        );
        if len == 0 {
            return packed;
        }
        #[cfg(feature = "cuda")]
        if is_on_gpu(&packed) {
            return launch::unpacked_weight(packed, self, len, room);
        }
        let _ = room;
        let device = packed.device();
        let scale = self.scale();
        let words: Vec<bf16> = packed.into_data().try_to_vec().expect("the bits are bf16");
        let value = |i: usize| {
            let code = (words[i / 2].to_bits() >> (i % 2 * 8)) as u8;
            bf16::from_f32(number_of(code) * scale.inverse)
        };
        let values: Vec<bf16> = (0..len).map(value).collect();
        Tensor::from_data(TensorData::from(values.as_slice()), (&device, DType::BF16))
    }

    /// The scale, on the host.
    fn scale(&self) -> Scale {
        let amax: Vec<f32> = self.amax.to_data().try_to_vec().expect("it is f32");
        let recipe = QuantizationRecipe {
            scaling: Scaling::Tensor,
            forward: SmallFloat::E4m3,
            gradients: SmallFloat::E4m3,
            power_of_two_scales: self.power_of_two,
        };
        Scale::new(&recipe, SmallFloat::E4m3, amax[0])
    }
}

/// The largest magnitude of a part of a weight: 0 without elements, and NaN if one is NaN.
///
/// # Shapes
/// - `x`: `[n]`, without autodiff; result: `[1]`, f32
pub fn largest_magnitude(x: Tensor<1>) -> Tensor<1> {
    let device = x.device();
    if x.dims() == [0] {
        return Tensor::zeros([1], (&device, DType::F32));
    }
    #[cfg(feature = "cuda")]
    if is_on_gpu(&x) {
        return launch::largest_magnitude(x);
    }
    let values: Vec<f32> = x
        .cast(DType::F32)
        .into_data()
        .try_to_vec()
        .expect("it was cast to f32");
    Tensor::from_floats([scale::largest_magnitude(values)], &device)
}

/// The difference of the biases of exponents of f32 and E4M3, in front of 3 bits of mantissa.
const BIAS: u32 = (127 - 7) << 3;
/// One over the smallest number of E4M3 above 0.
const STEPS: f32 = 512.0;

/// The code of the E4M3 number that is nearest to `x`.
fn code_of(x: f32) -> u8 {
    let rounded = SmallFloat::E4m3.round(x);
    let sign = (rounded.to_bits() >> 24) as u8 & 0x80;
    let magnitude = rounded.abs();
    let code = if magnitude.is_nan() {
        0x7f
    } else if magnitude * STEPS < 8.0 {
        (magnitude * STEPS) as u32
    } else {
        (magnitude.to_bits() >> 20) - BIAS
    };
    sign | code as u8
}

/// The number that a code stands for. That of NaN becomes another number: a weight with NaN has a
/// scale whose inverse is NaN.
fn number_of(code: u8) -> f32 {
    let magnitude = u32::from(code & 0x7f);
    let number = match magnitude {
        0..8 => magnitude as f32 / STEPS,
        _ => f32::from_bits((magnitude + BIAS) << 20),
    };
    if code & 0x80 == 0 { number } else { -number }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use rstest::rstest;

    use super::super::{MatrixRole, SummedDim, quantized_numbers};
    use super::*;

    fn weight(len: usize, factor: f32) -> Tensor<1> {
        let number = |i: usize| {
            let wave = (i as f32 * 0.7).sin() * (i as f32 * 0.013).exp2();
            wave * factor
        };
        let numbers: Vec<f32> = (0..len).map(number).collect();
        Tensor::<1>::from_floats(numbers.as_slice(), &Device::flex()).cast(DType::BF16)
    }

    fn values<const D: usize>(x: Tensor<D>) -> Vec<f32> {
        let data = x.cast(DType::F32).into_data();
        data.try_to_vec().unwrap()
    }

    fn sent(x: &Tensor<1>, power_of_two: bool) -> Tensor<1> {
        let len = x.dims()[0];
        let amax = largest_magnitude(x.clone());
        let scale = SentScale { amax, power_of_two };
        let packed = scale.packed(x.clone(), None);
        assert_eq!(packed.dims(), [len.div_ceil(2)]);
        scale.unpacked(packed, len, None)
    }

    #[test]
    fn every_code_is_that_of_its_number() {
        for code in (0..=0xffu8).filter(|code| code & 0x7f != 0x7f) {
            let number = number_of(code);
            assert_eq!(number, float8::F8E4M3::from_bits(code).to_f32());
            assert_eq!(code_of(number), code);
        }
        assert_eq!(code_of(f32::NAN) & 0x7f, 0x7f);
        assert_eq!(code_of(1e9), 0x7e);
    }

    /// A layer that derives its scale from the magnitude before gets the same numbers from a weight
    /// that was sent.
    #[rstest]
    fn a_weight_that_was_sent_is_quantised_to_the_same_numbers(
        #[values(2, 97, 512)] len: usize,
        #[values(false, true)] power_of_two_scales: bool,
        #[values(1.0, 3e-7, 2e9)] factor: f32,
    ) {
        let recipe = QuantizationRecipe {
            scaling: Scaling::Tensor,
            forward: SmallFloat::E4m3,
            gradients: SmallFloat::E5m2,
            power_of_two_scales,
        };
        let x = weight(len, factor);
        let arrived = sent(&x, power_of_two_scales);
        let own = quantized_numbers(
            x.clone().reshape([1, len]),
            recipe,
            MatrixRole::Weight,
            SummedDim::Cols,
        );
        let amax = values(largest_magnitude(x))[0];
        let scale = Scale::new(&recipe, SmallFloat::E4m3, amax);
        let found = values(arrived.cast(DType::F32));
        let found = found
            .iter()
            .map(|x| scale.quantized(SmallFloat::E4m3, *x).to_bits());
        let own = values(own);
        assert!(found.eq(own.iter().map(|x| x.to_bits())), "{own:?}");
        if power_of_two_scales {
            assert_eq!(
                values(sent(&weight(len, factor), true).cast(DType::F32)),
                own
            );
        }
    }

    /// The scale of the sent weight itself may be another one: the largest number is rounded.
    #[test]
    fn the_magnitude_before_differs_from_that_of_the_sent_weight() {
        let x = Tensor::<1>::from_floats([1.0, 230.0], &Device::flex()).cast(DType::BF16);
        let arrived = largest_magnitude(sent(&x, true));
        assert_eq!(
            [values(largest_magnitude(x))[0], values(arrived)[0]],
            [230.0, 224.0]
        );
    }

    #[test]
    fn a_weight_that_is_not_finite_becomes_nan() {
        for broken in [f32::NAN, f32::INFINITY] {
            let x = Tensor::<1>::from_floats([1.0, broken, 2.0], &Device::flex());
            let found = values(sent(&x.cast(DType::BF16), false).cast(DType::F32));
            assert!(found.iter().all(|x| x.is_nan()), "{found:?}");
        }
        let nothing = Tensor::<1>::empty([0], (&Device::flex(), DType::BF16));
        assert_eq!(values(largest_magnitude(nothing.clone())), [0.0]);
        assert_eq!(sent(&nothing, true).dims(), [0]);
    }
}
