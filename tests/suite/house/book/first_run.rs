//! The commands of `docs/first-run.md` and of other pages for beginners, in order, in a folder that
//! looks like a clone with a release build.

use std::{fs, os::unix::fs::symlink, path::Path};

use rstest::rstest;

use super::Page;
use crate::{house::rules::root, runs::child::Ranks};

/// The commands of a page. Those that download and build are left out.
fn commands(page: &Page) -> Vec<String> {
    let is_here = |line: &&str| {
        let before = ["git clone ", "cd megaburn", "cargo build "];
        !before.iter().any(|begin| line.starts_with(begin))
    };
    let mut commands = Vec::new();
    for block in page.blocks() {
        if block.language == "sh" {
            let text = block.text.replace("\\\n", " ");
            commands.extend(text.lines().filter(is_here).map(str::to_string));
        }
    }
    assert!(commands.iter().any(|line| line.starts_with("megaburn ")));
    commands
}

/// Runs commands one after the other, and returns all that they printed.
fn run(commands: &[String], folder: &Path) -> String {
    let mut printed = String::new();
    for line in commands {
        let line = match line.starts_with("megaburn watch ") {
            // Ends when the page has its address.
            true => format!(
                "{line} --port 0 > watch.log & watcher=$!\n\
                 for _ in $(seq 100); do grep -q http watch.log && break; sleep 0.1; done\n\
                 kill $watcher; grep http watch.log"
            ),
            false => line.clone(),
        };
        let line = format!("export PATH=\"$PWD/target/release:$PATH\"\n{line}");
        let ended = Ranks::shell(&line, folder).finish().remove(0);
        printed.push_str(&ended.stdout);
        printed.push_str(&ended.stderr);
    }
    printed
}

/// A folder with what the commands expect of a clone, and with texts.
fn clone_at(folder: &Path) {
    fs::create_dir_all(folder.join("target/release")).unwrap();
    let program = env!("CARGO_BIN_EXE_megaburn-under-test");
    symlink(program, folder.join("target/release/megaburn")).unwrap();
    for name in ["docs", "configs", "tests"] {
        symlink(root().join(name), folder.join(name)).unwrap();
    }
    let line = "The river runs to the sea. In the evening they sat, and the sea was silent. ";
    fs::write(folder.join("corpus.txt"), line.repeat(400)).unwrap();
    fs::create_dir(folder.join("corpus")).unwrap();
    let records = format!("{{\"text\": \"{line}\"}}\n").repeat(100);
    fs::write(folder.join("corpus/a.jsonl"), records).unwrap();
}

#[test]
fn the_first_run_runs_as_it_stands() {
    let commands = commands(&Page::read("docs/first-run.md"));
    for part in [
        "train --data ",
        "train --resume ",
        "generate ",
        "info ",
        "watch ",
        "convert export ",
        "verify ",
    ] {
        let command = format!("megaburn {part}");
        let is_there = commands.iter().any(|line| line.starts_with(&command));
        assert!(is_there, "no {command}in {commands:#?}");
    }
    let clone = tempfile::tempdir().unwrap();
    clone_at(clone.path());
    let printed = run(&commands, clone.path());
    for line in [
        "resumed  after step 20",
        "resumed  after step 30",
        "http://127.0.0.1:",
        "38 tensors, 38 bitwise equal",
        "the run can start",
    ] {
        assert!(printed.contains(line), "no `{line}` in:\n{printed}");
    }
    for name in [
        "runs/first/loss.svg",
        "runs/first/checkpoints/step-00000040/manifest.json",
        "first-hf/model.safetensors",
        "first-hf/config.json",
    ] {
        let is_there = clone.path().join(name).exists();
        assert!(is_there, "no {name} after:\n{printed}");
    }
}

#[rstest]
#[case("docs/layouts.md", "1f1b.svg")]
#[case("docs/memory.md", "corpus")]
#[case("docs/performance.md", "corpus")]
#[case("docs/your-data.md", "runs/web/loss.svg")]
#[case("docs/your-model.md", "tuned-hf/model.safetensors")]
fn the_commands_run_in_a_clone(#[case] page: &str, #[case] made: &str) {
    let clone = tempfile::tempdir().unwrap();
    clone_at(clone.path());
    run(&commands(&Page::read(page)), clone.path());
    assert!(clone.path().join(made).exists(), "{page} made no {made}");
}
