//! Trainings that are resumed under the same layout and others.

use std::fs;

use rstest::rstest;

use super::program::{Program, close};

/// Checkpoints of two of four epochs.
fn half(layout: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let program = Program {
        saves: true,
        ..Program::new(dir.path())
    };
    program.probes(layout);
    dir
}

#[rstest]
#[case("tp2-dp2", "tp2-dp2")]
#[case("tp2-dp2", "dp2")]
#[case("dp2", "tp4-dp2")]
#[case("dp1", "tp2")]
fn a_resumed_training_continues_as_if_it_had_not_stopped(
    #[case] first: &str,
    #[case] second: &str,
) {
    let dir = half(first);
    let names: Vec<_> = fs::read_dir(dir.path().join("checkpoints"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| !name.starts_with('.'))
        .collect();
    assert_eq!(names.len(), 2, "{names:?}");

    let program = Program {
        epochs: 4,
        ..Program::new(dir.path())
    };
    let expected = program.probes(second);
    let resumed = Program {
        resume: Some(2),
        saves: true,
        ..program.clone()
    };
    let found = resumed.probes(second);
    close(&found[0], &expected[0], second);
    let two = Program {
        epochs: 2,
        ..program
    };
    assert_ne!(two.probes(second), found, "the epochs after do not show");
}

#[test]
fn old_checkpoints_are_deleted_and_other_folders_are_not() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("checkpoints");
    fs::create_dir_all(folder.join("step-notes")).unwrap();
    let program = Program {
        epochs: 5,
        saves: true,
        ..Program::new(dir.path())
    };
    program.probes("dp2");
    let is_there = |name: &str| folder.join(name).exists();
    assert!(is_there("step-00000005") && is_there("step-00000004"));
    assert!(is_there("step-notes"));
    assert!(
        !is_there("step-00000001"),
        "it is neither new nor the best, because the loss falls"
    );
}
