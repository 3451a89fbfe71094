use cubecl::prelude::*;

/// Converts four numbers to FP8 and packs them, the first in the lowest byte. Each is rounded to
/// the nearest, ties to even; what exceeds the largest number of the format becomes that.
///
/// CubeCL's own cast converts one number at a time, and this instruction two.
///
/// Source: NVIDIA, PTX ISA 9.0, `cvt` with `.e4m3x2` and `.e5m2x2`; needs `sm_89`.
#[cube]
pub(super) fn pack(a: f32, b: f32, c: f32, d: f32, #[comptime] e5m2: bool) -> u32 {
    let word: u32;
    if comptime!(e5m2) {
        gpu_asm!(
            "{{ .reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, {b}, {a}; \
             cvt.rn.satfinite.e5m2x2.f32 high, {d}, {c}; mov.b32 {word}, {{low, high}}; }}",
            word = out(_) word,
            a = in(_) a,
            b = in(_) b,
            c = in(_) c,
            d = in(_) d,
            options(pure, nomem),
        );
    } else {
        gpu_asm!(
            "{{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {b}, {a}; \
             cvt.rn.satfinite.e4m3x2.f32 high, {d}, {c}; mov.b32 {word}, {{low, high}}; }}",
            word = out(_) word,
            a = in(_) a,
            b = in(_) b,
            c = in(_) c,
            d = in(_) d,
            options(pure, nomem),
        );
    }
    word
}

/// The largest scale, `2^126`: its inverse is still a normal number.
const MAX_SCALE: f32 = 8.507_059e37;

const _: () = assert!(MAX_SCALE.to_bits() == (126 + 127) << 23);

/// The factor that maps magnitudes up to `amax` to those up to `largest`; 1 if `amax` is 0. With
/// `power_of_two` it is rounded down to a power of two.
#[cube]
pub(super) fn scale_of(amax: f32, largest: f32, #[comptime] power_of_two: bool) -> f32 {
    let mut scale = largest / amax;
    if amax == 0.0 {
        scale = f32::new(1.0);
    }
    if scale > MAX_SCALE {
        scale = f32::new(MAX_SCALE);
    }
    if comptime!(power_of_two) {
        scale = f32::reinterpret(u32::reinterpret(scale) & 0xff80_0000u32);
    }
    scale
}

/// The inverse of the scale; NaN if `amax` is not finite, so that every product is NaN.
#[cube]
pub(super) fn inverse_of(amax: f32, scale: f32) -> f32 {
    let mut inverse = 1.0 / scale;
    if u32::reinterpret(amax) >= 0x7f80_0000u32 {
        inverse = f32::reinterpret(u32::new(0x7fc0_0000));
    }
    inverse
}
