//! Permutation kernels: a counting sort of 256 assignments at a time; each unit handles one
//! assignment and some experts.
//!
//! To count, a unit reads all assignments of the chunk for its own experts. So no two units add to
//! the same counter, and the sort is stable and deterministic.

use cubecl::prelude::*;

/// The bucket of an assignment: its expert, `num_experts` if it has none, and `num_experts + 1`
/// from `end` on.
#[cube]
fn bucket<I: Numeric>(experts: &[I], slot: u32, end: u32, #[comptime] num_experts: u32) -> u32 {
    let mut bucket = comptime!(num_experts + 1).runtime();
    if slot < end {
        // Compare in 64 bits: the lower half of an invalid 64-bit number may look like an expert.
        let expert = i64::cast_from(experts[slot as usize]);
        bucket = num_experts.runtime();
        if expert >= 0 && expert < comptime!(num_experts as i64) {
            bucket = u32::cast_from(expert);
        }
    }
    bucket
}

/// The number of the first `end` assignments of a chunk that are in `bucket`.
#[cube]
fn found(chunk: &Shared<[u32]>, bucket: u32, end: u32) -> u32 {
    let mut sum = 0u32;
    for i in 0..end {
        if chunk[i as usize] == bucket {
            sum += 1;
        }
    }
    sum
}

/// Counts the assignments of each cube in each bucket, `[cubes, num_experts + 1]`.
#[cube(launch)]
pub(super) fn count_kernel<I: Numeric>(
    experts: &[I],
    counts: &mut [i32],
    slots: u32,
    of_cube: u32,
    #[comptime] num_experts: u32,
    #[define(I)] _dtype: ElemType,
) {
    let mut chunk = Shared::new_slice(256usize);
    let mut sums = Shared::new_slice(comptime!(num_experts as usize + 1));
    let mut mine = UNIT_POS;
    while mine <= num_experts {
        sums[mine as usize] = 0u32;
        mine += 256;
    }
    let mut start = CUBE_POS_X * of_cube;
    let end = min(start + of_cube, slots);
    while start < end {
        chunk[UNIT_POS as usize] = bucket::<I>(experts, start + UNIT_POS, end, num_experts);
        sync_cube();
        let mut mine = UNIT_POS;
        while mine <= num_experts {
            sums[mine as usize] += found(&chunk, mine, 256u32);
            mine += 256;
        }
        // No unit may overwrite the chunk before all have read it.
        sync_cube();
        start += 256;
    }
    let mut mine = UNIT_POS;
    while mine <= num_experts {
        let at = CUBE_POS_X * comptime!(num_experts + 1) + mine;
        counts[at as usize] = i32::cast_from(sums[mine as usize]);
        mine += 256;
    }
}

/// Writes each cube's assignments after those of the earlier cubes.
#[cube(launch)]
#[expect(
    clippy::too_many_arguments,
    reason = "one argument per result and per size"
)]
pub(super) fn place_kernel<I: Numeric>(
    experts: &[I],
    parts: &[i32],
    counts: &mut [i32],
    in_order: &mut [i32],
    tokens: &mut [i32],
    rows: &mut [i32],
    slots: u32,
    of_cube: u32,
    top_k: u32,
    #[comptime] num_experts: u32,
    #[define(I)] _dtype: ElemType,
) {
    let mut chunk = Shared::new_slice(256usize);
    let mut totals = Shared::new_slice(comptime!(num_experts as usize + 1));
    // The position of the next assignment in each bucket.
    let mut next = Shared::new_slice(comptime!(num_experts as usize + 1));
    let mut num_rows = Shared::new_slice(1usize);
    let mut mine = UNIT_POS;
    while mine <= num_experts {
        let mut before = 0u32;
        let mut total = 0u32;
        for cube in 0..CUBE_COUNT_X {
            let part = u32::cast_from(parts[(cube * comptime!(num_experts + 1) + mine) as usize]);
            total += part;
            if cube < CUBE_POS_X {
                before += part;
            }
        }
        totals[mine as usize] = total;
        next[mine as usize] = before;
        mine += 256;
    }
    sync_cube();
    let mut mine = UNIT_POS;
    while mine <= num_experts {
        let mut first = 0u32;
        for other in 0..mine {
            first += totals[other as usize];
        }
        next[mine as usize] += first;
        if mine == num_experts {
            num_rows[0] = first;
        } else if CUBE_POS_X == 0 {
            counts[mine as usize] = i32::cast_from(totals[mine as usize]);
        }
        mine += 256;
    }
    let mut start = CUBE_POS_X * of_cube;
    let end = min(start + of_cube, slots);
    while start < end {
        let slot = start + UNIT_POS;
        let bucket = bucket::<I>(experts, slot, end, num_experts);
        chunk[UNIT_POS as usize] = bucket;
        sync_cube();
        if slot < end {
            let at = next[bucket as usize] + found(&chunk, bucket, UNIT_POS);
            in_order[at as usize] = i32::cast_from(slot);
            tokens[at as usize] = i32::cast_from(slot / top_k);
            rows[slot as usize] = i32::cast_from(min(at, num_rows[0]));
        }
        sync_cube();
        let mut mine = UNIT_POS;
        while mine <= num_experts {
            next[mine as usize] += found(&chunk, mine, 256u32);
            mine += 256;
        }
        sync_cube();
        start += 256;
    }
}
