//! `megaburn checkpoint ls`.

use std::path::{Path, PathBuf};

use clap::Args;
use megaburn_checkpoint::{
    CheckpointState, ListedCheckpoint, list_checkpoint, list_checkpoints, newest,
};
use megaburn_train::{RunInfo, TrainError, time::utc};
use serde_json::{Value, json};

use super::{
    super::print,
    place::{Place, refused},
    stored::StoreUrl,
    table::Table,
    units::{age, age_text, counted, size},
};

#[derive(Args)]
pub(in crate::cli) struct LsArgs {
    /// Runs, folders of checkpoints, checkpoints, or URLs of such folders in object stores.
    #[arg(value_name = "RUN_OR_FOLDER", required = true)]
    paths: Vec<PathBuf>,
    /// Print only JSON on stdout: one object per line, for each checkpoint.
    #[arg(long)]
    json: bool,
}

impl LsArgs {
    /// Lists; whether no checkpoint is damaged or unreadable, as far as lengths of files show.
    pub(super) fn run(self) -> Result<bool, TrainError> {
        let mut is_whole = true;
        for (number, path) in self.paths.iter().enumerate() {
            let listing = Listing::of(path)?;
            is_whole &= listing.is_whole();
            if self.json {
                listing
                    .rows
                    .iter()
                    .try_for_each(|row| print::result(listing.json(row)))?;
                continue;
            }
            if number > 0 {
                print::result("")?;
            }
            listing.print(path)?;
        }
        Ok(is_whole)
    }
}

/// The checkpoints at one path.
struct Listing {
    rows: Vec<ListedCheckpoint>,
    run: Option<RunInfo>,
    /// The newest whole checkpoint, from which a resume would start.
    newest: Option<PathBuf>,
}

/// What a resume would do with a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OnResume {
    Takes,
    /// It is newer than the run's own.
    Refuses,
}

impl Listing {
    fn of(path: &Path) -> Result<Self, TrainError> {
        if let Some(url) = StoreUrl::open(path)? {
            return Self::of_url(path, &url);
        }
        let place = Place::of(path)?;
        let run = place.run()?;
        let Place::Folder { checkpoints, .. } = place else {
            return Ok(Self {
                rows: vec![list_checkpoint(path)],
                run,
                newest: None,
            });
        };
        let rows = list_checkpoints(&checkpoints)?;
        // If a checkpoint cannot be read, a resume fails, and its row says why.
        let newest = newest(&checkpoints)
            .ok()
            .and_then(|latest| latest.checkpoint);
        let newest = newest.map(|checkpoint| checkpoint.path().to_path_buf());
        Ok(Self { rows, run, newest })
    }

    /// The checkpoints in an object store. Their sizes are compared with their manifests.
    fn of_url(path: &Path, url: &StoreUrl) -> Result<Self, TrainError> {
        let all = url.store.list()?;
        let is_meant = |step: u64| url.step.is_none_or(|meant| meant == step);
        let meant = all.iter().filter(|stored| is_meant(stored.step));
        let rows: Vec<_> = meant.map(|stored| url.store.look(stored)).collect();
        if url.step.is_some() && rows.is_empty() {
            return Err(refused(path, "does not exist"));
        }
        Ok(Self {
            rows,
            run: None,
            newest: None,
        })
    }

    fn is_whole(&self) -> bool {
        !self.rows.iter().any(|row| {
            matches!(
                row.state,
                CheckpointState::Damaged(_) | CheckpointState::Unreadable(_)
            )
        })
    }

    /// Whether this run wrote the checkpoint; `None` if that is not known.
    fn is_own(&self, row: &ListedCheckpoint) -> Option<bool> {
        let manifest = row.manifest.as_ref()?;
        let run = self.run.as_ref()?;
        match &manifest.run_id {
            Some(writer) => Some(*writer == run.run_id),
            None if manifest.trainer.is_null() => Some(false),
            // Of a version without ids.
            None => None,
        }
    }

    fn on_resume(&self, row: &ListedCheckpoint) -> Option<OnResume> {
        self.newest.as_ref().filter(|newest| **newest == row.path)?;
        let is_own = |row: &ListedCheckpoint| self.is_own(row) == Some(true);
        let hides_own = self.is_own(row) == Some(false)
            && self
                .rows
                .iter()
                .any(|older| is_own(older) && older.step < row.step);
        Some(match hides_own {
            true => OnResume::Refuses,
            false => OnResume::Takes,
        })
    }

    /// A state in a word, and further words about it.
    fn state(&self, row: &ListedCheckpoint) -> (&'static str, Option<String>) {
        match &row.state {
            CheckpointState::Whole => ("whole", None),
            CheckpointState::Damaged(why) => ("damaged", Some(why.clone())),
            CheckpointState::Unreadable(why) => ("unreadable", Some(why.clone())),
            CheckpointState::Unfinished => match &self.run {
                Some(RunInfo {
                    holder: Some(holder),
                    ..
                }) => (
                    "unfinished",
                    Some(format!("a run is in progress ({holder})")),
                ),
                _ => ("unfinished", Some("the run's next start removes it".into())),
            },
            CheckpointState::SetAside => (
                "set aside",
                Some("it was found damaged; a run neither uses nor deletes it".into()),
            ),
            CheckpointState::Suspect => (
                "suspect",
                Some("the memory of a rank had failed; a run neither uses nor deletes it".into()),
            ),
        }
    }

    fn json(&self, row: &ListedCheckpoint) -> Value {
        let (state, why) = self.state(row);
        let manifest = row.manifest.as_ref();
        json!({
            "path": row.path.display().to_string(),
            "step": row.step,
            "state": state.replace(' ', "_"),
            "why": why,
            "resume": self.on_resume(row).map(|found| match found {
                OnResume::Takes => "takes",
                OnResume::Refuses => "refuses",
            }),
            "run_id": manifest.and_then(|manifest| manifest.run_id.clone()),
            "is_own": self.is_own(row),
            "layout": manifest.map(|manifest| &manifest.layout),
            "files": row.num_files(),
            "bytes": row.num_bytes,
            "saved": row.saved.map(utc),
            "age_seconds": row.saved.map(|time| age(time).as_secs()),
        })
    }

    fn print(&self, path: &Path) -> Result<(), TrainError> {
        let bytes = self.rows.iter().map(|row| row.num_bytes).sum();
        let path = path.display();
        if self.rows.is_empty() {
            return print::result(format!("{path}: no checkpoints"));
        }
        let count = counted(self.rows.len(), "checkpoint");
        print::result(format!("{path}: {count}, {}", size(bytes)))?;
        let mut table = Table::new([true, false, true, true, true, false, false]);
        let heads = ["step", "saved", "age", "size", "files", "layout", "state"];
        table.push(heads.map(String::from));
        for row in &self.rows {
            let manifest = row.manifest.as_ref();
            let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".into());
            table.push([
                or_none(row.step.map(|step| step.to_string())),
                or_none(row.saved.map(utc)),
                or_none(row.saved.map(age_text)),
                size(row.num_bytes),
                or_none(row.num_files().map(|files| files.to_string())),
                or_none(manifest.map(|manifest| manifest.layout.clone())),
                self.words(row),
            ]);
        }
        table.lines().into_iter().try_for_each(print::result)
    }

    /// The state of a checkpoint as text.
    fn words(&self, row: &ListedCheckpoint) -> String {
        let (state, why) = self.state(row);
        let mut words = match why {
            Some(why) => format!("{state}: {why}"),
            None => state.to_string(),
        };
        let step = row.manifest.as_ref().map(|manifest| manifest.step);
        if let Some(step) = step.filter(|step| Some(*step) != row.step) {
            words += &format!(", saved at step {step}");
        }
        let run_id = row
            .manifest
            .as_ref()
            .and_then(|manifest| manifest.run_id.as_ref());
        match (self.is_own(row), run_id) {
            (Some(false), Some(other)) => words += &format!(", of run {other}"),
            (Some(false), None) => words += ", of a conversion",
            _ => {}
        }
        match self.on_resume(row) {
            Some(OnResume::Takes) => words += ", a resume takes it",
            Some(OnResume::Refuses) => {
                words += ", a resume refuses it because the run's own steps would be lost";
            }
            None => {}
        }
        words
    }
}
