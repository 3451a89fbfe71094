//! Splits tests of many cases over several processes. Most of a test's time is the compilation of
//! kernels, which one process does sequentially.

use std::{
    env,
    sync::{
        LazyLock,
        atomic::{AtomicUsize, Ordering},
    },
};

/// Set to `2/9`, this process runs the third of nine parts, i.e. every ninth case.
pub const VARIABLE: &str = "MEGABURN_TEST_PART";

/// Whether the next case of the test is in this process's part. Every case must call this exactly
/// once, and in the same order in every process.
///
/// # Panics
/// If [`VARIABLE`] is not such a text.
pub fn is_mine() -> bool {
    static CASES: AtomicUsize = AtomicUsize::new(0);
    static PART: LazyLock<[usize; 2]> = LazyLock::new(part);
    let [part, parts] = *PART;
    CASES.fetch_add(1, Ordering::Relaxed) % parts == part
}

/// The part of this process, and the number of parts.
///
/// # Panics
/// If the variable is not such a text.
pub fn part() -> [usize; 2] {
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
