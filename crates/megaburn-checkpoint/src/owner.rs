//! Says in a folder in the making who writes it, so that a later process can tell what a dead one
//! left behind from work in progress and from what somebody else put there.

use std::{
    fs::{self, File, TryLockError},
    io::{self, Read, Write},
    path::Path,
    process,
    time::{Duration, SystemTime},
};

use megaburn_collective::host_name;

/// The file that says it. It stands in the folder until the folder has its final name.
pub(crate) const OWNER: &str = ".megaburn-owner";
const FIRST_LINE: &str = "megaburn writes this folder";
/// A marked file is no longer than this.
const LONGEST: u64 = 4096;
/// A folder is empty for a moment before it is marked.
const MOMENT: Duration = Duration::from_secs(60);

/// Marks a folder as this process' own. While the file is held it is locked, and the lock ends with
/// the process, however that ends. A file system without locks does without.
#[derive(Debug)]
pub(crate) struct Owner {
    _file: File,
}

impl Owner {
    pub(crate) fn mark(folder: &Path) -> io::Result<Self> {
        let mut file = File::create_new(folder.join(OWNER))?;
        let _ = file.try_lock();
        write!(file, "{FIRST_LINE}\n{}\n{}\n", host_name(), process::id())?;
        Ok(Self { _file: file })
    }
}

/// Takes the mark away.
pub(crate) fn unmark(folder: &Path) -> io::Result<()> {
    fs::remove_file(folder.join(OWNER))
}

/// Whether the folder carries the mark of a process of this host that has ended.
///
/// A process of another host may be alive, and its lock need not be seen here.
pub(crate) fn is_left_behind(folder: &Path) -> bool {
    let path = folder.join(OWNER);
    let is_file = fs::symlink_metadata(&path).is_ok_and(|found| found.is_file());
    let Ok(file) = File::open(path) else { return false };
    let mut text = String::new();
    if !is_file || (&file).take(LONGEST).read_to_string(&mut text).is_err() {
        return false;
    }
    let lines: Vec<_> = text.lines().collect();
    let [FIRST_LINE, of_host, pid] = lines[..] else { return false };
    if of_host != host_name() {
        return false;
    }
    match file.try_lock() {
        Ok(()) => true,
        Err(TryLockError::WouldBlock) => false,
        Err(TryLockError::Error(_)) => pid.parse().is_ok_and(has_ended),
    }
}

/// Whether the folder, whose name ends with the number of a process and a time, was made by a
/// process of this host that ended before it marked the folder: nothing is in it.
pub(crate) fn is_left_empty(folder: &Path, suffix: &str) -> bool {
    let is_empty = fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_none());
    let made = fs::symlink_metadata(folder).and_then(|found| found.modified());
    let age = made.ok().and_then(|made| SystemTime::now().duration_since(made).ok());
    is_empty && age.is_some_and(|age| age > MOMENT) && pid_of(suffix).is_some_and(has_ended)
}

/// The process that a suffix names, if it is one that this crate gives: two hexadecimal numbers.
pub(crate) fn pid_of(suffix: &str) -> Option<u32> {
    let (pid, time) = suffix.split_once('-')?;
    let is_hex = |text: &str| {
        !text.is_empty() && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
    };
    (is_hex(pid) && is_hex(time)).then(|| u32::from_str_radix(pid, 16).ok()).flatten()
}

/// Whether there is no process of this number on this host.
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
        assert!(!is_left_behind(here), "no mark");
        let owner = Owner::mark(here).unwrap();
        assert!(!is_left_behind(here), "it is held");
        Owner::mark(here).unwrap_err();
        drop(owner);
        assert!(is_left_behind(here));
        let text = fs::read_to_string(here.join(OWNER)).unwrap();
        for other in
            [text.replace(&host_name(), "elsewhere"), "somebody's notes".into(), String::new()]
        {
            fs::write(here.join(OWNER), other).unwrap();
            assert!(!is_left_behind(here));
        }
        unmark(here).unwrap();
        fs::create_dir(here.join(OWNER)).unwrap();
        assert!(!is_left_behind(here), "a folder is no mark");
    }

    #[test]
    fn a_suffix_names_a_process() {
        assert_eq!(pid_of("1f-18a"), Some(31));
        for other in ["", "1f", "1f-", "-1f", "1F-2", "1f-2-3", "99999999999-1", "old-1"] {
            assert_eq!(pid_of(other), None, "{other}");
        }
        assert!(!has_ended(process::id()) && has_ended(u32::MAX));
    }
}
