//! The commands of `docs/first-run.md`, in order, in a folder that looks like a clone with a release build.

use std::{fs, os::unix::fs::symlink, path::Path};

use super::Page;
use crate::{house::rules::root, runs::child::Ranks};

/// What the page does besides: it builds the program and waits for its reader. The rest runs as it stands.
fn script(page: &Page) -> String {
    let blocks = page.blocks();
    let blocks = blocks.iter().filter(|block| block.language == "sh");
    let lines = blocks.flat_map(|block| block.text.lines());
    let lines =
        lines.filter(|line| !line.starts_with("git clone ") && !line.starts_with("cargo build "));
    let lines = lines.map(|line| match line {
        "cd megaburn" => String::new(),
        // Ends when the page has answered.
        line if line.starts_with("megaburn watch ") => format!(
            "{line} --port 0 > watch.log & watcher=$!\n\
             for _ in $(seq 100); do grep -q http watch.log && break; sleep 0.1; done\n\
             kill $watcher; grep http watch.log"
        ),
        line => line.to_string(),
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// A folder with what the commands expect of a clone.
fn clone_at(folder: &Path) {
    fs::create_dir_all(folder.join("target/release")).unwrap();
    let program = env!("CARGO_BIN_EXE_megaburn-under-test");
    symlink(program, folder.join("target/release/megaburn")).unwrap();
    for name in ["docs", "configs"] {
        symlink(root().join(name), folder.join(name)).unwrap();
    }
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
        assert!(
            script.contains(&format!("megaburn {part}")),
            "no {part}in:\n{script}"
        );
    }
    let clone = tempfile::tempdir().unwrap();
    clone_at(clone.path());
    let ended = Ranks::shell(&script, clone.path()).finish().remove(0);
    let said = |text: &str| ended.stdout.contains(text) || ended.stderr.contains(text);
    assert!(said("http://127.0.0.1:"), "{ended:#?}");
    assert!(said("resumed  after step 40"), "{ended:#?}");
    let at = |name: &str| clone.path().join(name);
    for name in [
        "runs/first/loss.svg",
        "runs/first/checkpoints/step-00000060/manifest.json",
        "first-hf/model.safetensors",
        "first-hf/config.json",
    ] {
        assert!(at(name).exists(), "{name}: {ended:#?}");
    }
}
