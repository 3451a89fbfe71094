//! Checks that several sections share.

use std::fmt::Display;

use crate::TrainError;

/// Refuses `value` of `key` unless `ok`; `rule` completes the sentence "it must be ..".
pub(crate) fn require(
    ok: bool,
    key: &'static str,
    value: impl Display,
    rule: impl Into<String>,
) -> Result<(), TrainError> {
    if ok {
        return Ok(());
    }
    Err(TrainError::Invalid {
        key,
        value: value.to_string(),
        rule: rule.into(),
    })
}

/// Refuses 0.
pub(super) fn at_least_one(key: &'static str, value: usize) -> Result<(), TrainError> {
    require(value >= 1, key, value, "at least 1")
}

/// Refuses 0, negative numbers, infinity and NaN.
pub(super) fn positive(key: &'static str, value: f64) -> Result<(), TrainError> {
    require(
        value > 0.0 && value.is_finite(),
        key,
        value,
        "more than 0 and finite",
    )
}

/// Refuses negative numbers, infinity and NaN.
pub(super) fn not_negative(key: &'static str, value: f64) -> Result<(), TrainError> {
    require(
        value >= 0.0 && value.is_finite(),
        key,
        value,
        "0 or more and finite",
    )
}

/// Refuses a number that a TOML integer cannot hold, because the resolved configuration could not
/// be written.
pub(super) fn fits_toml(key: &'static str, value: u64) -> Result<i64, TrainError> {
    let rule = format!("at most {}", i64::MAX);
    require(i64::try_from(value).is_ok(), key, value, rule)?;
    Ok(value as i64)
}
