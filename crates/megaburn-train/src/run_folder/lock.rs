//! The lock of a run's folder, by which a run also notices that the folder is no longer its own.

use std::{
    fs::{self, File, TryLockError},
    io::{self, Read, Seek, Write},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process,
    thread::sleep,
    time::{Duration, Instant},
};

use megaburn_collective::host_name;

use super::{
    RunFolderError,
    marker::{Marker, is_absent},
    names::LOCK,
};

/// Locks a run's folder, so that a second run in it is refused instead of mixing its files with
/// those of the first. The operating system releases the lock when the process ends, however it
/// ends.
#[derive(Debug)]
pub(super) struct RunLock {
    file: File,
    path: PathBuf,
    /// The text that this start wrote into the lock.
    text: String,
}

/// The start of a lock's text.
const FIRST_WORD: &str = "run ";

/// How long a start waits for a lock that another machine holds. If that machine is gone, a network
/// file system releases the lock when the machine's lease expires, which takes 90 seconds with NFS.
pub(super) const LEASE: Duration = Duration::from_secs(150);

/// How long a start waits for a lock that a process of this machine holds. A killed process keeps
/// its lock until the kernel has released its memory and its GPU, so a supervisor that restarts the
/// run immediately would otherwise be refused.
const EXITING: Duration = Duration::from_secs(2);

impl RunLock {
    /// Locks the folder, which must exist.
    ///
    /// # Errors
    /// The file cannot be created, or another process holds the lock: one of this machine for
    /// longer than [`EXITING`], one of another machine for longer than `lease`.
    pub(super) fn take(dir: &Path, lease: Duration) -> Result<Self, RunFolderError> {
        let fail = |source| RunFolderError::Unusable {
            path: dir.to_path_buf(),
            source,
        };
        let path = dir.join(LOCK);
        let open = File::options()
            .create(true)
            .read(true)
            .append(true)
            .open(&path);
        let file = open.map_err(fail)?;
        let start = Instant::now();
        let mut is_told = false;
        loop {
            match file.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) => {
                    let Holder { name, is_elsewhere } = Holder::read(&path);
                    let limit = if is_elsewhere { lease } else { EXITING };
                    if start.elapsed() >= limit {
                        let path = dir.to_path_buf();
                        return Err(RunFolderError::InUse {
                            path,
                            holder: name,
                            is_elsewhere,
                        });
                    }
                    if is_elsewhere && !is_told {
                        tracing::warn!(
                            "`{}` is locked by a run on another machine ({name}); waiting up to \
                            {} seconds for the lock in case that run is gone",
                            dir.display(),
                            lease.as_secs()
                        );
                        is_told = true;
                    }
                    let pause = if is_elsewhere { 1000 } else { 20 };
                    sleep(Duration::from_millis(pause).min(limit));
                }
                // Some network file systems have no locks. The text of the lock still reveals a
                // second start.
                Err(TryLockError::Error(error)) => {
                    tracing::warn!("cannot lock `{}`: {error}", path.display());
                    break;
                }
            }
        }
        Ok(Self {
            file,
            path,
            text: String::new(),
        })
    }

    /// Writes the run, this start and the process into the lock.
    pub(super) fn sign(&mut self, run_id: &str) -> io::Result<()> {
        // Another start of the same run gets different random bits.
        let start = Marker::new()?.run_id;
        let host = host_name();
        let pid = process::id();
        let machine = machine();
        self.text = format!(
            "{FIRST_WORD}{run_id}\nstart {start}\nhost {host} pid {pid}\nmachine {machine}\n"
        );
        self.file.set_len(0)?;
        self.file.write_all(self.text.as_bytes())
    }

    /// Whether the locked file is still the one at its path. Costs one `stat`.
    pub(super) fn is_in_place(&self) -> io::Result<Result<(), String>> {
        let held = self.file.metadata()?;
        match fs::metadata(&self.path) {
            Ok(found) if (found.dev(), found.ino()) == (held.dev(), held.ino()) => Ok(Ok(())),
            Ok(_) => Ok(Err(format!(
                "another run was started there (`{LOCK}` is a different file)"
            ))),
            Err(error) if is_absent(&error) => {
                Ok(Err(format!("it was removed (`{LOCK}` is gone)")))
            }
            Err(error) => Err(error),
        }
    }

    /// Whether the lock still holds the text of this start: on a file system without locks, a
    /// second start overwrites it.
    pub(super) fn is_signed_by_us(&self) -> io::Result<Result<(), String>> {
        let mut text = String::new();
        let mut file = &self.file;
        file.rewind()?;
        file.read_to_string(&mut text)?;
        if text == self.text {
            Ok(Ok(()))
        } else {
            Ok(Err(format!(
                "another run was started there (`{LOCK}` says: {})",
                text.trim()
            )))
        }
    }
}

/// The process that holds the lock of a folder, if one does. Nothing is changed, and the lock is
/// held for a moment at most. `None` also if the file system has no locks.
pub(super) fn holder(dir: &Path) -> Option<String> {
    let path = dir.join(LOCK);
    let file = File::open(&path).ok()?;
    match file.try_lock_shared() {
        Err(TryLockError::WouldBlock) => Some(Holder::read(&path).name),
        Ok(()) | Err(TryLockError::Error(_)) => None,
    }
}

/// Holds the lock of a folder in which no run is in progress, and does not change its text. The
/// lock ends with the file.
///
/// # Errors
/// A run holds the lock, or the file system has no locks.
pub(super) fn hold(dir: &Path) -> Result<File, RunFolderError> {
    let path = dir.join(LOCK);
    let open = File::options().create(true).append(true).open(&path);
    let fail = |source| RunFolderError::NotLocked {
        path: dir.to_path_buf(),
        source,
    };
    let file = open.map_err(fail)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::Error(source)) => Err(fail(source)),
        Err(TryLockError::WouldBlock) => Err(RunFolderError::Running {
            path: dir.to_path_buf(),
            holder: Holder::read(&path).name,
        }),
    }
}

/// The holder of a lock, according to its text.
struct Holder {
    /// Host and process.
    name: String,
    /// Whether the holder runs on another machine, so that this kernel knows its lock only from the
    /// file system.
    is_elsewhere: bool,
}

impl Holder {
    fn read(path: &Path) -> Self {
        let text = fs::read_to_string(path).unwrap_or_default();
        let line = |word: &str| text.lines().find_map(|line| line.strip_prefix(word));
        let host = line("host ");
        let is_elsewhere = match line("machine ") {
            Some(other) => other != machine(),
            // The format of older versions.
            None => host.is_some_and(|host| host.split(' ').next() != Some(&host_name())),
        };
        let name = match host {
            Some(host) => format!("host {host}"),
            None => "it has not written its name yet".to_string(),
        };
        Self { name, is_elsewhere }
    }
}

/// Identifies this machine since its last boot; containers on it have the same value.
fn machine() -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id");
    boot.map_or_else(|_| host_name(), |boot| boot.trim().to_string())
}

/// Whether the lock file was written by a run: it is empty, as in older versions, or has a run's
/// text.
pub(super) fn is_lock(dir: &Path) -> bool {
    let text = fs::read(dir.join(LOCK));
    text.is_ok_and(|text| text.is_empty() || text.starts_with(FIRST_WORD.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit::Exit;

    fn signed(dir: &Path) -> RunLock {
        let mut lock = RunLock::take(dir, LEASE).unwrap();
        lock.sign("1f").unwrap();
        lock
    }

    #[test]
    fn a_folder_is_held_by_one_run_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let first = signed(dir.path());
        let error = RunLock::take(dir.path(), LEASE).unwrap_err();
        let holder = format!(
            "in use by a run (host {} pid {})",
            host_name(),
            process::id()
        );
        assert!(error.to_string().contains(&holder), "{error}");
        assert_eq!(error.exit(), Exit::BadInput);
        assert!(first.is_in_place().unwrap().is_ok() && first.is_signed_by_us().unwrap().is_ok());
        drop(first);
        signed(dir.path());
    }

    #[test]
    fn a_process_that_is_exiting_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let exiting = signed(dir.path());
        let ends = std::thread::spawn(move || {
            sleep(Duration::from_millis(200));
            drop(exiting);
        });
        signed(dir.path());
        ends.join().unwrap();
    }

    #[test]
    fn a_lock_of_another_machine_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(LOCK);
        for text in [
            "run 1\nhost gone pid 7\nmachine other\n",
            "run 1\nhost gone pid 7\n",
        ] {
            fs::write(&path, text).unwrap();
            let held = File::options().read(true).open(&path).unwrap();
            held.try_lock().unwrap();
            let short = Duration::from_millis(30);
            let error = RunLock::take(dir.path(), short).unwrap_err();
            assert!(error.to_string().contains("(host gone pid 7)"), "{error}");
            assert_eq!(error.exit(), Exit::Failed);
            // The lease of the other machine ends.
            let ends = std::thread::spawn(move || {
                sleep(Duration::from_millis(100));
                drop(held);
            });
            RunLock::take(dir.path(), LEASE).unwrap();
            ends.join().unwrap();
        }
    }

    #[test]
    fn a_lock_that_was_removed_or_replaced_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let first = signed(dir.path());
        fs::remove_file(dir.path().join(LOCK)).unwrap();
        let why = first.is_in_place().unwrap().unwrap_err();
        assert!(why.contains("it was removed"), "{why}");
        let second = signed(dir.path());
        let why = first.is_in_place().unwrap().unwrap_err();
        assert!(why.contains("another run was started there"), "{why}");
        assert!(second.is_in_place().unwrap().is_ok());
    }

    /// Simulates a file system whose locks have no effect.
    #[test]
    fn a_second_start_that_no_lock_stopped_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let first = signed(dir.path());
        fs::write(dir.path().join(LOCK), "run 1f\nstart 2\n").unwrap();
        assert!(first.is_in_place().unwrap().is_ok());
        let why = first.is_signed_by_us().unwrap().unwrap_err();
        assert!(
            why.contains("another run was started") && why.contains("start 2"),
            "{why}"
        );
    }

    #[test]
    fn somebody_elses_file_is_no_lock() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!is_lock(dir.path()));
        for (text, is) in [("", true), ("run 1f\n", true), ("my notes", false)] {
            fs::write(dir.path().join(LOCK), text).unwrap();
            assert_eq!(is_lock(dir.path()), is, "{text}");
        }
    }
}
