//! Moments of an optimizer in 8 bits per element.

use burn::tensor::{DType, Tensor, TensorData, bf16};
use megaburn_autograd::arg_check::{self, float};

#[cfg(feature = "cuda")]
use super::launch;
#[cfg(feature = "cuda")]
use crate::gpu::is_on_gpu;

/// Elements that share a scale.
pub const FP8_MOMENT_BLOCK: usize = 128;

/// 16-bit words of a block: two codes each, and one of all for the scale.
const WORDS: usize = FP8_MOMENT_BLOCK / 2 + 1;

/// How a moment is coded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fp8Moment {
    /// A mean of gradients.
    Plain,
    /// A mean of squared gradients: its root is coded. e4m3 numbers reach from 2^-9 to 448, and
    /// squares of gradients in a block differ by more. Rounding keeps the mean of roots, so that
    /// the mean of squares grows by its variance: after 50 steps that decay by 1%, it is 3% too
    /// large.
    Root,
}

/// Stores a moment in 8 bits per element, and 16 more for each [`FP8_MOMENT_BLOCK`] elements.
///
/// A block has a scale, its largest magnitude over 448, rounded up to bf16. An element is the e4m3
/// number on either side of its quotient by the scale, chosen at random with the probability that
/// keeps the mean: a decay by less than half the distance of two numbers, 1/16 to 1/8 of them, is
/// then not lost. What is nearly 448 becomes 448. Of squares, what is not 0 does not become 0, so
/// that no update divides by a root that was lost. Random numbers are a function of `seed` and the
/// position of the element, which is `first` for the first one. Packing what was
/// [unpacked](unpacked_moment) changes nothing, whatever the seed. A block with an element that is
/// not finite becomes NaN.
///
/// The result has the type bf16 only because Burn has no tensors of e4m3 numbers: its elements are
/// bits that only [`unpacked_moment`] may read.
///
/// Source: Transformer Engine's `FusedAdam(exp_avg_dtype=torch.uint8)` has e4m3 moments with a
/// scale for each tensor, and rounds to nearest.
///
/// # Shapes
/// - `x`: `[n]`, f32, without autodiff
/// - result: `[65 * ceil(n / 128)]`: codes, two in each element, then scales
///
/// # Panics
/// If `x` is not f32.
pub fn packed_moment(x: Tensor<1>, code: Fp8Moment, seed: u32, first: usize) -> Tensor<1> {
    arg_check::check("packed_moment", [float("the moment", &x).of(&[DType::F32])]);
    let x = x.inner();
    let device = x.device();
    if x.dims() == [0] {
        return Tensor::empty([0], (&device, DType::BF16));
    }
    // Positions count modulo 2^32.
    let first = first as u32;
    #[cfg(feature = "cuda")]
    if is_on_gpu(&x) {
        return launch::fp8_moment::packed_moment(x, code, seed, first);
    }
    let values: Vec<f32> = x.into_data().try_to_vec().expect("the moment is f32");
    let num_blocks = values.len().div_ceil(FP8_MOMENT_BLOCK);
    let mut codes = Vec::with_capacity(num_blocks * WORDS);
    let mut scales = Vec::with_capacity(num_blocks);
    for (block, values) in values.chunks(FP8_MOMENT_BLOCK).enumerate() {
        let coded = |i: usize| code.coded(values.get(i).copied().unwrap_or(0.0));
        let scale = scale_of((0..values.len()).map(coded));
        let at = first.wrapping_add((block * FP8_MOMENT_BLOCK) as u32);
        let byte = |i: usize| {
            let random = mixed(seed ^ mixed(at.wrapping_add(i as u32)));
            u16::from(code.byte(coded(i), f32::from(scale), random))
        };
        let pairs = (0..FP8_MOMENT_BLOCK).step_by(2);
        codes.extend(pairs.map(|i| bf16::from_bits(byte(i) | byte(i + 1) << 8)));
        scales.push(scale);
    }
    codes.extend(scales);
    let data = TensorData::from(codes.as_slice());
    Tensor::from_data(data, (&device, DType::BF16))
}

/// The moment of `len` elements that [`packed_moment`] stored.
///
/// # Shapes
/// - `packed`: `[65 * ceil(len / 128)]`; result: `[len]`, f32
///
/// # Panics
/// If `packed` has another length or is not bf16.
pub fn unpacked_moment(packed: Tensor<1>, len: usize, code: Fp8Moment) -> Tensor<1> {
    let name = "unpacked_moment";
    let packed = packed.inner();
    arg_check::check(name, [float("the moment", &packed).of(&[DType::BF16])]);
    let num_blocks = len.div_ceil(FP8_MOMENT_BLOCK);
    let [found] = packed.dims();
    let expected = num_blocks * WORDS;
    assert_eq!(
        found, expected,
        "{name}: {found} elements are stored, but {len} numbers take {expected}"
    );
    let device = packed.device();
    if len == 0 {
        return Tensor::empty([0], (&device, DType::F32));
    }
    #[cfg(feature = "cuda")]
    if is_on_gpu(&packed) {
        return launch::fp8_moment::unpacked_moment(packed, len, code);
    }
    let words: Vec<bf16> = packed.into_data().try_to_vec().expect("the moment is bf16");
    let (codes, scales) = words.split_at(num_blocks * FP8_MOMENT_BLOCK / 2);
    let value = |i: usize| {
        let byte = (codes[i / 2].to_bits() >> (i % 2 * 8)) as u8;
        code.value(byte, f32::from(scales[i / FP8_MOMENT_BLOCK]))
    };
    let values: Vec<f32> = (0..len).map(value).collect();
    let data = TensorData::from(values.as_slice());
    Tensor::from_data(data, (&device, DType::F32))
}

impl Fp8Moment {
    /// What is coded of an element.
    fn coded(self, x: f32) -> f32 {
        match self {
            Self::Plain => x,
            Self::Root => x.sqrt(),
        }
    }

    /// The e4m3 number of a coded element, rounded with 20 random bits.
    fn byte(self, x: f32, scale: f32, random: u32) -> u8 {
        if scale == 0.0 || scale.is_nan() {
            return 0;
        }
        let x = x / scale;
        let sign = (x.to_bits() >> 24) as u8 & 0x80;
        let bits = x.to_bits() & 0x7fff_ffff;
        let random = random >> 12;
        let magnitude = if bits >= NEARLY_LARGEST.to_bits() {
            LARGEST_CODE
        } else if bits >= SMALLEST_NORMAL.to_bits() {
            // The upper bits are those of an e4m3 number with another bias of the exponent.
            (((bits + random) >> 20) - BIAS) as u8
        } else {
            let steps = f32::from_bits(bits) * STEPS;
            match self {
                Self::Root if 0.0 < steps && steps < 1.0 => 1,
                Self::Root | Self::Plain => (steps + random as f32 * UNIT) as u8,
            }
        };
        sign | magnitude
    }

    /// The element of an e4m3 number.
    fn value(self, byte: u8, scale: f32) -> f32 {
        let magnitude = u32::from(byte & 0x7f);
        let number = match magnitude {
            0..8 => magnitude as f32 / STEPS,
            _ => f32::from_bits((magnitude + BIAS) << 20),
        };
        let x = number * scale;
        match self {
            Self::Plain if byte & 0x80 != 0 => -x,
            Self::Plain => x,
            Self::Root => x * x,
        }
    }
}

/// The code of 448.
const LARGEST_CODE: u8 = 0x7e;
/// What becomes 448: the largest quotient of a block is at most this much smaller.
const NEARLY_LARGEST: f32 = 444.0;
const SMALLEST_NORMAL: f32 = 1.0 / 64.0;
/// Smaller numbers are multiples of the inverse of this.
const STEPS: f32 = 512.0;
/// The smallest random number above 0, with 20 bits.
const UNIT: f32 = 1.0 / 1_048_576.0;
/// The difference of the biases of exponents of f32 and e4m3, in front of 3 bits of mantissa.
const BIAS: u32 = (127 - 7) << 3;

/// The scale of a block; NaN if an element is not finite.
fn scale_of(values: impl Iterator<Item = f32>) -> bf16 {
    // The bits of NaN are larger than those of all numbers.
    let bits = values.map(|x| x.to_bits() & 0x7fff_ffff).max();
    let largest = f32::from_bits(bits.unwrap_or(0));
    if !largest.is_finite() {
        return bf16::NAN;
    }
    let scale = (largest / 448.0).to_bits();
    bf16::from_bits(((scale + 0xffff) >> 16) as u16)
}

/// A permutation of the 32-bit numbers without apparent order.
///
/// Source: the finalizer of MurmurHash3, <https://github.com/aappleby/smhasher>.
fn mixed(x: u32) -> u32 {
    let x = (x ^ x >> 16).wrapping_mul(0x85eb_ca6b);
    let x = (x ^ x >> 13).wrapping_mul(0xc2b2_ae35);
    x ^ x >> 16
}

#[cfg(test)]
mod tests {
    use megaburn_autograd::testing::{assert_refused, constant, device};
    use rstest::rstest;

    use super::*;

    const CODES: [Fp8Moment; 2] = [Fp8Moment::Plain, Fp8Moment::Root];

    fn tensor(values: &[f32]) -> Tensor<1> {
        Tensor::from_data(TensorData::from(values), (&device().inner(), DType::F32))
    }

    fn numbers(x: Tensor<1>) -> Vec<f32> {
        x.into_data().try_to_vec().unwrap()
    }

    /// The numbers that are stored of these.
    fn kept(values: &[f32], code: Fp8Moment, seed: u32) -> Vec<f32> {
        let packed = packed_moment(tensor(values), code, seed, 0);
        assert_eq!(packed.dims(), [values.len().div_ceil(128) * 65]);
        numbers(unpacked_moment(packed, values.len(), code))
    }

    /// Magnitudes over many orders, of both signs unless they are squares.
    fn wide(len: usize, code: Fp8Moment) -> Vec<f32> {
        let normal = numbers(constant([len]));
        let order = numbers(constant([len]));
        let pairs = normal.into_iter().zip(order);
        let wide = pairs.map(|(x, order)| x * (3.0 * order).exp());
        match code {
            Fp8Moment::Plain => wide.collect(),
            Fp8Moment::Root => wide.map(|x| x * x).collect(),
        }
    }

    #[rstest]
    fn an_element_is_a_number_next_to_it(
        #[values(1, 37, 128, 1000)] len: usize,
        #[values(0, 1)] code: usize,
    ) {
        let code = CODES[code];
        let values = wide(len, code);
        for (block, found) in values.chunks(128).zip(kept(&values, code, 7).chunks(128)) {
            let largest = block
                .iter()
                .fold(0f32, |most, x| most.max(code.coded(*x).abs()));
            for (x, found) in block.iter().zip(found) {
                let [x, found] = [*x, *found].map(|x| code.coded(x));
                let distance = (found - x).abs();
                let bound = (x.abs() / 8.0).max(largest / 448.0 / 512.0 * 1.01);
                assert!(distance <= bound, "{x} became {found}");
                assert!(found == 0.0 || found.is_sign_negative() == x.is_sign_negative());
                assert!(code == Fp8Moment::Plain || (found == 0.0) == (x == 0.0));
            }
        }
    }

    #[rstest]
    fn what_was_stored_stays_under_any_seed(
        #[values(1, 37, 128, 1000)] len: usize,
        #[values(0, 1)] code: usize,
    ) {
        let code = CODES[code];
        let first = kept(&wide(len, code), code, 1);
        for seed in 2..12 {
            assert_eq!(kept(&first, code, seed), first);
        }
    }

    /// Every number of the format, of both signs, at any random number.
    #[test]
    fn numbers_of_the_format_are_kept() {
        let format = crate::SmallFloat::E4m3;
        for byte in (0..=LARGEST_CODE).flat_map(|byte| [byte, byte | 0x80]) {
            let number = Fp8Moment::Plain.value(byte, 1.0);
            assert_eq!(format.round(number).to_bits(), number.to_bits());
            for random in [0, 1, u32::MAX / 3, u32::MAX] {
                assert_eq!(Fp8Moment::Plain.byte(number, 1.0, random), byte);
            }
        }
        assert_eq!(Fp8Moment::Plain.value(LARGEST_CODE, 1.0), 448.0);
    }

    /// A mean that decays by 1% of itself a step, which is less than half the distance of two
    /// numbers, falls as it does in f32.
    #[rstest]
    fn small_changes_are_kept_on_average(#[values(0, 1)] code: usize) {
        let code = CODES[code];
        let mut values = vec![1.0; 4096];
        // The largest element of each block sets the scale.
        let largest = |values: &mut Vec<f32>| values.iter_mut().step_by(128).for_each(|x| *x = 2.0);
        largest(&mut values);
        for seed in 0..50 {
            values.iter_mut().for_each(|x| *x *= 0.99);
            largest(&mut values);
            values = kept(&values, code, seed);
        }
        let others = (0..4096)
            .filter(|i| i % 128 != 0)
            .map(|i| f64::from(values[i]));
        let mean = others.sum::<f64>() / (4096.0 - 32.0);
        let expected = 0.99f64.powi(50);
        assert!(
            (mean / expected - 1.0).abs() < 0.05,
            "{mean}, not {expected}"
        );
    }

    #[test]
    fn positions_count_from_the_first() {
        let values = wide(512, Fp8Moment::Plain);
        let whole = kept(&values, Fp8Moment::Plain, 3);
        let rest = packed_moment(tensor(&values[256..]), Fp8Moment::Plain, 3, 256);
        let rest = numbers(unpacked_moment(rest, 256, Fp8Moment::Plain));
        assert_eq!(rest, whole[256..]);
        assert_ne!(kept(&values, Fp8Moment::Plain, 4), whole);
    }

    #[rstest]
    fn what_is_not_finite_spoils_its_block_only(
        #[values(f32::NAN, f32::INFINITY, f32::NEG_INFINITY)] bad: f32,
    ) {
        let mut values = vec![1.0; 256];
        values[130] = bad;
        let found = kept(&values, Fp8Moment::Plain, 1);
        assert!(found[..128].iter().all(|x| (x - 1.0).abs() < 0.01));
        assert!(found[128..].iter().all(|x| x.is_nan()));
    }

    #[test]
    fn zeros_and_the_smallest_and_largest_numbers_are_kept() {
        for code in CODES {
            assert_eq!(kept(&[0.0; 5], code, 1), [0.0; 5]);
            for x in [1e-30, f32::MAX / 2.0] {
                let found = kept(&[x], code, 1)[0];
                assert!((found / x - 1.0).abs() < 0.02, "{x} became {found}");
            }
        }
        assert_eq!(
            packed_moment(tensor(&[]), Fp8Moment::Root, 0, 0).dims(),
            [0]
        );
        let none = Tensor::empty([0], (&device().inner(), DType::BF16));
        assert_eq!(unpacked_moment(none, 0, Fp8Moment::Root).dims(), [0]);
    }

    #[rstest]
    #[case(|| packed_moment(constant([4]).cast(DType::BF16), Fp8Moment::Plain, 0, 0), "packed_moment: the moment is bf16, not f32")]
    #[case(|| unpacked_moment(constant([65]), 128, Fp8Moment::Plain), "unpacked_moment: the moment is f32, not bf16")]
    #[case(|| unpacked_moment(constant([65]).cast(DType::BF16), 129, Fp8Moment::Plain), "65 elements are stored, but 129 numbers take 130")]
    fn bad_input_is_refused(#[case] call: fn() -> Tensor<1>, #[case] message: &str) {
        assert_refused(call, message);
    }
}
