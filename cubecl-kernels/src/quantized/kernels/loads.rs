//! How the kernels load floats: as words of 32 bits where the rows allow, because a vector of 16-bit
//! numbers is taken apart as soon as it arrives, before the next ones are asked for.

use cubecl::prelude::*;

/// What a kernel loads at once; a compile-time constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::quantized) struct Loads {
    /// The numbers in a loaded element, which is a word or, of one 16-bit number, that number.
    pub(in crate::quantized) per_element: usize,
    /// The bits of a number.
    pub(in crate::quantized) bits: usize,
}

/// The numbers of a loaded element, in f32.
#[cube]
pub(super) fn numbers<E: Numeric, F: Float>(element: E, #[comptime] loads: Loads) -> Array<f32> {
    let mut numbers = Array::<f32>::new(loads.per_element);
    if comptime!(loads.per_element == 2) {
        let pair = Vector::<F, Const<2>>::reinterpret(element);
        numbers[0usize] = f32::cast_from(pair.extract(0usize));
        numbers[1usize] = f32::cast_from(pair.extract(1usize));
    } else {
        numbers[0usize] = f32::cast_from(F::reinterpret(element));
    }
    numbers
}
