//! The files and folders that are a run's in its folder. All others there are the user's.

use std::path::Path;

use megaburn_checkpoint::{TMP, leftover_of};
use megaburn_models::assets::ASSETS;
use megaburn_report::{
    logs::{EVALUATIONS_CSV, STEPS_CSV, TENSORBOARD, WANDB, is_table_or_absent},
    metrics::OTHER_LINES,
    profile::PROFILES,
};

use super::{
    assets, config_file,
    lock::is_lock,
    logs::{holds_only_events, holds_only_profiles, holds_only_runs},
    names::{
        CHECKPOINTS, CONFIG, HANGS, LOCK, MARKER, METRICS, PICTURE, RESOLVED_CONFIG, STATE,
        is_numbered,
    },
};

/// How a run recognises that a file with one of its names is its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Proof {
    /// By the folder's marker: no one else writes a file of this name into a run's folder.
    Marker,
    /// By the text of the lock.
    Lock,
    /// By the file's first line, which has the hash of the rest.
    Signature,
    /// By a mark in the folder, which must hold only files that a run writes.
    Mark,
    /// By its first line: the columns of a table of steps or evaluations.
    Columns,
    /// By its content: it holds nothing but event files of TensorBoard that a run wrote.
    EventFiles,
    /// By its content: it holds nothing but offline runs of Weights & Biases.
    OfflineRuns,
    /// By its content: it holds nothing but profiles.
    Profiles,
    /// By the manifest of each checkpoint in it, which names the run.
    Manifests,
    /// Never: it holds lines that others wrote.
    None,
}

/// What `--fresh` does with a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fresh {
    /// It is moved with the run that is set aside.
    Moves,
    /// A copy is kept with the run that is set aside.
    IsCopied,
    /// It stays, or is handled separately.
    Stays,
}

/// A name that a run writes to.
#[derive(Debug)]
pub(super) struct Owned {
    pub(super) name: &'static str,
    pub(super) proof: Proof,
    pub(super) fresh: Fresh,
    /// Whether versions without markers also wrote this file.
    pub(super) is_old: bool,
}

const fn owned(name: &'static str, proof: Proof, fresh: Fresh, is_old: bool) -> Owned {
    Owned {
        name,
        proof,
        fresh,
        is_old,
    }
}

/// The files and folders that a run creates under exactly these names; numbered names of the
/// resolved configuration come in addition.
const OWNED: [Owned; 16] = [
    owned(MARKER, Proof::Marker, Fresh::Stays, false),
    owned(LOCK, Proof::Lock, Fresh::Stays, true),
    owned(CONFIG, Proof::Signature, Fresh::Moves, true),
    owned(RESOLVED_CONFIG, Proof::Signature, Fresh::Moves, false),
    owned(METRICS, Proof::Marker, Fresh::IsCopied, true),
    owned(OTHER_LINES, Proof::None, Fresh::Stays, false),
    owned(HANGS, Proof::Marker, Fresh::Moves, false),
    owned(STATE, Proof::Marker, Fresh::Moves, false),
    owned(PICTURE, Proof::Marker, Fresh::Moves, true),
    owned(CHECKPOINTS, Proof::Manifests, Fresh::Stays, true),
    owned(ASSETS, Proof::Mark, Fresh::Moves, true),
    owned(STEPS_CSV, Proof::Columns, Fresh::Moves, false),
    owned(EVALUATIONS_CSV, Proof::Columns, Fresh::Moves, false),
    owned(TENSORBOARD, Proof::EventFiles, Fresh::Moves, false),
    owned(WANDB, Proof::OfflineRuns, Fresh::Moves, false),
    owned(PROFILES, Proof::Profiles, Fresh::Moves, false),
];

impl Owned {
    /// The entry for this name; `None` if a run does not write to it.
    pub(super) fn of(name: &str) -> Option<&'static Self> {
        let name = if is_numbered(name) {
            RESOLVED_CONFIG
        } else {
            name
        };
        OWNED.iter().find(|owned| owned.name == name)
    }

    /// Whether others may have a file or folder of this name in the folder of a new run: the run
    /// takes another name, or adds files to the folder.
    pub(super) fn may_be_taken(&self) -> bool {
        matches!(
            self.proof,
            Proof::Signature
                | Proof::Columns
                | Proof::EventFiles
                | Proof::OfflineRuns
                | Proof::Profiles
        )
    }

    /// Whether it is a folder that is removed with all that is in it.
    pub(super) fn is_folder(&self) -> bool {
        matches!(
            self.proof,
            Proof::Mark | Proof::EventFiles | Proof::OfflineRuns | Proof::Profiles
        )
    }

    /// Whether the file or folder at `path`, inside a run's folder, is entirely the run's.
    pub(super) fn is_ours(&self, path: &Path) -> bool {
        match self.proof {
            Proof::Marker => path.is_file(),
            Proof::Columns => path.is_file() && is_table_or_absent(path),
            Proof::Lock => path.parent().is_some_and(is_lock),
            Proof::Signature => config_file::is_ours(path),
            Proof::Mark => assets::is_ours(path),
            Proof::EventFiles => holds_only_events(path),
            Proof::OfflineRuns => holds_only_runs(path),
            Proof::Profiles => holds_only_profiles(path),
            Proof::Manifests | Proof::None => false,
        }
    }
}

/// Whether a run writes to this name.
pub(super) fn is_owned(name: &str) -> bool {
    Owned::of(name).is_some()
}

/// Whether the name is the one of a partially written file, `NAME.tmp-PID-TIME` with an owned NAME.
/// Returns NAME.
pub(super) fn half_written(name: &str) -> Option<&str> {
    leftover_of(name)
        .filter(|(of, suffix)| *suffix == TMP && is_owned(of))
        .map(|(of, _)| of)
}

#[cfg(test)]
mod tests {
    use super::{super::names::numbered, *};

    #[test]
    fn only_leftovers_of_owned_names_are_leftovers() {
        assert_eq!(half_written("config.toml.tmp-1f-2a"), Some(CONFIG));
        let others = [
            "config.toml",
            "notes.tmp-1-2",
            "my.config.toml.tmp-1-2",
            "run.json~",
        ];
        for name in others
            .into_iter()
            .chain(["config.toml.tmp-mine", "config.toml.tmp-1-"])
        {
            assert_eq!(half_written(name), None, "{name}");
        }
    }

    #[test]
    fn a_numbered_configuration_is_owned() {
        assert_eq!(numbered(2), "config.resolved-2.toml");
        assert!(is_owned("config.resolved-2.toml") && is_owned("config.resolved-13.toml"));
        for name in [
            "config.resolved-.toml",
            "config.resolved-02.toml",
            "config.resolved-x.toml",
        ] {
            assert!(!is_owned(name), "{name}");
        }
    }
}
