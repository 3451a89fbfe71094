//! Whether `--fresh` still has to be done.

use std::path::Path;

use megaburn_launch::Launched;

use crate::{error::TrainError, run_folder::Marker};

/// Whether a run with `--fresh` in the folder `dir` starts anew: not if an earlier attempt of the
/// same `megaburn launch --restarts` has done so, because a restart continues what that one began.
///
/// # Errors
/// The folder's `run.json` is damaged or cannot be read now.
pub fn starts_anew(dir: &Path, fresh: bool) -> Result<bool, TrainError> {
    let launched = Launched::from_env().filter(|launched| fresh && launched.attempt > 0);
    let Some(launched) = launched else {
        return Ok(fresh);
    };
    let marker = Marker::read(dir)?;
    Ok(!marker.is_some_and(|marker| marker.is_of_earlier_attempt(&launched)))
}
