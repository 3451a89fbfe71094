//! The rotation kernel. Each unit rotates the element pairs of two vectors; in a partially rotated
//! head, other units copy the rest.

use cubecl::prelude::*;

/// The compile-time parameters of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Steps {
    pub(super) interleaved: bool,
    pub(super) back: bool,
    /// Whether a head has a part that is only copied.
    pub(super) partial: bool,
    /// Whether each sequence has its own rows of the table.
    pub(super) each: bool,
}

/// Rotates heads. `width` vectors are half of a head's rotated part, and `rest` vectors are copied;
/// strides are in vectors.
#[cube(launch, address_type = "dynamic")]
pub(super) fn rotate_kernel<F: Float, T: Float, N: Size>(
    x: &[Vector<F, N>],
    cos: &[Vector<T, N>],
    sin: &[Vector<T, N>],
    y: &mut [Vector<F, N>],
    items: usize,
    batch: u32,
    heads: u32,
    width: u32,
    rest: u32,
    by_s: u32,
    by_b: u32,
    by_h: u32,
    #[comptime] steps: Steps,
    #[define(F, T)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS < items {
        let width = width as usize;
        let mut of_head = width;
        if comptime!(steps.partial) {
            of_head += rest as usize;
        }
        let column = ABSOLUTE_POS % of_head;
        let head = ABSOLUTE_POS / of_head;
        let row = head / heads as usize;
        let position = row / batch as usize;
        let from = position * by_s as usize
            + row % batch as usize * by_b as usize
            + head % heads as usize * by_h as usize;
        let to = head * (of_head + width);
        if column < width {
            let mut place = position;
            if comptime!(steps.each) {
                place = row;
            }
            let cos = Vector::<f32, N>::cast_from(cos[place * width + column]);
            let mut sin = Vector::<f32, N>::cast_from(sin[place * width + column]);
            if comptime!(steps.back) {
                sin = -sin;
            }
            if comptime!(steps.interleaved) {
                let at = from + 2 * column;
                let to = to + 2 * column;
                let (first, second) = unzipped(
                    Vector::<f32, N>::cast_from(x[at]),
                    Vector::<f32, N>::cast_from(x[at + 1]),
                );
                let (left, right) = zipped(first * cos - second * sin, second * cos + first * sin);
                y[to] = Vector::cast_from(left);
                y[to + 1] = Vector::cast_from(right);
            } else {
                let at = from + column;
                let to = to + column;
                let first = Vector::<f32, N>::cast_from(x[at]);
                let second = Vector::<f32, N>::cast_from(x[at + width]);
                y[to] = Vector::cast_from(first * cos - second * sin);
                y[to + width] = Vector::cast_from(second * cos + first * sin);
            }
        } else {
            // `column` starts at `width` here, so skip the `width` vectors of the second half.
            y[to + width + column] = x[from + width + column];
        }
    }
}

/// Splits two neighboring vectors into the elements at even and at odd positions.
#[cube]
fn unzipped<N: Size>(
    left: Vector<f32, N>,
    right: Vector<f32, N>,
) -> (Vector<f32, N>, Vector<f32, N>) {
    let lanes = N::value();
    let mut even = Vector::<f32, N>::new(0.0);
    let mut odd = Vector::<f32, N>::new(0.0);
    #[unroll]
    for lane in 0..lanes {
        if comptime!(2 * lane < lanes) {
            even.insert(lane, left.extract(comptime!(2 * lane)));
        } else {
            even.insert(lane, right.extract(comptime!(2 * lane - lanes)));
        }
        if comptime!(2 * lane + 1 < lanes) {
            odd.insert(lane, left.extract(comptime!(2 * lane + 1)));
        } else {
            odd.insert(lane, right.extract(comptime!(2 * lane + 1 - lanes)));
        }
    }
    (even, odd)
}

/// The inverse of [`unzipped`].
#[cube]
fn zipped<N: Size>(even: Vector<f32, N>, odd: Vector<f32, N>) -> (Vector<f32, N>, Vector<f32, N>) {
    let lanes = N::value();
    let mut left = Vector::<f32, N>::new(0.0);
    let mut right = Vector::<f32, N>::new(0.0);
    #[unroll]
    for lane in 0..lanes {
        if comptime!(2 * lane < lanes) {
            left.insert(comptime!(2 * lane), even.extract(lane));
        } else {
            right.insert(comptime!(2 * lane - lanes), even.extract(lane));
        }
        if comptime!(2 * lane + 1 < lanes) {
            left.insert(comptime!(2 * lane + 1), odd.extract(lane));
        } else {
            right.insert(comptime!(2 * lane + 1 - lanes), odd.extract(lane));
        }
    }
    (left, right)
}
