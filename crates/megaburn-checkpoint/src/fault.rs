//! Classifies errors: a checkpoint is damaged, or it only could not be read this time.

use std::{
    io::{self, ErrorKind},
    thread::sleep,
    time::Duration,
};

use megaburn_collective::host_name;
use serde::{Deserialize, Serialize};

use crate::error::CheckpointError;

/// What an error says about its checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Fault {
    /// The contents are not what was written; a retry does not help.
    Damaged,
    /// A file or the folder does not exist. If only some ranks miss it, the folder is not shared.
    Missing,
    /// The system failed: no permission, no file descriptors, an unavailable network file system.
    /// The files may be intact.
    Unreadable,
    /// Another version of megaburn wrote it.
    OtherVersion,
}

impl Fault {
    pub(crate) fn of(error: &CheckpointError) -> Self {
        match error {
            CheckpointError::Missing { .. } => Self::Missing,
            CheckpointError::UnknownVersion { .. } => Self::OtherVersion,
            CheckpointError::Io { source, .. } => match source.kind() {
                ErrorKind::NotFound | ErrorKind::NotADirectory => Self::Missing,
                ErrorKind::IsADirectory | ErrorKind::InvalidData | ErrorKind::UnexpectedEof => {
                    Self::Damaged
                }
                _ => Self::Unreadable,
            },
            error if error.is_damage() => Self::Damaged,
            _ => Self::Unreadable,
        }
    }
}

/// Pauses between retries after a system failure.
const PAUSES: [Duration; 3] = [
    Duration::from_millis(50),
    Duration::from_millis(250),
    Duration::from_secs(1),
];

/// Whether a read that failed with this error may succeed later: the system failed to answer, so
/// the state of the path is unknown.
pub fn may_pass(error: &io::Error) -> bool {
    !matches!(
        error.kind(),
        ErrorKind::NotFound
            | ErrorKind::NotADirectory
            | ErrorKind::IsADirectory
            | ErrorKind::InvalidData
            | ErrorKind::UnexpectedEof
    )
}

/// Calls `attempt` up to three more times while `is_tried_again` accepts its error, and returns the
/// last result.
///
/// # Errors
/// The error of the last attempt.
pub fn retried_where<T, E>(
    is_tried_again: impl Fn(&E) -> bool,
    mut attempt: impl FnMut() -> Result<T, E>,
) -> Result<T, E> {
    for pause in PAUSES {
        match attempt() {
            Err(error) if is_tried_again(&error) => sleep(pause),
            result => return result,
        }
    }
    attempt()
}

/// Retries `attempt` a few times while the system fails. The error of the last attempt names this
/// host.
///
/// # Errors
/// The error of the last attempt.
pub fn retried<T>(
    attempt: impl FnMut() -> Result<T, CheckpointError>,
) -> Result<T, CheckpointError> {
    let result = retried_where(|error| Fault::of(error) == Fault::Unreadable, attempt);
    result.map_err(|error| match (Fault::of(&error), error) {
        (
            Fault::Unreadable,
            CheckpointError::Io {
                action,
                path,
                source,
            },
        ) => CheckpointError::Unreadable {
            host: host_name(),
            action,
            path,
            source,
        },
        (_, error) => error,
    })
}

#[cfg(test)]
mod tests {
    use std::io;

    use rstest::rstest;

    use super::*;

    fn failing(code: i32) -> CheckpointError {
        let action = "read";
        let path = "step-00000007/manifest.json".into();
        CheckpointError::Io {
            action,
            path,
            source: io::Error::from_raw_os_error(code),
        }
    }

    // EIO, ENOMEM, EACCES, EMFILE.
    #[rstest]
    fn what_the_system_failed_at_is_tried_again_and_is_no_damage(
        #[values(5, 12, 13, 24)] code: i32,
    ) {
        let mut tries = 0;
        let found = retried(|| {
            tries += 1;
            if tries < 3 {
                Err(failing(code))
            } else {
                Ok(tries)
            }
        });
        assert_eq!(found.unwrap(), 3);
        assert_eq!(Fault::of(&failing(code)), Fault::Unreadable);
    }

    #[test]
    fn a_failure_that_stays_names_the_host_and_the_file() {
        let error = retried(|| Err::<(), _>(failing(13)))
            .unwrap_err()
            .to_string();
        let start = format!(
            "host {} cannot read step-00000007/manifest.json: ",
            host_name()
        );
        assert!(
            error.starts_with(&start) && error.contains("this is not damage"),
            "{error}"
        );
    }

    #[test]
    fn damage_is_not_tried_again() {
        for (code, fault) in [(2, Fault::Missing), (21, Fault::Damaged)] {
            let mut tries = 0;
            let found = retried(|| {
                tries += 1;
                Err::<(), _>(failing(code))
            });
            assert_eq!((tries, Fault::of(&found.unwrap_err())), (1, fault));
        }
    }
}
