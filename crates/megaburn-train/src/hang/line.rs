//! The lines of `hangs.jsonl`.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use megaburn_collective::RankReport;
use serde::{Deserialize, Serialize};

use super::system::ThreadState;
use crate::{error::TrainError, run_folder::names::HANGS};

/// What one rank reports about a hang.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HangLine {
    /// When the run was started, which is equal for all ranks of a hang.
    pub start: String,
    /// When the rank wrote the line.
    pub time: String,
    /// The rank's host.
    pub host: String,
    /// Its process.
    pub pid: u32,
    /// The failure that the rank learned of.
    pub why: String,
    /// What it was doing.
    pub report: RankReport,
    /// The threads of its process.
    pub threads: Vec<ThreadState>,
    /// The states of the processes of all ranks of its host, by rank.
    pub processes: BTreeMap<usize, ProcessState>,
}

/// The process of a rank, as another rank of the host sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessState {
    /// Its number.
    pub pid: u32,
    /// Its state in words.
    pub state: String,
}

/// Reads the lines of the last hang in files, or in the folders of runs.
///
/// # Errors
/// A file cannot be read, or no line in them is about a hang.
pub fn read_hang(paths: &[PathBuf]) -> Result<Vec<HangLine>, TrainError> {
    let mut lines = Vec::new();
    for path in paths {
        let file = if path.is_dir() {
            path.join(HANGS)
        } else {
            path.clone()
        };
        let text = fs::read_to_string(&file).map_err(|error| {
            unreadable(
                &file,
                &format!("{error}; a run writes it when ranks hang or disagree"),
            )
        })?;
        let parsed = text
            .lines()
            .filter_map(|line| serde_json::from_str::<HangLine>(line).ok());
        let before = lines.len();
        lines.extend(parsed);
        if lines.len() == before {
            return Err(unreadable(&file, "no line of it describes a hang"));
        }
    }
    let last = lines.iter().map(|line| line.start.clone()).max();
    lines.retain(|line| Some(&line.start) == last.as_ref());
    lines.sort_by_key(|line| line.report.rank);
    // A rank writes one line in a start.
    lines.dedup_by_key(|line| line.report.rank);
    Ok(lines)
}

fn unreadable(file: &Path, why: &str) -> TrainError {
    TrainError::Value {
        place: format!("`{}`", file.display()),
        why: why.to_string(),
    }
}
