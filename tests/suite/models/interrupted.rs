//! Conversions that are interrupted at any moment: the target is either the complete old or the
//! complete new version, and no other files remain.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{
    models::round_trip::{succeed, text},
    models::transformers::fixture,
};

/// The moments at which a conversion is interrupted.
const ROUNDS: u32 = 16;
/// Rounds until one interruption was in the middle of a conversion.
const MOST_ROUNDS: u32 = 20 * ROUNDS;

fn names(dir: &Path) -> Vec<String> {
    let names = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name());
    let mut names: Vec<_> = names.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    names
}

/// The names in a folder, without folders that hold nothing but a mark of less than its three lines: a
/// process that is killed at its start leaves one, which conversions remove once it is a minute old.
fn names_without_blank(dir: &Path) -> Vec<String> {
    let is_blank = |name: &String| {
        let mut files = fs::read_dir(dir.join(name)).unwrap();
        let first = files.next().map(|file| file.unwrap().path());
        let is_torn = |file: PathBuf| {
            let text = fs::read_to_string(file);
            text.is_ok_and(|text| !text.ends_with('\n') || text.lines().count() < 3)
        };
        files.next().is_none() && first.is_none_or(is_torn)
    };
    let mut names = names(dir);
    names.retain(|name| name == "hf.tmp-1-2" || !is_blank(name));
    names
}

/// Starts a conversion, sends it a signal after a delay and returns its exit code; `None` if the
/// signal itself ended it.
fn interrupted(args: &[&str], signal: Signal, after: Duration) -> Option<i32> {
    let mut child = Command::new(env!("CARGO_BIN_EXE_megaburn-under-test"))
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    thread::sleep(after);
    // It may have ended by itself; it is only reaped below, so its pid is still valid.
    kill(Pid::from_raw(child.id() as i32), signal).unwrap();
    child.wait().unwrap().code()
}

#[test]
fn a_conversion_that_is_interrupted_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let [checkpoint, hf] = ["checkpoint", "hf"].map(|name| dir.path().join(name));
    let from = text(&checkpoint).to_string();
    let hf_fixture = fixture("qwen3-tied");
    succeed(&["convert", "import", text(&hf_fixture), &from]);
    let begin = Instant::now();
    succeed(&["convert", "export", &from, text(&hf)]);
    let whole = begin.elapsed();
    let result = names(&hf);
    let export = ["convert", "export", &from, text(&hf), "--force"];
    let import = ["convert", "import", text(&hf_fixture), &from, "--force"];
    let mut stopped = 0;
    for round in 0..MOST_ROUNDS {
        if round >= ROUNDS && stopped > 0 {
            break;
        }
        let (args, signal, code) = match round % 4 {
            0 => (&import, Signal::SIGINT, 130),
            1 => (&import, Signal::SIGTERM, 143),
            2 => (&export, Signal::SIGINT, 130),
            _ => (&export, Signal::SIGTERM, 143),
        };
        let found = interrupted(args, signal, whole * (round % ROUNDS) / ROUNDS);
        // It completed, or it ended before it handled signals and wrote anything.
        assert!(
            [Some(0), Some(code), None].contains(&found),
            "round {round}: {found:?}"
        );
        stopped += u32::from(found == Some(code));
        assert_eq!(
            names(dir.path()),
            ["checkpoint", "hf"],
            "round {round}: {found:?}"
        );
        assert_eq!(names(&hf), result, "round {round}");
    }
    assert!(stopped > 0, "no signal came in the middle of a conversion");

    let mut left = 0;
    for round in 0..MOST_ROUNDS {
        if round >= ROUNDS && left > 0 {
            break;
        }
        let found = interrupted(&export, Signal::SIGKILL, whole * (round % ROUNDS) / ROUNDS);
        let there = names(&hf);
        assert!(
            result.iter().all(|name| there.contains(name)),
            "round {round}: {there:?}"
        );
        let all = names_without_blank(dir.path());
        let beside = all.len() - 2;
        assert!(beside <= 1, "round {round}, {found:?}: {all:?}");
        left += beside;
    }
    assert!(left > 0, "no kill came in the middle of a conversion");
    // Neither a user's folder with such a name nor the leftovers of another target are touched.
    let own = dir.path().join("hf.tmp-1-2");
    fs::create_dir(&own).unwrap();
    fs::write(own.join("thesis"), "years").unwrap();
    succeed(&export);
    assert_eq!(
        names_without_blank(dir.path()),
        ["checkpoint", "hf", "hf.tmp-1-2"]
    );
    assert_eq!(names(&hf), result);
    succeed(&["verify", text(&hf_fixture), text(&hf)]);
}
