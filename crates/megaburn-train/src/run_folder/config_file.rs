//! The resolved configuration in a run's folder.

use std::{fs, io, path::Path};

use megaburn_checkpoint::write_atomic;
use xxhash_rust::xxh3::xxh3_64;

use super::names::{CONFIG, RESOLVED_CONFIG};

/// How the first line of a file begins that a run has written. The line ends with the hash of the rest, so
/// that a file that somebody changed is somebody's own.
const FIRST_LINE: &str = "# The resolved configuration of a megaburn run, written by it. xxh3 ";

/// Writes the resolved configuration into `dir` and returns under which name: `config.toml`, or
/// `config.resolved.toml` where `config.toml` is not what a run has written.
///
/// # Errors
/// It cannot be written; what stood there is untouched then.
pub(super) fn write(dir: &Path, text: &str) -> io::Result<&'static str> {
    let config = dir.join(CONFIG);
    let is_free = fs::symlink_metadata(&config).is_err() || is_ours(&config);
    let name = if is_free { CONFIG } else { RESOLVED_CONFIG };
    write_atomic(&dir.join(name), signed(text).as_bytes())?;
    // One of an earlier start would be older than `config.toml`.
    if is_free && is_ours(&dir.join(RESOLVED_CONFIG)) {
        fs::remove_file(dir.join(RESOLVED_CONFIG))?;
    }
    Ok(name)
}

/// Signs an unsigned `config.toml` of a run that an older version began, which wrote no comments. One with
/// comments is somebody's own.
///
/// # Errors
/// It cannot be written.
pub(super) fn adopt(dir: &Path) -> io::Result<()> {
    let path = dir.join(CONFIG);
    match fs::read_to_string(&path) {
        Ok(text) if !text.contains('#') => write_atomic(&path, signed(&text).as_bytes()),
        _ => Ok(()),
    }
}

/// Whether a run has written the file, and nobody has changed it since.
pub(super) fn is_ours(path: &Path) -> bool {
    let Ok(text) = fs::read_to_string(path) else { return false };
    text.split_once('\n').is_some_and(|(_, rest)| text == signed(rest))
}

fn signed(text: &str) -> String {
    format!("{FIRST_LINE}{:016x}\n{text}", xxh3_64(text.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(dir: &Path, name: &str) -> Option<String> {
        fs::read_to_string(dir.join(name)).ok()
    }

    #[test]
    fn a_run_replaces_what_a_run_has_written() {
        let dir = tempfile::tempdir().unwrap();
        for text in ["[run]\nseed = 1\n", "[run]\nseed = 2\n"] {
            assert_eq!(write(dir.path(), text).unwrap(), CONFIG);
            let written = read(dir.path(), CONFIG).unwrap();
            assert!(written.starts_with('#') && written.ends_with(text), "{written}");
            toml::from_str::<toml::Table>(&written).unwrap();
        }
    }

    #[test]
    fn a_users_file_stays_and_the_resolved_one_gets_another_name() {
        let dir = tempfile::tempdir().unwrap();
        let mine = "# my comment\n[run]\nseed = 7\n";
        fs::write(dir.path().join(CONFIG), mine).unwrap();
        for _ in 0..2 {
            assert_eq!(write(dir.path(), "[run]\n").unwrap(), RESOLVED_CONFIG);
            assert_eq!(read(dir.path(), CONFIG).unwrap(), mine);
        }
        fs::remove_file(dir.path().join(CONFIG)).unwrap();
        assert_eq!(write(dir.path(), "[run]\n").unwrap(), CONFIG);
        assert_eq!(read(dir.path(), RESOLVED_CONFIG), None);
    }

    #[test]
    fn a_file_that_somebody_changed_stays() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "[run]\nseed = 1\n").unwrap();
        let path = dir.path().join(CONFIG);
        let changed = read(dir.path(), CONFIG).unwrap().replace("seed = 1", "seed = 3");
        fs::write(&path, &changed).unwrap();
        assert_eq!(write(dir.path(), "[run]\nseed = 2\n").unwrap(), RESOLVED_CONFIG);
        assert_eq!(read(dir.path(), CONFIG).unwrap(), changed);
    }

    #[test]
    fn what_an_older_version_wrote_is_taken_over() {
        let dir = tempfile::tempdir().unwrap();
        for (text, ours) in [("[run]\nseed = 1\n", true), ("# mine\n[run]\n", false)] {
            fs::write(dir.path().join(CONFIG), text).unwrap();
            adopt(dir.path()).unwrap();
            assert_eq!(is_ours(&dir.path().join(CONFIG)), ours, "{text}");
        }
    }
}
