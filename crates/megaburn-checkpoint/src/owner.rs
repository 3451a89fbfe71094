//! Marks a folder in progress with its writer, so that a later process can distinguish leftovers of
//! a dead process from work in progress and from unrelated files.

use std::{
    fs::{self, File, TryLockError},
    io::{self, Read, Write},
    path::Path,
    process,
    time::{Duration, SystemTime},
};

use megaburn_collective::host_name;

/// The name of the mark file. It is in the folder until the folder gets its final name.
pub(crate) const OWNER: &str = ".megaburn-owner";
const FIRST_LINE: &str = "megaburn writes this folder";
/// The second line of a run's mark.
const OF_RUN: &str = "for a run, whose next start removes it";
/// Maximum bytes that are read of a mark file.
const LONGEST: u64 = 4096;
/// How long a folder may be empty before it must have been marked.
const MOMENT: Duration = Duration::from_secs(60);

/// Marks a folder as belonging to this process. The mark file is locked while this is held, and the
/// lock ends with the process, however it ends. On file systems without locks, the mark is not
/// locked.
#[derive(Debug)]
pub(crate) struct Owner {
    _file: File,
}

impl Owner {
    pub(crate) fn mark(folder: &Path) -> io::Result<Self> {
        let mut file = File::create_new(folder.join(OWNER))?;
        let _ = file.try_lock();
        let text = format!("{FIRST_LINE}\n{}\n{}\n", host_name(), process::id());
        file.write_all(text.as_bytes())?;
        Ok(Self { _file: file })
    }
}

/// Marks a folder that may be removed once its writer has ended.
#[derive(Debug)]
pub(crate) enum Mark {
    /// The ranks of a run write the folder. Only one run at a time works in the parent folder, so a
    /// folder that has this mark when a run starts is a leftover.
    Run,
    /// A single process writes the folder.
    Process { _owner: Owner },
}

/// Marks a folder in one of these two ways.
pub(crate) type SetMark = fn(&Path) -> io::Result<Mark>;

impl Mark {
    /// Marks the folder durably: the mark survives a power loss. An earlier mark is replaced.
    pub(crate) fn of_run(folder: &Path) -> io::Result<Self> {
        let mut file = File::create(folder.join(OWNER))?;
        file.write_all(mark_of_run().as_bytes())?;
        file.sync_all()?;
        Ok(Self::Run)
    }

    pub(crate) fn of_process(folder: &Path) -> io::Result<Self> {
        Ok(Self::Process {
            _owner: Owner::mark(folder)?,
        })
    }
}

fn mark_of_run() -> String {
    format!("{FIRST_LINE}\n{OF_RUN}\n")
}

/// Removes the mark.
pub(crate) fn unmark(folder: &Path) -> io::Result<()> {
    fs::remove_file(folder.join(OWNER))
}

/// Whether the folder has the mark of a run.
pub(crate) fn is_of_run(folder: &Path) -> bool {
    open_mark(folder).is_some_and(|(_, text)| text == mark_of_run())
}

/// Whether the folder has the mark of a process on this host that has ended.
///
/// A process on another host may be alive, and its lock may not be visible here.
pub(crate) fn is_abandoned(folder: &Path) -> bool {
    let Some((file, text)) = open_mark(folder) else {
        return false;
    };
    let lines: Vec<_> = text.lines().collect();
    let [FIRST_LINE, of_host, pid] = lines[..] else {
        return false;
    };
    if of_host != host_name() {
        return false;
    }
    match file.try_lock() {
        Ok(()) => true,
        Err(TryLockError::WouldBlock) => false,
        Err(TryLockError::Error(_)) => pid.parse().is_ok_and(has_ended),
    }
}

/// Whether the folder is empty or holds only an incomplete mark: its creator was killed
/// immediately, or is just starting to write.
pub(crate) fn is_blank(folder: &Path) -> bool {
    let is_torn = || {
        let text = open_mark(folder).map(|(_, text)| text);
        text.is_some_and(|text| {
            text.is_empty() || (text.starts_with(FIRST_LINE) && !is_whole(&text))
        })
    };
    let Ok(mut entries) = fs::read_dir(folder) else {
        return false;
    };
    entries.all(|entry| entry.is_ok_and(|entry| entry.file_name() == OWNER) && is_torn())
}

/// Whether the folder has an incomplete mark whose writer has ended: it was killed while it wrote it.
pub(crate) fn has_torn_mark(folder: &Path) -> bool {
    open_mark(folder).is_some_and(|(file, text)| {
        let is_ours = text.is_empty() || text.starts_with(FIRST_LINE);
        is_ours && !is_whole(&text) && file.try_lock().is_ok()
    })
}

fn is_whole(mark: &str) -> bool {
    mark == mark_of_run() || (mark.ends_with('\n') && mark.lines().count() == 3)
}

/// The mark file of a folder and its text, if there is one.
fn open_mark(folder: &Path) -> Option<(File, String)> {
    let path = folder.join(OWNER);
    fs::symlink_metadata(&path)
        .ok()
        .filter(|found| found.is_file())?;
    let file = File::open(path).ok()?;
    let mut text = String::new();
    (&file).take(LONGEST).read_to_string(&mut text).ok()?;
    Some((file, text))
}

/// Whether the folder, whose name ends with a process id and a time, was created by a process on
/// this host that ended before it marked the folder.
pub(crate) fn is_abandoned_blank(folder: &Path, suffix: &str) -> bool {
    let made = fs::symlink_metadata(folder).and_then(|found| found.modified());
    let age = made
        .ok()
        .and_then(|made| SystemTime::now().duration_since(made).ok());
    let is_old = age.is_some_and(|age| age > MOMENT);
    is_old && pid_of(suffix).is_some_and(has_ended) && is_blank(folder)
}

/// The process id in a suffix, if the suffix has this crate's form: two hexadecimal numbers.
pub(crate) fn pid_of(suffix: &str) -> Option<u32> {
    let (pid, time) = suffix.split_once('-')?;
    let is_hex = |text: &str| {
        !text.is_empty() && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
    };
    (is_hex(pid) && is_hex(time))
        .then(|| u32::from_str_radix(pid, 16).ok())
        .flatten()
}

/// Whether no process on this host has this id.
pub(crate) fn has_ended(pid: u32) -> bool {
    let proc = Path::new("/proc");
    proc.join("self").exists() && !proc.join(pid.to_string()).exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_counts_once_its_process_has_ended_and_on_its_host() {
        let dir = tempfile::tempdir().unwrap();
        let here = dir.path();
        assert!(!is_abandoned(here), "no mark");
        let owner = Owner::mark(here).unwrap();
        assert!(!is_abandoned(here), "it is held");
        Owner::mark(here).unwrap_err();
        drop(owner);
        assert!(is_abandoned(here));
        let text = fs::read_to_string(here.join(OWNER)).unwrap();
        for other in [
            text.replace(&host_name(), "elsewhere"),
            "somebody's notes".into(),
            String::new(),
        ] {
            fs::write(here.join(OWNER), other).unwrap();
            assert!(!is_abandoned(here));
        }
        unmark(here).unwrap();
        fs::create_dir(here.join(OWNER)).unwrap();
        assert!(!is_abandoned(here), "a folder is no mark");
    }

    #[test]
    fn a_folder_without_a_whole_mark_and_anything_else_is_blank() {
        let dir = tempfile::tempdir().unwrap();
        let here = dir.path();
        assert!(is_blank(here));
        for (text, is) in [("", true), (FIRST_LINE, true), ("notes", false)] {
            fs::write(here.join(OWNER), text).unwrap();
            assert_eq!((is_blank(here), is_of_run(here)), (is, false), "{text}");
        }
        unmark(here).unwrap();
        drop(Mark::of_process(here).unwrap());
        assert!(!is_blank(here) && !is_of_run(here));
        Mark::of_run(here).unwrap();
        assert!(is_of_run(here) && !is_blank(here) && !is_abandoned(here));
        fs::write(here.join(OWNER), "").unwrap();
        fs::write(here.join("thesis"), "years").unwrap();
        assert!(!is_blank(here));
    }

    #[test]
    fn a_suffix_names_a_process() {
        assert_eq!(pid_of("1f-18a"), Some(31));
        for other in [
            "",
            "1f",
            "1f-",
            "-1f",
            "1F-2",
            "1f-2-3",
            "99999999999-1",
            "old-1",
        ] {
            assert_eq!(pid_of(other), None, "{other}");
        }
        assert!(!has_ended(process::id()) && has_ended(u32::MAX));
    }
}
