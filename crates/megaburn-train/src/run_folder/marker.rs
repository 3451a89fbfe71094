//! `run.json`, which marks a folder as a run's.

use std::{fs, io, path::Path};

use megaburn_checkpoint::{may_pass, retried_where, write_atomic};
use megaburn_collective::host_name;
use megaburn_launch::Launched;
use serde::{Deserialize, Serialize};

use super::{RunFolderError, names::MARKER};
use crate::time::now;

/// The version of the marker format that this program writes and reads.
const FORMAT: u64 = 1;

/// The contents of `run.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Marker {
    /// Version of the format.
    format: u64,
    /// 128 random bits in hexadecimal. A run keeps its id over restarts; `--fresh` creates a new
    /// one.
    pub(crate) run_id: String,
    /// When the run was created.
    created: String,
    /// Folders next to the marker that hold earlier runs. They are removed after this run has
    /// committed its first checkpoint.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) set_aside: Vec<String>,
    /// The start of the ranks that created the run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    start: Option<Start>,
}

/// A start of ranks by `megaburn launch`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Start {
    launch: String,
    attempt: usize,
}

impl Marker {
    /// The marker of a new run.
    ///
    /// # Errors
    /// The operating system provides no random numbers.
    pub(super) fn new() -> io::Result<Self> {
        let mut id = [0; 16];
        getrandom::fill(&mut id).map_err(io::Error::other)?;
        let run_id = format!("{:032x}", u128::from_be_bytes(id));
        Ok(Self {
            format: FORMAT,
            run_id,
            created: now(),
            set_aside: Vec::new(),
            start: Launched::from_env().map(
                |Launched {
                     launch, attempt, ..
                 }| Start {
                    launch: launch.id,
                    attempt,
                },
            ),
        })
    }

    /// Whether an earlier attempt of the same launch created the run.
    pub(crate) fn is_of_earlier_attempt(&self, launched: &Launched) -> bool {
        self.start.as_ref().is_some_and(|start| {
            start.launch == launched.launch.id && start.attempt < launched.attempt
        })
    }

    /// Sets the run that the folder belongs to.
    pub(super) fn with_run_id(self, run_id: &str) -> Self {
        let run_id = run_id.to_owned();
        Self { run_id, ..self }
    }

    /// Sets the folders that are set aside.
    pub(super) fn with_set_aside(self, set_aside: Vec<String>) -> Self {
        Self { set_aside, ..self }
    }

    /// Reads the marker of a folder, if it has one.
    ///
    /// # Errors
    /// The file is not a marker, has a later format, or cannot be read now.
    pub(crate) fn read(dir: &Path) -> Result<Option<Self>, RunFolderError> {
        let path = dir.join(MARKER);
        let text = match retried_where(may_pass, || fs::read(&path)) {
            Ok(text) => text,
            Err(error) if is_absent(&error) => return Ok(None),
            Err(error) if may_pass(&error) => {
                let host = host_name();
                let why = error.to_string();
                return Err(RunFolderError::Unreadable { host, path, why });
            }
            Err(error) => {
                return Err(RunFolderError::Marker {
                    path,
                    why: error.to_string(),
                });
            }
        };
        match serde_json::from_slice::<Self>(&text) {
            Ok(marker) if marker.format == FORMAT => Ok(Some(marker)),
            Ok(Self { format, .. }) => {
                let why = format!("its format is {format}, but this version reads format {FORMAT}");
                Err(RunFolderError::Marker { path, why })
            }
            Err(error) => Err(RunFolderError::Marker {
                path,
                why: error.to_string(),
            }),
        }
    }

    pub(super) fn write(&self, dir: &Path) -> io::Result<()> {
        let mut text = serde_json::to_vec(self).expect("a marker is serializable");
        text.push(b'\n');
        write_atomic(&dir.join(MARKER), &text)
    }
}

/// Whether an error says that nothing exists at a path.
pub(super) fn is_absent(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit::Exit;

    #[test]
    fn a_marker_is_written_and_read_and_each_run_has_another_id() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Marker::read(dir.path()).unwrap(), None);
        let [one, two] = [(); 2].map(|()| Marker::new().unwrap());
        assert_ne!(one.run_id, two.run_id);
        assert_eq!(one.run_id.len(), 32);
        one.write(dir.path()).unwrap();
        assert_eq!(Marker::read(dir.path()).unwrap(), Some(one));
    }

    /// Reading `/proc/self/mem` at offset 0 always fails with EIO.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_marker_that_cannot_be_read_now_is_no_bad_input() {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/proc/self/mem", dir.path().join(MARKER)).unwrap();
        let error = Marker::read(dir.path()).unwrap_err();
        assert_eq!(error.exit(), Exit::Failed);
        assert!(error.to_string().contains("restore access"), "{error}");
    }

    #[test]
    fn what_is_no_marker_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        for (text, why) in [
            ("my own notes", "expected value"),
            (
                "{\"format\":2,\"run_id\":\"1\",\"created\":\"\"}",
                "its format is 2",
            ),
        ] {
            fs::write(dir.path().join(MARKER), text).unwrap();
            let error = Marker::read(dir.path()).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
