//! The names of the files that a run writes into its folder.

use std::{fs, io, path::Path};

/// Marks the folder as a run's and identifies the run.
pub(crate) const MARKER: &str = "run.json";
/// Locked by the process of the run.
pub(crate) const LOCK: &str = ".lock";
/// The resolved configuration.
pub(crate) const CONFIG: &str = "config.toml";
/// The resolved configuration, if `config.toml` is the user's.
pub(crate) const RESOLVED_CONFIG: &str = "config.resolved.toml";
/// One line per step, evaluation and start.
pub(crate) const METRICS: &str = "metrics.jsonl";
/// One line of each rank about a hang.
pub(crate) const HANGS: &str = "hangs.jsonl";
/// Whether the run is running, stopped, finished or failed.
pub(crate) const STATE: &str = "state.json";
/// The plot of the loss.
pub(crate) const PICTURE: &str = "loss.svg";
/// The folder of checkpoints.
pub(crate) const CHECKPOINTS: &str = "checkpoints";

/// The name of the resolved configuration if the names before it are the user's:
/// `config.resolved-2.toml`.
pub(super) fn numbered(number: u64) -> String {
    RESOLVED_CONFIG.replace(".toml", &format!("-{number}.toml"))
}

/// Whether a name is one of the [`numbered`] ones.
pub(super) fn is_numbered(name: &str) -> bool {
    let number = name
        .strip_prefix("config.resolved-")
        .and_then(|rest| rest.strip_suffix(".toml"));
    number
        .and_then(|number| number.parse().ok())
        .is_some_and(|number| name == numbered(number))
}

/// The names in a folder, sorted.
pub(crate) fn names_in(dir: &Path) -> io::Result<Vec<String>> {
    let name = |entry: io::Result<fs::DirEntry>| {
        entry.map(|entry| entry.file_name().to_string_lossy().into_owned())
    };
    let mut names = fs::read_dir(dir)?
        .map(name)
        .collect::<io::Result<Vec<_>>>()?;
    names.sort();
    Ok(names)
}
