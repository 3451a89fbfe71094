//! The resolved configuration in a run's folder.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use megaburn_checkpoint::{is_there, write_atomic};
use xxhash_rust::xxh3::xxh3_64;

use super::names::{CONFIG, RESOLVED_CONFIG, numbered};

/// The start of the first line of a file that a run wrote. The line ends with the hash of the rest,
/// so a file that was edited counts as the user's.
const FIRST_LINE: &str = "# The resolved configuration of a megaburn run, written by it. xxh3 ";

/// The possible names of the file, in order of preference.
fn names() -> impl Iterator<Item = String> {
    [CONFIG, RESOLVED_CONFIG]
        .map(String::from)
        .into_iter()
        .chain((2..).map(numbered))
}

/// The names that exist in `dir`.
fn taken(dir: &Path) -> impl Iterator<Item = String> {
    names().take_while(move |name| *name == CONFIG || is_there(&dir.join(name)))
}

/// Writes the resolved configuration into `dir` and returns its name: the first one that is free or
/// holds a file that a run wrote. Other files that runs wrote are removed.
///
/// # Errors
/// The file cannot be written; the previous one is untouched.
pub(crate) fn write(dir: &Path, text: &str) -> io::Result<String> {
    let is_free = |name: &String| !is_there(&dir.join(name)) || is_ours(&dir.join(name));
    let name = names().find(is_free).expect("one of the numbers is free");
    write_atomic(&dir.join(&name), signed(text).as_bytes())?;
    for older in taken(dir).filter(|older| *older != name) {
        if is_ours(&dir.join(&older)) {
            fs::remove_file(dir.join(older))?;
        }
    }
    Ok(name)
}

/// The path of the resolved configuration of the run in `dir`: the file that a run wrote; else the
/// last one that a run wrote and a user edited; else `config.toml`.
pub(crate) fn config_of(dir: &Path) -> PathBuf {
    let paths: Vec<_> = taken(dir).map(|name| dir.join(name)).collect();
    let was_ours =
        |path: &&PathBuf| fs::read_to_string(path).is_ok_and(|text| text.starts_with(FIRST_LINE));
    let found = paths.iter().find(|path| is_ours(path));
    found
        .or_else(|| paths.iter().rev().find(was_ours))
        .unwrap_or(&paths[0])
        .clone()
}

/// Whether a run wrote the file and it was not edited since. A link counts as the user's, because
/// it may point to another run's file.
pub(super) fn is_ours(path: &Path) -> bool {
    if path.is_symlink() {
        return false;
    }
    let Ok(text) = fs::read_to_string(path) else {
        return false;
    };
    text.split_once('\n')
        .is_some_and(|(_, rest)| text == signed(rest))
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
            assert!(
                written.starts_with('#') && written.ends_with(text),
                "{written}"
            );
            toml::from_str::<toml::Table>(&written).unwrap();
        }
    }

    #[test]
    fn a_users_file_stays_and_the_resolved_one_gets_another_name() {
        let dir = tempfile::tempdir().unwrap();
        let mine = "# my comment\n[run]\nseed = 7\n";
        fs::write(dir.path().join(CONFIG), mine).unwrap();
        assert_eq!(config_of(dir.path()), dir.path().join(CONFIG));
        for _ in 0..2 {
            assert_eq!(write(dir.path(), "[run]\n").unwrap(), RESOLVED_CONFIG);
            assert_eq!(read(dir.path(), CONFIG).unwrap(), mine);
            assert_eq!(config_of(dir.path()), dir.path().join(RESOLVED_CONFIG));
        }
        fs::remove_file(dir.path().join(CONFIG)).unwrap();
        assert_eq!(write(dir.path(), "[run]\n").unwrap(), CONFIG);
        assert_eq!(read(dir.path(), RESOLVED_CONFIG), None);
    }

    #[test]
    fn every_name_that_is_somebodys_stays() {
        let dir = tempfile::tempdir().unwrap();
        let another = tempfile::tempdir().unwrap();
        write(another.path(), "[run]\nseed = 1\n").unwrap();
        let others = read(another.path(), CONFIG);
        let link = dir.path().join(CONFIG);
        std::os::unix::fs::symlink(another.path().join(CONFIG), &link).unwrap();
        fs::write(dir.path().join(RESOLVED_CONFIG), "mine").unwrap();
        assert_eq!(
            write(dir.path(), "[run]\nseed = 2\n").unwrap(),
            "config.resolved-2.toml"
        );
        assert!(link.is_symlink());
        assert_eq!(read(another.path(), CONFIG), others, "it is another run's");
        assert_eq!(read(dir.path(), RESOLVED_CONFIG).unwrap(), "mine");
        assert_eq!(
            config_of(dir.path()),
            dir.path().join("config.resolved-2.toml")
        );
    }

    #[test]
    fn a_file_that_somebody_changed_stays() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "[run]\nseed = 1\n").unwrap();
        for (name, next) in [
            (CONFIG, RESOLVED_CONFIG),
            (RESOLVED_CONFIG, "config.resolved-2.toml"),
        ] {
            let path = dir.path().join(name);
            let changed = read(dir.path(), name)
                .unwrap()
                .replace("seed = 1", "seed = 3");
            fs::write(&path, &changed).unwrap();
            assert_eq!(
                config_of(dir.path()),
                path,
                "a change counts at the next start"
            );
            assert_eq!(write(dir.path(), "[run]\nseed = 1\n").unwrap(), next);
            assert_eq!(read(dir.path(), name).unwrap(), changed);
        }
    }
}
