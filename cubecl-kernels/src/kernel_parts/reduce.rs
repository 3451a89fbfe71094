use cubecl::prelude::*;

/// Sums `value` over the units of a row, in a fixed order. A row has `planes` planes of the cube;
/// if that is one, it is the unit's own plane.
///
/// The planes exchange their sums through `shared`, from element `at` on. These elements must not
/// be written before another barrier.
#[cube]
pub(crate) fn row_sum(
    value: f32,
    shared: &mut Shared<[f32]>,
    at: u32,
    #[comptime] planes: u32,
) -> f32 {
    let mut sum = plane_sum(value);
    if comptime!(planes > 1) {
        if UNIT_POS_X == 0 {
            shared[(at + UNIT_POS_Y) as usize] = sum;
        }
        sync_cube();
        sum = 0.0;
        #[unroll]
        for plane in 0..planes {
            sum += shared[(at + plane) as usize];
        }
    }
    sum
}

/// [`row_sum`] of two values with one barrier; takes `2 * planes` elements of `shared`.
#[cube]
pub(crate) fn row_sums(
    first: f32,
    second: f32,
    shared: &mut Shared<[f32]>,
    at: u32,
    #[comptime] planes: u32,
) -> (f32, f32) {
    let mut first = plane_sum(first);
    let mut second = plane_sum(second);
    if comptime!(planes > 1) {
        if UNIT_POS_X == 0 {
            shared[(at + UNIT_POS_Y) as usize] = first;
            shared[(at + planes + UNIT_POS_Y) as usize] = second;
        }
        sync_cube();
        first = 0.0;
        second = 0.0;
        #[unroll]
        for plane in 0..planes {
            first += shared[(at + plane) as usize];
            second += shared[(at + planes + plane) as usize];
        }
    }
    (first, second)
}
