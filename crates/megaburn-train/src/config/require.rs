//! Checks that several sections share.

use std::fmt::Display;

use crate::error::TrainError;

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

/// Refuses a number that a TOML integer cannot hold, because the resolved configuration could not
/// be written.
pub(super) fn fits_toml(key: &'static str, value: u64) -> Result<i64, TrainError> {
    let rule = format!("at most {}", i64::MAX);
    require(i64::try_from(value).is_ok(), key, value, rule)?;
    Ok(value as i64)
}
