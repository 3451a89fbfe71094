//! The commands of `docs/first-run.md` and of other pages for beginners, in order, in a folder that
//! looks like a clone with a release build.

use std::{fs, os::unix::fs::symlink, path::Path};

use rstest::rstest;

use super::Page;
use crate::{house::rules::root, runs::child::Ranks};

/// The commands of a page. Those that download, build and wait for a reader are left out or end.
fn script(page: &Page) -> String {
    let blocks = page.blocks();
    let blocks = blocks.iter().filter(|block| block.language == "sh");
    let is_here = |line: &&str| {
        let before = ["git clone ", "cd megaburn", "cargo build "];
        !before.iter().any(|begin| line.starts_with(begin))
    };
    let lines = blocks
        .flat_map(|block| block.text.lines())
        .filter(is_here)
        .map(|line| match line {
            // Ends when the page has its address.
            line if line.starts_with("megaburn watch ") => format!(
                "{line} --port 0 > watch.log & watcher=$!\n\
                 for _ in $(seq 100); do grep -q http watch.log && break; sleep 0.1; done\n\
                 kill $watcher; grep http watch.log"
            ),
            line => line.to_string(),
        });
    lines.collect::<Vec<_>>().join("\n")
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
    let script = script(&Page::read("docs/first-run.md"));
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
        assert!(script.contains(&command), "no {command}in:\n{script}");
    }
    let clone = tempfile::tempdir().unwrap();
    clone_at(clone.path());
    let ended = Ranks::shell(&script, clone.path()).finish().remove(0);
    let said = |text: &str| ended.stdout.contains(text) || ended.stderr.contains(text);
    for line in [
        "resumed  after step 20",
        "resumed  after step 30",
        "http://127.0.0.1:",
        "38 tensors, 38 bitwise equal",
        "the run can start",
    ] {
        assert!(said(line), "`{line}` was not printed: {ended:#?}");
    }
    for name in [
        "runs/first/loss.svg",
        "runs/first/checkpoints/step-00000040/manifest.json",
        "first-hf/model.safetensors",
        "first-hf/config.json",
    ] {
        assert!(clone.path().join(name).exists(), "{name}: {ended:#?}");
    }
}

#[rstest]
#[case("docs/layouts.md", "1f1b.svg")]
#[case("docs/memory.md", "corpus")]
#[case("docs/performance.md", "corpus")]
#[case("docs/your-data.md", "runs/web/loss.svg")]
#[case("docs/your-model.md", "tuned-hf/model.safetensors")]
fn the_commands_run_in_a_clone(#[case] page: &str, #[case] made: &str) {
    let script = script(&Page::read(page));
    assert!(script.contains("megaburn "), "{script}");
    let clone = tempfile::tempdir().unwrap();
    clone_at(clone.path());
    let script = format!("PATH=\"$PWD/target/release:$PATH\"\n{script}");
    Ranks::shell(&script, clone.path()).finish();
    assert!(clone.path().join(made).exists(), "{page} made no {made}");
}
