//! The libraries that fail file operations and set clocks, built once with the C compiler.

use std::{path::Path, process::Command, sync::OnceLock};

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
            .env("LD_PRELOAD", built().join(FILES))
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

const FILES: &str = "file_faults.so";
const CLOCKS: &str = "clock_faults.so";

/// Lets a case fill the disk of a command's run, and set the clocks of its host, while files exist.
pub(crate) fn add_full_disk_and_clock(
    command: &mut Command,
    case: &Case,
    full: &Path,
    clock: &Path,
) {
    let [files, clocks] = [FILES, CLOCKS].map(|name| built().join(name).display().to_string());
    command
        .env("LD_PRELOAD", format!("{files}:{clocks}"))
        .env("FILE_FAULT_FOLDER", case.run())
        .env("FILE_FAULT_WHILE", full)
        .env("CLOCK_FAULT_FILE", clock);
}

/// The folder of the libraries.
fn built() -> &'static Path {
    static BUILT: OnceLock<TempDir> = OnceLock::new();
    let build = || {
        let dir = tempfile::tempdir().unwrap();
        for library in [FILES, CLOCKS] {
            let source = Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("faults")
                .join(library)
                .with_extension("c");
            let status = Command::new("cc")
                .args(["-O1", "-shared", "-fPIC", "-o"])
                .arg(dir.path().join(library))
                .arg(&source)
                .args(["-ldl", "-lpthread"])
                .status()
                .expect("faults need a C compiler named `cc`");
            assert!(status.success(), "{} does not compile", source.display());
        }
        dir
    };
    BUILT.get_or_init(build).path()
}
