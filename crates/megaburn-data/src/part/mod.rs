//! Data sets that are being written. They grow in a folder `PREFIX.megaburn-part` and are renamed
//! to their names when they are complete.
//!
//! A journal in the folder says up to where the files are saved, so that the work can continue
//! after the process was killed. The folder is locked by the process that writes it, and holds only
//! files that this module wrote.

mod complete;
mod disk;
mod folder;
mod journal;
mod lock;
mod output;
mod owned;

pub(crate) use complete::CompletePart;
#[cfg(test)]
pub(crate) use disk::fuse;
pub(crate) use disk::{AppendFile, remove, rename, sync_folder};
#[cfg(feature = "object-store")]
pub(crate) use lock::FolderLock;
pub(crate) use lock::lock_folder;
pub(crate) use output::Output;
#[cfg(feature = "object-store")]
pub(crate) use owned::description_from;
pub(crate) use owned::{check_replaceable, description_of, hash_from, hash_of, hex};

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use megaburn_store::is_url;
use serde_json::{Value, json};

use crate::{
    error::DataError,
    indexed::{TokenType, with_ending},
};
use complete::CompleteOutput;
use disk::folder_of;
use folder::LockedFolder;
use journal::{Journal, Saved};

/// The key that marks the first line of a journal of this module.
const MARK: &str = "megaburn_part";

/// A folder of data sets as it was found.
#[derive(Debug)]
pub(crate) enum Opened {
    /// Documents are missing.
    Writing(Part),
    /// Only the names are missing.
    Complete(CompletePart),
}

/// One or several data sets that are written together. If it is dropped before anything was saved,
/// the folder is removed.
#[derive(Debug)]
pub(crate) struct Part {
    /// `None` after it was completed.
    folder: Option<LockedFolder>,
    outputs: Vec<Output>,
    journal: Journal,
    /// What the caller saved last.
    progress: Option<Value>,
    force: bool,
}

impl Part {
    /// Starts or resumes data sets with the prefixes `outputs` in the folder `name.megaburn-part`.
    /// `identity` is everything that decides what is written. An unfinished folder of another
    /// identity is refused, or started over with `force`.
    ///
    /// # Errors
    /// A data set of these names exists, and `force` is not set or another program wrote it. The
    /// folder is another program's, or is being written by another process.
    pub(crate) fn open(
        name: &Path,
        outputs: &[(PathBuf, TokenType)],
        identity: Value,
        force: bool,
    ) -> Result<Opened, DataError> {
        for path in outputs
            .iter()
            .map(|(prefix, _)| prefix.as_path())
            .chain([name])
        {
            check_prefix(path)?;
        }
        let path = with_ending(name, ".megaburn-part");
        let identity = json!({ MARK: 1, "of": identity });
        // Without the lock, nothing is created where nothing may be written.
        check_names(&path, outputs, &identity, force).inspect_err(|_| {
            // A process that was killed when it had finished may have left the empty folder.
            if path.is_dir()
                && let Ok(folder) = LockedFolder::lock(path.clone())
            {
                folder.remove_if_empty();
            }
        })?;
        let folder = LockedFolder::lock(path)?;
        let found = Self::find(&folder, outputs, &identity, force);
        if found.is_err() {
            folder.remove_if_empty();
        }
        let mut saved = match found? {
            Found::Writing(saved) => saved,
            Found::Complete(outputs, progress) => {
                let complete = CompletePart::new(folder, outputs, progress, force);
                return Ok(Opened::Complete(complete));
            }
        };
        let mut opened = open_files(&folder, outputs, saved.as_ref(), &identity);
        if force && matches!(opened, Err(DataError::DamagedPart { .. })) {
            folder.remove_contents()?;
            saved = None;
            opened = open_files(&folder, outputs, None, &identity);
        }
        let (journal, outputs) = opened?;
        let state = saved.and_then(|saved| saved.state);
        Ok(Opened::Writing(Self {
            folder: Some(folder),
            outputs,
            journal,
            progress: state.map(|state| state["progress"].clone()),
            force,
        }))
    }

    /// What is in the folder, after it was locked: another process may have written, or finished and
    /// removed the folder, until then.
    fn find(
        folder: &LockedFolder,
        outputs: &[(PathBuf, TokenType)],
        identity: &Value,
        force: bool,
    ) -> Result<Found, DataError> {
        check_names(folder.path(), outputs, identity, force)?;
        let saved = usable(folder, Saved::read(folder.path())?, identity, force)?;
        if !is_complete(saved.as_ref()) {
            return Ok(Found::Writing(saved));
        }
        let complete = |(index, (prefix, _)): (usize, &(PathBuf, TokenType))| {
            let stem = folder.path().join(index.to_string());
            CompleteOutput::new(prefix.clone(), stem)
        };
        let complete: Vec<_> = outputs.iter().enumerate().map(complete).collect();
        if complete.iter().all(CompleteOutput::is_whole) {
            let state = saved.and_then(|saved| saved.state);
            let progress = state.map(|state| state["progress"].clone());
            return Ok(Found::Complete(complete, progress.unwrap_or_default()));
        }
        // Files were taken away since, so the work starts over.
        for (prefix, _) in outputs {
            check_replaceable(prefix, force)?;
        }
        folder.remove_contents()?;
        Ok(Found::Writing(None))
    }

    /// What the caller saved last; `None` for a new folder.
    pub(crate) fn progress(&self) -> Option<&Value> {
        self.progress.as_ref()
    }

    pub(crate) fn outputs(&mut self) -> &mut [Output] {
        &mut self.outputs
    }

    /// Writes everything to the disk, then the state, from which a later process continues.
    pub(crate) fn save(&mut self, progress: Value) -> Result<(), DataError> {
        self.save_as(progress, false)
    }

    /// Drops what was written, also if a state was saved.
    pub(crate) fn discard(mut self) {
        self.progress = None;
    }

    fn save_as(&mut self, progress: Value, complete: bool) -> Result<(), DataError> {
        for output in &mut self.outputs {
            output.sync()?;
        }
        let counts: Vec<Value> = self.outputs.iter().map(Output::counts).collect();
        let state = json!({"complete": complete, "counts": counts, "progress": progress});
        self.journal.save(&state)?;
        self.progress = Some(progress);
        Ok(())
    }

    /// Writes the indices and, next to each data set, `describe(output)`; saves that the data sets
    /// are complete.
    pub(crate) fn complete(
        mut self,
        progress: Value,
        describe: impl Fn(&Output) -> Value,
    ) -> Result<CompletePart, DataError> {
        for output in &mut self.outputs {
            output.sync()?;
            let hash = output.write_index()?;
            output.write_description(describe(output), hash)?;
        }
        if let Some(folder) = &self.folder {
            folder.sync()?;
        }
        self.save_as(progress.clone(), true)?;
        let Some(folder) = self.folder.take() else {
            return Err(DataError::Zero { what: "the folder" });
        };
        let complete =
            |output: &Output| CompleteOutput::new(output.prefix().into(), output.stem().into());
        let outputs = self.outputs.iter().map(complete).collect();
        Ok(CompletePart::new(folder, outputs, progress, self.force))
    }
}

/// What is in a folder that is locked.
enum Found {
    /// Documents are missing; of some, the state may be saved.
    Writing(Option<Saved>),
    /// Only the names are missing. The value is what the caller saved last.
    Complete(Vec<CompleteOutput>, Value),
}

/// Checks that data sets may be written, unless they are complete in the folder: then they may have
/// some of their names already.
fn check_names(
    folder: &Path,
    outputs: &[(PathBuf, TokenType)],
    identity: &Value,
    force: bool,
) -> Result<(), DataError> {
    let saved = Saved::read(folder)?.filter(|saved| saved.identity == *identity);
    if is_complete(saved.as_ref()) {
        return Ok(());
    }
    outputs
        .iter()
        .try_for_each(|(prefix, _)| check_replaceable(prefix, force))
}

fn is_complete(saved: Option<&Saved>) -> bool {
    let state = saved.and_then(|saved| saved.state.as_ref());
    state.is_some_and(|state| state["complete"] == true)
}

/// Checks that files can have the names that a prefix gives.
fn check_prefix(prefix: &Path) -> Result<(), DataError> {
    let bad = |why: String| {
        let path = prefix.into();
        Err(DataError::Prefix { path, why })
    };
    if is_url(prefix) {
        return bad("it is a URL; write to files of this host, and upload them".into());
    }
    if prefix.as_os_str().as_bytes().ends_with(b"/") || prefix.file_name().is_none() {
        return bad("it is a folder; add a name, like DIR/web".into());
    }
    if prefix.extension().is_some_and(|e| e == "bin" || e == "idx") {
        return bad("its ending is added to it; leave the ending out".into());
    }
    let folder = folder_of(prefix);
    if !folder.is_dir() {
        return bad(format!(
            "there is no folder `{}`; create it",
            folder.display()
        ));
    }
    Ok(())
}

/// Opens the files of data sets, and cuts them to what was saved.
fn open_files(
    folder: &LockedFolder,
    outputs: &[(PathBuf, TokenType)],
    saved: Option<&Saved>,
    identity: &Value,
) -> Result<(Journal, Vec<Output>), DataError> {
    let journal = match saved {
        Some(saved) => Journal::resume(folder.path(), saved)?,
        None => Journal::create(folder.path(), identity)?,
    };
    let state = saved.and_then(|saved| saved.state.as_ref());
    let open = |(index, (prefix, of)): (usize, &(PathBuf, TokenType))| {
        let stem = folder.path().join(index.to_string());
        let counts = state.map(|state| &state["counts"][index]);
        Output::open(prefix.clone(), stem, *of, counts)
    };
    let outputs = outputs.iter().enumerate().map(open);
    let outputs = outputs.collect::<Result<_, _>>()?;
    // A state that is saved later counts on these files.
    folder.sync()?;
    Ok((journal, outputs))
}

impl Drop for Part {
    fn drop(&mut self) {
        let is_saved = self.progress.is_some();
        if let Some(folder) = self.folder.take()
            && !is_saved
        {
            // An error of the removal is ignored: the error before it is the one to report.
            let _ = folder.remove();
        }
    }
}

/// The saved state, if it is of this identity. Removes what is in the folder otherwise.
fn usable(
    folder: &LockedFolder,
    saved: Option<Saved>,
    identity: &Value,
    force: bool,
) -> Result<Option<Saved>, DataError> {
    let foreign = |why: &str| DataError::Foreign {
        path: folder.path().into(),
        why: why.into(),
    };
    let Some(saved) = saved else {
        // A process may have been killed before the first line of its journal was on the disk.
        if folder.has_other_than_new_journal()? {
            return Err(foreign("it has no journal"));
        }
        return Ok(None);
    };
    if saved.identity[MARK] != 1 {
        return Err(foreign("its journal is not one of megaburn"));
    }
    if saved.identity == *identity {
        return Ok(Some(saved));
    }
    if !force {
        return Err(DataError::OtherPart {
            folder: folder.path().into(),
            why: difference("", &saved.identity["of"], &identity["of"]),
        });
    }
    folder.remove_contents()?;
    Ok(None)
}

/// Names the first part of `identity` that differs from what a journal says.
fn difference(name: &str, saved: &Value, identity: &Value) -> String {
    let parts: Vec<(String, &Value, &Value)> = match (saved, identity) {
        (Value::Object(_), Value::Object(fields)) => fields
            .iter()
            .map(|(field, value)| (format!("{name} {field}"), &saved[field], value))
            .collect(),
        (Value::Array(before), Value::Array(now)) if before.len() == now.len() => {
            let each = before.iter().zip(now);
            each.map(|(before, now)| (name.to_string(), before, now))
                .collect()
        }
        _ => Vec::new(),
    };
    match parts.into_iter().find(|(_, before, now)| before != now) {
        Some((name, before, now)) => difference(&name, before, now),
        None => {
            let shown = |value: &Value| value.to_string().chars().take(80).collect::<String>();
            format!(
                "its{name}: {} before, {} now",
                shown(saved),
                shown(identity)
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_is_named() {
        let saved =
            json!({"tokenizer": {"hash": 1, "eod": 2}, "files": [{"size": 3}, {"size": 4}]});
        let mut other = saved.clone();
        other["tokenizer"]["eod"] = json!(5);
        assert_eq!(
            difference("", &saved, &other),
            "its tokenizer eod: 2 before, 5 now"
        );
        other = saved.clone();
        other["files"][1]["size"] = json!(9);
        assert_eq!(
            difference("", &saved, &other),
            "its files size: 4 before, 9 now"
        );
        other["files"] = json!([]);
        let found = difference("", &saved, &other);
        assert_eq!(
            found,
            "its files: [{\"size\":3},{\"size\":4}] before, [] now"
        );
    }
}
