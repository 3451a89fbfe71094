//! A test of many cases can be run in parts, each by a process of its own: most of its time is the
//! compilation of kernels, which one process does one after the other.

use std::{
    env,
    sync::{
        LazyLock,
        atomic::{AtomicUsize, Ordering},
    },
};

/// `2/9`: this process runs the third of nine parts, which is every ninth case.
pub(crate) const VARIABLE: &str = "MEGABURN_TEST_PART";

/// Whether the next case of the test is one of this process's part. Each case asks once, in an order that
/// is the same in every process.
pub(crate) fn is_mine() -> bool {
    static CASES: AtomicUsize = AtomicUsize::new(0);
    static PART: LazyLock<[usize; 2]> = LazyLock::new(part);
    let [part, parts] = *PART;
    CASES.fetch_add(1, Ordering::Relaxed) % parts == part
}

/// The part of this process, and how many there are.
pub(crate) fn part() -> [usize; 2] {
    let Ok(text) = env::var(VARIABLE) else {
        return [0, 1];
    };
    let numbers = text.split_once('/').and_then(|(part, parts)| {
        let [part, parts] = [part, parts].map(|number| number.parse::<usize>().ok());
        Some([part?, parts?])
    });
    let numbers = numbers.filter(|[part, parts]| part < parts);
    numbers.unwrap_or_else(|| panic!("{VARIABLE} is {text:?}, which is no part as 2/9"))
}
