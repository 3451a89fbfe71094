use std::{fs, path::Path};

use serde::Deserialize;

use crate::error::{CheckpointError, IoContext};

/// Reads a file of JSON.
pub(super) fn read_json<T: for<'a> Deserialize<'a>>(path: &Path) -> Result<T, CheckpointError> {
    let text = fs::read(path).during("read", path)?;
    serde_json::from_slice(&text).map_err(|e| CheckpointError::damaged(path, e.to_string()))
}
