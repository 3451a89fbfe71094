//! The commands of `docs/data.md`.

use std::{fs, os::unix::fs::symlink, path::Path};

use super::files;
use crate::{house::docs::blocks, runs::child::Ranks};

#[test]
fn the_commands_of_the_page_run_as_they_stand() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/data.md");
    let page = fs::read_to_string(page).unwrap();
    let of_data = |block: &String| block.contains("megaburn data ");
    let commands: String = blocks(&page, "sh").into_iter().filter(of_data).collect();
    for command in ["preprocess", "inspect", "stats", "merge", "split"] {
        assert!(
            commands.contains(&format!("megaburn data {command} ")),
            "{command}"
        );
    }

    let clone = tempfile::tempdir().unwrap();
    let at = |name: &str| clone.path().join(name);
    fs::create_dir_all(at("target/release")).unwrap();
    symlink(
        env!("CARGO_BIN_EXE_megaburn-under-test"),
        at("target/release/megaburn"),
    )
    .unwrap();
    fs::create_dir(at("corpus")).unwrap();
    let line = "{\"text\": \"The river goes where it goes.\", \"meta\": {\"title\": \"River\"}}\n";
    fs::write(at("corpus/a.jsonl"), line.repeat(20)).unwrap();
    Ranks::shell(
        "gzip -k corpus/a.jsonl && mv corpus/a.jsonl.gz corpus/b.jsonl.gz",
        clone.path(),
    )
    .finish();
    Ranks::shell(&commands, clone.path()).finish();
    for name in [
        "web.svg",
        "both_meta.title_document.idx",
        "all.bin",
        "parts_test.idx",
    ] {
        assert!(at(name).exists(), "{name}");
    }
    let unfinished = |(name, _): &(String, Vec<u8>)| name.ends_with("-part");
    assert!(!files(clone.path(), "web").iter().any(unfinished));
}
