//! `megaburn checkpoint verify`.

use std::path::{Path, PathBuf};

use clap::Args;
use megaburn_checkpoint::{
    CheckpointState, Damage, Examined, bytes_to_examine, examine, is_there, list_checkpoints,
};
use megaburn_train::TrainError;
use serde_json::{Value, json};

use super::{
    super::print,
    place::{Place, refused},
    progress::ReadProgress,
    units::{counted, size},
};

#[derive(Args)]
pub(in crate::cli) struct VerifyArgs {
    /// Runs, folders of checkpoints, or checkpoints.
    #[arg(value_name = "RUN_OR_CHECKPOINT", required = true)]
    paths: Vec<PathBuf>,
    /// Print only JSON on stdout: one object per line, for each checkpoint.
    #[arg(long)]
    json: bool,
}

impl VerifyArgs {
    /// Verifies; whether all checkpoints are whole.
    pub(super) fn run(self) -> Result<bool, TrainError> {
        let mut checkpoints = Vec::new();
        for path in &self.paths {
            checkpoints.extend(checkpoints_at(path)?);
        }
        let expected = checkpoints.iter().map(|path| bytes_to_examine(path)).sum();
        let mut progress = ReadProgress::new(expected);
        let mut is_whole = true;
        for path in checkpoints {
            let found = Verified::of(&path, &mut progress);
            is_whole &= found.is_whole();
            progress.above(|| match self.json {
                true => print::result(found.json(&path)),
                false => found.lines(&path).into_iter().try_for_each(print::result),
            })?;
        }
        Ok(is_whole)
    }
}

/// The committed checkpoints at a path.
fn checkpoints_at(path: &Path) -> Result<Vec<PathBuf>, TrainError> {
    let folder = match Place::of(path)? {
        Place::Checkpoint(path) => return Ok(vec![path]),
        Place::Folder { checkpoints, .. } => checkpoints,
    };
    let is_committed = |state: &CheckpointState| {
        !matches!(
            state,
            CheckpointState::Unfinished | CheckpointState::SetAside | CheckpointState::Suspect
        )
    };
    let found = list_checkpoints(&folder)?.into_iter();
    let found = found.filter(|listed| is_committed(&listed.state));
    let found: Vec<_> = found.map(|listed| listed.path).collect();
    if found.is_empty() {
        return Err(refused(&folder, "contains no checkpoint"));
    }
    Ok(found)
}

/// What verifying a checkpoint has shown.
enum Verified {
    Examined(Examined),
    /// It was deleted or replaced meanwhile, as a run that is in progress does.
    Gone,
    /// It could not be read.
    Unreadable(String),
}

impl Verified {
    fn of(path: &Path, progress: &mut ReadProgress) -> Self {
        let found = examine(path, &mut |bytes| progress.add(bytes));
        let is_gone = || !is_there(path);
        match found {
            Ok(found) if !found.damage.is_empty() && is_gone() => Self::Gone,
            Err(_) if is_gone() => Self::Gone,
            Ok(found) => Self::Examined(found),
            Err(error) => Self::Unreadable(error.to_string()),
        }
    }

    fn is_whole(&self) -> bool {
        match self {
            Self::Examined(found) => found.damage.is_empty(),
            Self::Gone => true,
            Self::Unreadable(_) => false,
        }
    }

    fn state(&self) -> &'static str {
        match self {
            Self::Examined(found) if found.damage.is_empty() => "whole",
            Self::Examined(_) => "damaged",
            Self::Gone => "gone",
            Self::Unreadable(_) => "unreadable",
        }
    }

    fn lines(&self, path: &Path) -> Vec<String> {
        let path = path.display();
        match self {
            Self::Gone => vec![format!("{path}: was deleted while it was being verified")],
            Self::Unreadable(why) => vec![format!("{path}: UNREADABLE: {why}")],
            Self::Examined(found) => {
                let files = counted(found.num_files, "file");
                let files = format!("{files}, {}", size(found.num_bytes));
                if found.damage.is_empty() {
                    return vec![format!("{path}: whole, {files}")];
                }
                let first = format!("{path}: DAMAGED, {files}");
                [first]
                    .into_iter()
                    .chain(found.damage.iter().map(line))
                    .collect()
            }
        }
    }

    fn json(&self, path: &Path) -> Value {
        let damage = |damage: &Damage| {
            json!({
                "file": name(damage),
                "tensor": damage.tensor,
                "chunk": damage.chunk.map(|(chunk, _)| chunk),
                "chunks": damage.chunk.map(|(_, chunks)| chunks),
                "why": damage.why,
            })
        };
        let examined = match self {
            Self::Examined(found) => Some(found),
            _ => None,
        };
        let all = examined.map(|found| found.damage.iter().map(damage).collect::<Vec<_>>());
        json!({
            "path": path.display().to_string(),
            "state": self.state(),
            "files": examined.map(|found| found.num_files),
            "bytes": examined.map(|found| found.num_bytes),
            "damage": all.unwrap_or_default(),
            "why": match self {
                Self::Unreadable(why) => Some(why),
                _ => None,
            },
        })
    }
}

/// The name of the damaged file.
fn name(damage: &Damage) -> String {
    let name = damage.file.file_name().unwrap_or(damage.file.as_os_str());
    name.to_string_lossy().into_owned()
}

fn line(damage: &Damage) -> String {
    let tensor = damage.tensor.as_ref();
    let tensor = tensor.map_or_else(String::new, |tensor| format!("tensor `{tensor}`, "));
    let chunk = damage.chunk.map_or_else(String::new, |(chunk, chunks)| {
        format!("chunk {chunk} of {chunks}: ")
    });
    format!("  {}: {tensor}{chunk}{}", name(damage), damage.why)
}
