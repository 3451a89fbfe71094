//! The commands of `docs/checkpoints.md`.

use std::{fs, os::unix::fs::symlink, path::Path};

use super::{names, trained};
use crate::{house::docs::blocks, runs::child::Ranks};

#[test]
fn the_commands_of_the_page_run_as_they_stand() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/checkpoints.md");
    let page = fs::read_to_string(page).unwrap();
    let commands = blocks(&page, "sh").concat();
    for command in [
        "ls", "show", "stats", "verify", "diff", "prune", "weights", "average",
    ] {
        let command = format!("target/release/megaburn checkpoint {command} ");
        assert!(commands.contains(&command), "{command}");
    }
    let run = trained("tp2-dp2");
    let clone = tempfile::tempdir().unwrap();
    let at = |name: &str| clone.path().join(name);
    fs::create_dir_all(at("target/release")).unwrap();
    let binary = env!("CARGO_BIN_EXE_megaburn-under-test");
    symlink(binary, at("target/release/megaburn")).unwrap();
    fs::create_dir(at("runs")).unwrap();
    fs::rename(run.path("run"), at("runs/demo")).unwrap();
    let steps = [(2, 100), (4, 200), (6, 300)];
    for (step, named) in steps {
        let name = |step| at(&format!("runs/demo/checkpoints/step-{step:08}"));
        fs::rename(name(step), name(named)).unwrap();
    }
    Ranks::shell(&commands, clone.path()).finish();
    assert_eq!(
        names(&at("runs/demo/checkpoints")),
        ["step-00000200", "step-00000300"]
    );
    assert_eq!(
        names(&at("models")),
        ["demo-mean", "demo-tp4", "demo-weights"]
    );
}
