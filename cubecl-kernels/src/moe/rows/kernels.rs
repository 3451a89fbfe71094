//! The kernels; each unit computes a vector of at most 16 bytes of a result row.

use cubecl::prelude::*;

/// Terms that a unit loads at once.
const AHEAD: usize = 4;

#[cube(launch, address_type = "dynamic")]
pub(super) fn take_kernel<F: Float, I: Numeric, N: Size>(
    x: &[Vector<F, N>],
    index: &[I],
    out: &mut [Vector<F, N>],
    num_rows: i32,
    width: u32,
    stride: u32,
    vectors: usize,
    #[define(F, I)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS < vectors {
        let row = i32::cast_from(index[ABSOLUTE_POS / width as usize]);
        let column = ABSOLUTE_POS % width as usize;
        // NaN makes an invalid row index visible.
        let mut value = Vector::<F, N>::new(F::cast_from(f32::NAN));
        if row >= 0 && row < num_rows {
            value = x[usize::cast_from(row) * stride as usize + column];
        }
        out[ABSOLUTE_POS] = value;
    }
}

#[cube(launch, address_type = "dynamic")]
#[expect(
    clippy::too_many_arguments,
    reason = "the rows of two tensors, and how many are summed"
)]
pub(super) fn sum_kernel<F: Float, I: Numeric, N: Size>(
    y: &[Vector<F, N>],
    index: &[I],
    out: &mut [Vector<F, N>],
    num_rows: i32,
    terms: u32,
    width: u32,
    stride: u32,
    vectors: usize,
    #[define(F, I)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS < vectors {
        let start = ABSOLUTE_POS / width as usize * terms as usize;
        let column = ABSOLUTE_POS % width as usize;
        let mut sum = Vector::<f32, N>::new(0.0);
        let mut first = 0u32;
        while first < terms {
            // Issue the loads of several terms together to hide memory latency.
            let mut read = Array::<Vector<F, N>>::new(AHEAD);
            #[unroll]
            for i in 0..AHEAD {
                read[i] = Vector::new(F::cast_from(0.0f32));
                let term = first + comptime!(i as u32);
                if term < terms {
                    let row = i32::cast_from(index[start + term as usize]);
                    if row >= 0 && row < num_rows {
                        read[i] = y[usize::cast_from(row) * stride as usize + column];
                    } else if row != num_rows {
                        read[i] = Vector::new(F::cast_from(f32::NAN));
                    }
                }
            }
            #[unroll]
            for i in 0..AHEAD {
                sum += Vector::cast_from(read[i]);
            }
            first += comptime!(AHEAD as u32);
        }
        out[ABSOLUTE_POS] = Vector::cast_from(sum);
    }
}
