//! The time, as the files of a run record it.

use std::time::SystemTime;

use chrono::{DateTime, SecondsFormat, Utc};

/// The current time in UTC, as RFC 3339: `2026-11-25T09:53:01Z`.
pub fn now() -> String {
    utc(SystemTime::now())
}

/// A time in UTC, as RFC 3339.
pub fn utc(time: SystemTime) -> String {
    DateTime::<Utc>::from(time).to_rfc3339_opts(SecondsFormat::Secs, true)
}

/// The current time in UTC, as a part of a file name: `2026-11-25T09-53-01.123456Z`.
pub(crate) fn name_of_now() -> String {
    Utc::now().format("%Y-%m-%dT%H-%M-%S%.6fZ").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_in_utc_and_names_are_those_of_files() {
        let time = now();
        let name = name_of_now();
        assert!(
            time.len() == 20 && time.ends_with('Z') && time.starts_with("20"),
            "{time}"
        );
        assert!(name.len() == 27 && !name.contains(':'), "{name}");
    }
}
