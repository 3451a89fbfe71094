//! Kernels for moments in 8 bits per element. The arithmetic is that of
//! [`fp8_moment`](crate::optimizer::fp8_moment), to the bit.

use cubecl::prelude::*;

/// Units that share a block.
const BLOCK_UNITS: u32 = 32;
/// Elements of a unit.
const PER_UNIT: usize = 4;
/// Blocks of a cube of [`packed_moment_kernel`].
pub(in crate::optimizer) const BLOCKS: usize = 8;
/// The difference of the biases of exponents of f32 and e4m3, in front of 3 bits of mantissa.
const BIAS: u32 = (127 - 7) << 3;

/// The shape of a cube of [`packed_moment_kernel`].
pub(in crate::optimizer) fn block_units() -> CubeDim {
    CubeDim::new_2d(BLOCK_UNITS, BLOCKS as u32)
}

/// The length of a moment, and what its random numbers are a function of.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(in crate::optimizer) struct PackedMoment {
    pub(in crate::optimizer) len: u32,
    pub(in crate::optimizer) blocks: u32,
    pub(in crate::optimizer) seed: u32,
    pub(in crate::optimizer) first: u32,
}

/// Packs a moment: a plane packs a block of 128 elements.
#[cube(launch)]
pub(in crate::optimizer) fn packed_moment_kernel(
    x: &[f32],
    packed: &mut [u16],
    moment: PackedMoment,
    #[comptime] root: bool,
) {
    let block = CUBE_POS as u32 * comptime!(BLOCKS as u32) + UNIT_POS_Y;
    if block < moment.blocks {
        let from = block * comptime!(BLOCK_UNITS * PER_UNIT as u32)
            + UNIT_POS_X * comptime!(PER_UNIT as u32);
        let mut values = Array::<f32>::new(PER_UNIT);
        let mut most = u32::new(0);
        #[unroll]
        for i in 0..PER_UNIT {
            let at = from + comptime!(i as u32);
            let mut value = f32::new(0.0);
            if at < moment.len {
                value = x[at as usize];
            }
            if comptime!(root) {
                value = value.sqrt();
            }
            values[i] = value;
            most = max(most, u32::reinterpret(value) & 0x7fff_ffffu32);
        }
        let scale = scale_of(plane_max(most));
        let mut bytes = Array::<u32>::new(PER_UNIT);
        #[unroll]
        for i in 0..PER_UNIT {
            let at = moment.first + from + comptime!(i as u32);
            let random = mixed(moment.seed ^ mixed(at));
            bytes[i] = byte(values[i], f32::reinterpret(scale << 16u32), random, root);
        }
        let to = (from / 2) as usize;
        packed[to] = u16::cast_from(bytes[0usize] | (bytes[1usize] << 8u32));
        packed[to + 1] = u16::cast_from(bytes[2usize] | (bytes[3usize] << 8u32));
        if UNIT_POS_X == 0 {
            let scales = moment.blocks * comptime!(BLOCK_UNITS * PER_UNIT as u32 / 2);
            packed[(scales + block) as usize] = u16::cast_from(scale);
        }
    }
}

/// Unpacks a moment: a unit writes an element.
#[cube(launch)]
pub(in crate::optimizer) fn unpacked_moment_kernel(
    packed: &[u16],
    x: &mut [f32],
    len: u32,
    blocks: u32,
    #[comptime] root: bool,
) {
    let at = ABSOLUTE_POS as u32;
    if at < len {
        let pair = u32::cast_from(packed[(at / 2) as usize]);
        let scales = blocks * comptime!(BLOCK_UNITS * PER_UNIT as u32 / 2);
        let block = at / comptime!(BLOCK_UNITS * PER_UNIT as u32);
        let scale = u32::cast_from(packed[(scales + block) as usize]);
        let byte = (pair >> (at % 2 * 8)) & 0xffu32;
        x[at as usize] = value_of(byte, f32::reinterpret(scale << 16u32), root);
    }
}

/// The bits of the scale of a block, a bf16 number, from those of its largest magnitude.
#[cube]
fn scale_of(largest: u32) -> u32 {
    let scale = u32::reinterpret(f32::reinterpret(largest) / 448.0);
    let mut rounded = (scale + 0xffffu32) >> 16u32;
    if largest >= 0x7f80_0000u32 {
        rounded = u32::new(0x7fc0);
    }
    rounded
}

#[cube]
fn byte(x: f32, scale: f32, random: u32, #[comptime] root: bool) -> u32 {
    let mut found = u32::new(0);
    // Neither 0 nor NaN.
    if scale > 0.0 {
        let quotient = u32::reinterpret(x / scale);
        let sign = (quotient >> 24u32) & 0x80u32;
        let bits = quotient & 0x7fff_ffffu32;
        let random = random >> 12u32;
        let steps = f32::reinterpret(bits) * 512.0;
        // Numbers of the format that are smaller than the normal ones.
        let mut magnitude = u32::cast_from(steps + f32::cast_from(random) * comptime!(UNIT));
        if comptime!(root) {
            magnitude = select(steps > 0.0 && steps < 1.0, u32::new(1), magnitude);
        }
        if bits >= comptime!(SMALLEST_NORMAL) {
            magnitude = ((bits + random) >> 20u32) - comptime!(BIAS);
        }
        if bits >= comptime!(NEARLY_LARGEST) {
            magnitude = u32::new(0x7e);
        }
        found = sign | magnitude;
    }
    found
}

/// The smallest random number above 0, with 20 bits.
const UNIT: f32 = 1.0 / 1_048_576.0;
/// The bits of 1/64.
const SMALLEST_NORMAL: u32 = (1.0f32 / 64.0).to_bits();
/// The bits of 444.
const NEARLY_LARGEST: u32 = 444.0f32.to_bits();

#[cube]
fn value_of(byte: u32, scale: f32, #[comptime] root: bool) -> f32 {
    let magnitude = byte & 0x7fu32;
    let mut number = f32::cast_from(magnitude) / 512.0;
    if magnitude >= 8u32 {
        number = f32::reinterpret((magnitude + comptime!(BIAS)) << 20u32);
    }
    let mut x = number * scale;
    if comptime!(root) {
        x *= x;
    } else {
        x = f32::reinterpret(u32::reinterpret(x) ^ ((byte & 0x80u32) << 24u32));
    }
    x
}

/// A permutation of the 32-bit numbers without apparent order: the finalizer of MurmurHash3.
#[cube]
fn mixed(x: u32) -> u32 {
    let a = (x ^ (x >> 16u32)) * 0x85eb_ca6bu32;
    let b = (a ^ (a >> 13u32)) * 0xc2b2_ae35u32;
    b ^ (b >> 16u32)
}
