//! The folders of profiles and of logs for other programs, which those programs may write into too.

use std::{fs, path::Path};

use megaburn_checkpoint::{TMP, leftover_of};
use megaburn_report::{
    logs::{is_event_file, is_run_file, is_run_folder},
    profile::{is_profile_file, is_profile_name},
};

use super::names::names_in;

/// Whether `tensorboard/` holds nothing but event files.
pub(super) fn holds_only_events(folder: &Path) -> bool {
    is_folder(folder)
        && names_in(folder).is_ok_and(|names| names.iter().all(|name| is_event_file(name)))
}

/// Whether `wandb/` holds nothing but the logs of offline runs.
pub(super) fn holds_only_runs(folder: &Path) -> bool {
    let is_log = |name: &String| {
        let half_written = leftover_of(name).filter(|(_, suffix)| *suffix == TMP);
        is_run_file(half_written.map_or(name.as_str(), |(of, _)| of))
    };
    let is_run = |name: &String| {
        let run = folder.join(name);
        is_run_folder(name)
            && is_folder(&run)
            && names_in(&run).is_ok_and(|names| names.iter().all(is_log))
    };
    is_folder(folder) && names_in(folder).is_ok_and(|names| names.iter().all(is_run))
}

/// Whether `profile/` holds nothing but profiles.
pub(super) fn holds_only_profiles(folder: &Path) -> bool {
    let is_ours = |name: &String| {
        let half_written =
            leftover_of(name).is_some_and(|(of, suffix)| suffix == TMP && is_profile_name(of));
        half_written || is_profile_file(&folder.join(name))
    };
    is_folder(folder) && names_in(folder).is_ok_and(|names| names.iter().all(is_ours))
}

fn is_folder(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.is_dir())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_with_files_of_others_are_not_a_runs() {
        let dir = tempfile::tempdir().unwrap();
        let [events, runs] = ["tensorboard", "wandb"].map(|name| dir.path().join(name));
        let run = runs.join("offline-run-20261128_023628-1f");
        fs::create_dir_all(&run).unwrap();
        fs::create_dir_all(&events).unwrap();
        for name in ["run-1f.wandb", "run-1f.wandb.tmp-1f-2a"] {
            fs::write(run.join(name), "").unwrap();
        }
        fs::write(events.join("events.out.tfevents.1.host.2.0.megaburn"), "").unwrap();
        assert!(holds_only_events(&events) && holds_only_runs(&runs));
        fs::write(run.join("run-1f.wandb.synced"), "").unwrap();
        fs::write(events.join("events.out.tfevents.1.host.3.0"), "").unwrap();
        assert!(!holds_only_events(&events) && !holds_only_runs(&runs));
        assert!(!holds_only_runs(&events) && !holds_only_events(&dir.path().join("none")));
    }
}
