//! The library that delays or fails file operations, built once with the C compiler.

use std::{path::PathBuf, process::Command, sync::OnceLock};

use tempfile::TempDir;

use crate::case::Case;

/// The fault at the n-th file operation under the run's folder.
#[derive(Clone, Copy, Debug)]
pub(crate) enum FileFault {
    /// The process is killed before or after the operation, or in the middle of a write.
    Kill(&'static str),
    /// The operation fails once with this error number.
    Fails(i32),
    /// This operation and all later ones that need space fail with ENOSPC.
    DiskFull,
    /// The process is stopped (SIGSTOP).
    Stops,
    /// The n-th `fsync`, counted from the first one of a checkpoint, takes this many milliseconds.
    SlowSync(u64),
}

impl FileFault {
    /// Adds the fault to a command. `rank` names one process of several.
    pub(crate) fn add(self, command: &mut Command, case: &Case, at: u64, rank: Option<usize>) {
        command
            .env("LD_PRELOAD", library())
            .env("FILE_FAULT_FOLDER", case.run());
        if let Some(rank) = rank {
            command.env("FILE_FAULT_RANK", rank.to_string());
        }
        let action = match self {
            Self::Kill(when) => when.to_string(),
            Self::Fails(errno) => format!("fail:{errno}"),
            Self::DiskFull => format!("full:{}", nix::errno::Errno::ENOSPC as i32),
            Self::Stops => "stop".to_string(),
            Self::SlowSync(milliseconds) => format!("slow:{milliseconds}"),
        };
        command
            .env("FILE_FAULT_ACTION", action)
            .env("FILE_FAULT_AT", at.to_string());
    }
}

fn library() -> PathBuf {
    static BUILT: OnceLock<(TempDir, PathBuf)> = OnceLock::new();
    let build = || {
        let dir = tempfile::tempdir().unwrap();
        let library = dir.path().join("file_faults.so");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/faults/file_faults.c");
        let status = Command::new("cc")
            .args(["-O1", "-shared", "-fPIC", "-o"])
            .arg(&library)
            .args([source, "-ldl", "-lpthread"])
            .status()
            .expect("file faults need a C compiler named `cc`");
        assert!(status.success(), "{source} does not compile");
        (dir, library)
    };
    BUILT.get_or_init(build).1.clone()
}
