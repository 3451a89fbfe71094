use cubecl::prelude::*;
use megaburn_mesh::PositionRng;

/// A [`PositionRng`] on the device.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct RandomStream {
    key_0: u32,
    key_1: u32,
    stream_0: u32,
    stream_1: u32,
}

impl RandomStream {
    /// The launch argument for `rng`.
    pub(crate) fn of(rng: &PositionRng) -> RandomStreamLaunch {
        let [key_0, key_1] = rng.key();
        let [stream_0, stream_1] = rng.stream();
        RandomStreamLaunch::new(key_0, key_1, stream_0, stream_1)
    }

    /// The launch argument of a kernel that draws no random numbers.
    pub(crate) fn nothing() -> RandomStreamLaunch {
        RandomStreamLaunch::new(0, 0, 0, 0)
    }
}

/// The random bits at index `4 * block` and the three that follow it. `block_0` is the low and
/// `block_1` the high half of `block`. (Philox 4x32-10, see [`PositionRng`].)
#[cube]
pub(crate) fn random_bits(
    random: &RandomStream,
    block_0: u32,
    block_1: u32,
) -> (u32, u32, u32, u32) {
    let mut counter_0 = block_0;
    let mut counter_1 = block_1;
    let mut counter_2 = random.stream_0;
    let mut counter_3 = random.stream_1;
    let mut key_0 = random.key_0;
    let mut key_1 = random.key_1;
    #[unroll]
    for _ in 0..10 {
        // A GPU computes both halves of such a product with one instruction.
        let p = counter_0 as u64 * 0xD251_1F53u64;
        let q = counter_2 as u64 * 0xCD9E_8D57u64;
        counter_0 = (q >> 32u64) as u32 ^ counter_1 ^ key_0;
        counter_1 = q as u32;
        counter_2 = (p >> 32u64) as u32 ^ counter_3 ^ key_1;
        counter_3 = p as u32;
        key_0 = (key_0 as u64 + 0x9E37_79B9u64) as u32;
        key_1 = (key_1 as u64 + 0xBB67_AE85u64) as u32;
    }
    (counter_0, counter_1, counter_2, counter_3)
}

/// `2^-24`.
const UNIT: f32 = 1.0 / 16_777_216.0;

/// Maps random bits to a number in `[0, 1)`, as [`PositionRng::uniform`] does.
#[cube]
pub(crate) fn unit(bits: u32) -> f32 {
    (bits >> 8u32) as f32 * UNIT
}

#[cfg(test)]
mod tests {
    use megaburn_mesh::Purpose;

    use super::*;

    // The kernel's functions run on the host too; on a GPU the test of dropout compares them.
    #[test]
    fn a_kernel_draws_what_the_host_draws() {
        for (seed, stream) in [(0, 0), (1, 7), (u64::MAX, u64::MAX - 3)] {
            let rng = PositionRng::new(seed, Purpose::Dropout, "x").with_stream(stream);
            let [key_0, key_1] = rng.key();
            let [stream_0, stream_1] = rng.stream();
            let random = RandomStream {
                key_0,
                key_1,
                stream_0,
                stream_1,
            };
            for block in (0..100)
                .chain((1 << 32) - 5..(1 << 32) + 5)
                .chain([u64::MAX / 4])
            {
                let (a, b, c, d) = random_bits(&random, block as u32, (block >> 32) as u32);
                for (lane, bits) in [a, b, c, d].into_iter().enumerate() {
                    let index = 4 * block + lane as u64;
                    assert_eq!(bits, rng.bits(index), "index {index} of seed {seed}");
                    assert_eq!(unit(bits), rng.uniform(index));
                }
            }
        }
    }
}
