//! The files of a profile in the folder of a run.

use std::{
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
};

use megaburn_checkpoint::write_atomic;

use super::{
    chrome::{is_chrome_trace, write_chrome},
    summary::{Summary, is_summary},
    table::{TITLE, table},
    trace::Trace,
};
use crate::error::ReportError;

/// The folder of profiles in the folder of a run.
pub const PROFILES: &str = "profile";
/// The ends of the names of the trace, of the table as text and of the table as JSON.
const ENDS: [&str; 3] = [".trace.json", ".txt", ".json"];
/// The number of names that are tried.
const NAMES: u32 = 1000;

/// Writes a profile into `folder`, which is made if it is absent: the trace, the table as text and
/// the table as JSON. Returns their paths. Files of an earlier profile of the same steps are
/// replaced; if there are files of others by these names, the profile gets a name with a number.
///
/// # Errors
/// A file cannot be written.
pub fn write_profile(
    folder: &Path,
    trace: &Trace,
    summary: &Summary,
) -> Result<[PathBuf; 3], ReportError> {
    let fail = |path: &Path, source| ReportError::Write {
        path: path.to_path_buf(),
        source,
    };
    fs::create_dir_all(folder).map_err(|source| fail(folder, source))?;
    let [first, last] = trace.steps;
    let paths = |number: u32| {
        let number = match number {
            1 => String::new(),
            number => format!("-{number}"),
        };
        ENDS.map(|end| folder.join(format!("steps-{first}-{last}{number}{end}")))
    };
    let is_free = |path: &PathBuf| fs::symlink_metadata(path).is_err() || is_profile_file(path);
    let found = (1..NAMES)
        .map(paths)
        .find(|paths| paths.iter().all(is_free));
    let found = found.ok_or_else(|| fail(folder, io::ErrorKind::AlreadyExists.into()))?;
    let json = summary
        .to_json()
        .map_err(|error| fail(&found[2], error.into()))?;
    let texts = [write_chrome(trace), table(summary), json];
    for (path, text) in found.iter().zip(texts) {
        write_atomic(path, text.as_bytes()).map_err(|source| fail(path, source))?;
    }
    Ok(found)
}

/// Whether [`write_profile`] wrote the file at `path`, by its name and by its first bytes. Not if
/// it is a link.
pub fn is_profile_file(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let Some(end) = end_of(&name) else {
        return false;
    };
    if !fs::symlink_metadata(path).is_ok_and(|found| found.is_file()) {
        return false;
    }
    let Some(text) = first_bytes(path) else {
        return false;
    };
    match end {
        0 => is_chrome_trace(&text),
        1 => text.starts_with(TITLE),
        _ => is_summary(&text),
    }
}

/// Whether [`write_profile`] writes files of this name.
pub fn is_profile_name(name: &str) -> bool {
    end_of(name).is_some()
}

/// Which of [`ENDS`] the name of a profile's file has.
fn end_of(name: &str) -> Option<usize> {
    ENDS.iter().position(|end| {
        let steps = name.strip_suffix(end);
        let steps = steps.and_then(|name| name.strip_prefix("steps-"));
        steps.is_some_and(|steps| {
            steps
                .bytes()
                .all(|byte| byte.is_ascii_digit() || byte == b'-')
        })
    })
}

fn first_bytes(path: &Path) -> Option<String> {
    let mut bytes = Vec::new();
    File::open(path)
        .ok()?
        .take(256)
        .read_to_end(&mut bytes)
        .ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_others_are_kept_and_earlier_ones_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join(PROFILES);
        let trace = Trace {
            steps: [3, 5],
            ..Trace::default()
        };
        let summary = Summary::of(&trace);
        let write = || write_profile(&folder, &trace, &summary).unwrap();
        let first = write();
        let names = ["steps-3-5.trace.json", "steps-3-5.txt", "steps-3-5.json"];
        assert_eq!(first, names.map(|name| folder.join(name)));
        assert!(first.iter().all(|path| is_profile_file(path)));
        assert_eq!(write(), first, "the same steps again");
        fs::write(&first[1], "my notes").unwrap();
        assert!(!is_profile_file(&first[1]));
        let second = write();
        assert_eq!(second[0], folder.join("steps-3-5-2.trace.json"));
        assert_eq!(fs::read_to_string(&first[1]).unwrap(), "my notes");
        // Links and other names are not ours.
        let link = folder.join("steps-1-1.txt");
        std::os::unix::fs::symlink(&second[1], &link).unwrap();
        let other = folder.join("notes.txt");
        fs::copy(&second[1], &other).unwrap();
        assert!(!is_profile_file(&link) && !is_profile_file(&other));
    }
}
