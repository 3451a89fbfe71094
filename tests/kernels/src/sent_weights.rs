//! Tests of weights that are sent in FP8: the bits are those of the CPU.

use burn::prelude::Device;
use burn::tensor::{DType, Tensor};
use megaburn_kernels::{SentScale, bf16_out_slice, largest_magnitude};

use super::compare::{host, normal};
use super::part;

pub(super) const TESTS: &[super::Test] =
    &[("weights_that_are_sent_are_those_of_the_cpu", sent_weights)];

/// The codes and the values that arrive, also where they are written to a part of a buffer.
fn sent_weights() -> Result<(), String> {
    const START: usize = 512;
    for len in [1, 2, 97, 512, 4100] {
        for power_of_two in [false, true] {
            if !part::is_mine() {
                continue;
            }
            let x = normal([1, len], DType::BF16);
            let of = |device: &Device, has_room: bool| {
                let x = Tensor::<2>::from_data(x.clone(), (device, DType::BF16)).flatten(0, 1);
                let amax = largest_magnitude(x.clone());
                let scale = SentScale { amax, power_of_two };
                let buffer = Tensor::<1>::zeros([2 * START + len], (device, DType::BF16));
                let room = |len: usize| {
                    let place = START..START + len;
                    has_room.then(|| bf16_out_slice(&buffer, place)).flatten()
                };
                let packed = scale.packed(x, room(len.div_ceil(2)));
                let codes = packed.clone().into_data().as_bytes().to_vec();
                let values = scale.unpacked(packed, len, None);
                let placed = scale.unpacked(scale.packed(values.clone(), None), len, room(len));
                drop(placed);
                let placed = has_room.then(|| host(buffer.narrow(0, START, len)));
                Ok::<_, String>((codes, host(values)?, placed.transpose()?))
            };
            let expected = of(&Device::flex(), false)?;
            let found = of(&Device::cuda(0), false)?;
            let (codes, values, placed) = of(&Device::cuda(0), true)?;
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            let is_same = codes == expected.0
                && found.0 == expected.0
                && bits(&values) == bits(&expected.1)
                && bits(&found.1) == bits(&expected.1)
                && bits(&placed.unwrap_or_default()) == bits(&expected.1);
            if !is_same {
                return Err(format!("{len} elements, power_of_two {power_of_two}"));
            }
        }
    }
    Ok(())
}
