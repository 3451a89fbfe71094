//! A pickle needs memory in proportion to its length, whatever it says.

use std::alloc::System;

use megaburn_torch::pickle::Pickle;
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// All that is allocated in one go, with what growing vectors give back, for each byte.
const MOST_BYTES: usize = 200;

#[test]
fn memory_is_in_proportion_to_the_length() {
    const LEN: usize = 1 << 20;
    let number = fastrand::u32(..).to_le_bytes();
    let large = [&b"\x8e"[..], &[0xff; 8]].concat();
    let far = [b"Nr", &number[..]].concat();
    for program in [
        b"]",
        &b")"[..],
        b"}",
        b"\x8f",
        b"(",
        b"N",
        b"K\xff",
        b"]\x94",
        b"]q\x00h\x00h\x00\x86",
        b"C\x01a",
        b"\x8c\x01a\x94h\x00h\x00\x93",
        b"(ttt",
        b"]]a",
        b"}]]s",
        b")\x85)R}b",
        b"(l(d",
        &large,
        &far,
    ] {
        let mut bytes: Vec<u8> = program.iter().copied().cycle().take(LEN).collect();
        bytes.push(b'.');
        let region = Region::new(ALLOCATOR);
        let _ = Pickle::read_first(&bytes);
        let change = region.change();
        let allocated = change.bytes_allocated + change.bytes_reallocated.unsigned_abs();
        assert!(
            allocated < MOST_BYTES * LEN,
            "{}: {} for each byte",
            program.escape_ascii(),
            allocated / LEN
        );
    }
}
