use cubecl::prelude::*;

/// A cube sums 32 columns; each of its planes takes every 16th part.
#[cube(launch, address_type = "dynamic")]
pub(super) fn parts_kernel<G: Float, H: Float>(
    parts_1: &[f32],
    parts_2: &[f32],
    total_1: &mut [G],
    total_2: &mut [H],
    parts: u32,
    len: u32,
    #[comptime] two: bool,
    #[comptime] add: bool,
    #[define(G, H)] _dtypes: [ElemType; 2],
) {
    let mut shared = Shared::new_slice(1024usize);
    let column = CUBE_POS_X * 32 + UNIT_POS_X;
    let mut sum_1 = f32::new(0.0);
    let mut sum_2 = f32::new(0.0);
    if column < len {
        let mut first = UNIT_POS_Y;
        while first < parts {
            // Unrolled, so that 8 reads are in flight at once.
            #[unroll]
            for i in 0..8u32 {
                let part = first + i * 16;
                if part < parts {
                    let at = part as usize * len as usize + column as usize;
                    sum_1 += parts_1[at];
                    if comptime!(two) {
                        sum_2 += parts_2[at];
                    }
                }
            }
            first += 128;
        }
    }
    shared[UNIT_POS as usize] = sum_1;
    shared[(512 + UNIT_POS) as usize] = sum_2;
    sync_cube();
    if UNIT_POS_Y == 0 && column < len {
        sum_1 = 0.0;
        sum_2 = 0.0;
        #[unroll]
        for plane in 0..16u32 {
            sum_1 += shared[(plane * 32 + UNIT_POS_X) as usize];
            sum_2 += shared[(512 + plane * 32 + UNIT_POS_X) as usize];
        }
        let column = column as usize;
        if comptime!(add) {
            sum_1 += f32::cast_from(total_1[column]);
        }
        total_1[column] = G::cast_from(sum_1);
        if comptime!(two) {
            if comptime!(add) {
                sum_2 += f32::cast_from(total_2[column]);
            }
            total_2[column] = H::cast_from(sum_2);
        }
    }
}
