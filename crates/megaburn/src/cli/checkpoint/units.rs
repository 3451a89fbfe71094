//! Sizes, times and shapes as text.

use std::time::{Duration, SystemTime};

use megaburn_report::console::{human_duration, human_number};

/// A number of bytes: `1.53MB`.
pub(in crate::cli) fn size(bytes: u64) -> String {
    format!("{}B", human_number(bytes as f64))
}

/// How long ago a time was; a time in the future was just now.
pub(super) fn age(time: SystemTime) -> Duration {
    SystemTime::now().duration_since(time).unwrap_or_default()
}

/// How long ago a time was, as text in full seconds.
pub(super) fn age_text(time: SystemTime) -> String {
    let age = age(time);
    if age < Duration::from_secs(60) {
        return format!("{} s", age.as_secs());
    }
    human_duration(age)
}

/// A number with its noun, in the plural if it is not 1.
pub(super) fn counted(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// The first characters of a text, and a mark if it is longer.
pub(super) fn shortened(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        None => text.to_string(),
        Some((at, _)) => format!("{}..", &text[..at]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_short() {
        assert_eq!((size(0), size(1_530_000)), ("0B".into(), "1.53MB".into()));
        let now = SystemTime::now();
        assert_eq!(age_text(now + Duration::from_secs(90)), "0 s");
        assert_eq!(age_text(now - Duration::from_secs(7200)), "2 h 00 m");
        assert_eq!(
            (counted(1, "file"), counted(0, "file")),
            ("1 file".into(), "0 files".into())
        );
        assert_eq!(
            (shortened("äöü", 3), shortened("äöü", 2)),
            ("äöü".into(), "äö..".into())
        );
    }
}
