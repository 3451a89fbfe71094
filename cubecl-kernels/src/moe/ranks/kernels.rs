//! The kernel; each unit handles one token.

use cubecl::prelude::*;

#[cube]
fn rank<I: Numeric>(experts: &[I], slot: u32, of_rank: i64) -> i64 {
    // Compare in 64 bits: the lower half of an invalid 64-bit number may look like an expert.
    let expert = i64::cast_from(experts[slot as usize]);
    select(expert >= 0, expert / of_rank, -1)
}

#[cube(launch)]
pub(super) fn ranks_kernel<I: Numeric>(
    experts: &[I],
    ranks: &mut [i32],
    tokens: u32,
    of_rank: i64,
    #[comptime] top_k: u32,
    #[define(I)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < tokens as usize {
        let first = ABSOLUTE_POS as u32 * top_k;
        for slot in 0..top_k {
            let mine = rank::<I>(experts, first + slot, of_rank);
            let mut found = i32::cast_from(mine);
            for before in 0..slot {
                if rank::<I>(experts, first + before, of_rank) == mine {
                    found = -1;
                }
            }
            ranks[(first + slot) as usize] = found;
        }
    }
}
