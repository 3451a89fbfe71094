//! Removes what interrupted conversions left next to their target.

use std::{ffi::OsStr, fs, path::Path};

use crate::{
    error::{CheckpointError, IoContext},
    owner::{OWNER, has_ended, has_torn_mark, is_abandoned, is_abandoned_blank, pid_of, unmark},
    paths::{REPLACED, TMP, is_there, parent},
    unfinished::remove_marked,
};

/// Removes what unfinished conversions to `target` left behind, and moves a replaced result back if
/// `target` no longer exists.
///
/// Only certain leftovers are touched, i.e. folders with a leftover's name that are either
///
/// - marked by a process of this host that has ended, or
/// - empty or incompletely marked, a minute old and named after such a process.
///
/// A folder is moved back only if it `is_result`.
pub(crate) fn sweep(
    target: &Path,
    is_result: impl Fn(&Path) -> bool,
) -> Result<(), CheckpointError> {
    let (above, Some(name)) = (parent(target), target.file_name()) else {
        return Ok(());
    };
    if !above.is_dir() {
        return Ok(());
    }
    // The conversion was killed right after it had renamed its result, or while it marked the result
    // that it would replace. With such a mark the next one could not mark it.
    if is_abandoned(target) || has_torn_mark(target) {
        unmark(target).during("remove the owner mark of an ended process in", target)?;
    }
    for entry in fs::read_dir(above).during("read the folder", above)? {
        let entry = entry.during("read the folder", above)?;
        let path = entry.path();
        let file_name = entry.file_name();
        if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        let suffix = |of: &str| suffix(name, &file_name, of);
        if let Some(suffix) = suffix(TMP) {
            if is_abandoned(&path) || is_abandoned_blank(&path, suffix) {
                remove_marked(&path);
            }
        } else if let Some(suffix) = suffix(REPLACED) {
            let is_left = is_abandoned(&path)
                || (!is_there(&path.join(OWNER)) && pid_of(suffix).is_some_and(has_ended));
            if is_left && !is_there(target) && is_result(&path) {
                fs::rename(&path, target).during("restore", &path)?;
                let _ = unmark(target);
                tracing::warn!(
                    "restored {}, which a killed conversion had moved aside",
                    target.display()
                );
            } else if is_abandoned(&path) && is_there(target) {
                remove_marked(&path);
            }
        }
    }
    Ok(())
}

/// The rest of `name` after the target's name and the kind of leftover.
fn suffix<'a>(target: &OsStr, name: &'a OsStr, kind: &str) -> Option<&'a str> {
    name.to_str()?
        .strip_prefix(target.to_str()?)?
        .strip_prefix(kind)
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_torn_mark_of_the_result_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        fs::create_dir(&target).unwrap();
        for text in ["", "megaburn writes this folder\n"] {
            fs::write(target.join(OWNER), text).unwrap();
            sweep(&target, |_| true).unwrap();
            assert!(!target.join(OWNER).exists(), "{text:?}");
        }
        fs::write(target.join(OWNER), "a file of the user").unwrap();
        sweep(&target, |_| true).unwrap();
        assert!(target.join(OWNER).exists());
    }

    use super::*;
    use crate::{
        owner::Owner,
        testing::{make, names},
    };

    #[test]
    fn only_what_is_certainly_a_leftover_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let target = make(dir.path(), "out");
        // Unmarked, of other targets, not a folder, of this process, of another host.
        let kept = [
            "out.tmp-1-2",
            "out.tmp-",
            "out.replaced-1-2",
            "outer.tmp-1-2",
            "out.tmp",
        ];
        for name in kept {
            make(dir.path(), name);
        }
        // Like a conversion that has just started.
        fs::create_dir(dir.path().join("out.tmp-ffffffff-9")).unwrap();
        fs::write(dir.path().join("out.tmp-3-4"), "a file").unwrap();
        let other = make(dir.path(), "other.tmp-1-3");
        drop(Owner::mark(&other).unwrap());
        let _alive = Owner::mark(&make(dir.path(), "out.tmp-5-6")).unwrap();
        let before = names(dir.path());
        for name in ["out.tmp-1-7", "out.tmp-1-8-1-9", "out.replaced-1-7"] {
            drop(Owner::mark(&make(dir.path(), name)).unwrap());
        }
        sweep(&target, |_| panic!("the target is there")).unwrap();
        assert_eq!(names(dir.path()), before);
        assert_eq!(names(&target), ["weights"]);
    }

    #[test]
    fn a_folder_with_nothing_or_half_a_mark_is_removed_after_a_minute() {
        let dir = tempfile::tempdir().unwrap();
        let target = make(dir.path(), "out");
        for (name, mark) in [
            ("out.tmp-ffffffff-1", None),
            ("out.tmp-ffffffff-2", Some("")),
        ] {
            let path = dir.path().join(name);
            fs::create_dir(&path).unwrap();
            if let Some(text) = mark {
                fs::write(path.join(OWNER), text).unwrap();
            }
            sweep(&target, |_| true).unwrap();
            assert!(path.is_dir(), "{name} may be one that begins");
            let made = std::time::SystemTime::now() - std::time::Duration::from_secs(120);
            fs::File::open(&path).unwrap().set_modified(made).unwrap();
        }
        sweep(&target, |_| true).unwrap();
        assert_eq!(names(dir.path()), ["out"]);
    }

    #[test]
    fn a_replaced_result_comes_back_if_its_name_is_empty() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        let replaced = make(dir.path(), "out.replaced-ffffffff-1");
        sweep(&target, |_| false).unwrap();
        assert!(replaced.is_dir(), "it is no such result");
        let alive = format!("out.replaced-{:x}-1", std::process::id());
        make(dir.path(), &alive);
        sweep(&target, |folder| folder.join("weights").is_file()).unwrap();
        assert_eq!(names(dir.path()), ["out", alive.as_str()]);
        assert_eq!(
            fs::read_to_string(target.join("weights")).unwrap(),
            "out.replaced-ffffffff-1"
        );

        fs::remove_dir_all(dir.path().join(alive)).unwrap();
        fs::rename(&target, &replaced).unwrap();
        drop(Owner::mark(&replaced).unwrap());
        sweep(&target, |_| true).unwrap();
        assert_eq!(
            (names(dir.path()), names(&target)),
            (vec!["out".into()], vec!["weights".into()])
        );
    }
}
