//! The pictures of the book: schedules are what the program draws, and no file is left over.

use std::{fs, process::Command};

use rstest::rstest;

use super::{Page, pages};
use crate::house::rules::root;

/// What `megaburn plan` says about a schedule of four stages and eight micro-batches.
fn plan(schedule: &str, more: &[&str]) -> String {
    let ended = Command::new(env!("CARGO_BIN_EXE_megaburn-under-test"))
        .args([
            "plan",
            "--schedule",
            schedule,
            "--pp",
            "4",
            "--micro-batches",
            "8",
        ])
        .args(more)
        .output()
        .unwrap();
    assert!(ended.status.success(), "{ended:?}");
    String::from_utf8(ended.stdout).unwrap()
}

#[rstest]
#[case("1f1b")]
#[case("zb-v")]
fn pictures_of_schedules_are_what_the_program_draws(#[case] schedule: &str) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("drawn.svg");
    plan(schedule, &["--svg", path.to_str().unwrap()]);
    let kept = root().join(format!("docs/pictures/{schedule}.svg"));
    assert!(
        fs::read(&path).unwrap() == fs::read(&kept).unwrap(),
        "docs/pictures/{schedule}.svg is out of date; run `megaburn plan --schedule {schedule} --pp 4 \
         --micro-batches 8 --svg docs/pictures/{schedule}.svg`"
    );
}

#[rstest]
#[case("gpipe", 1)]
#[case("1f1b", 1)]
#[case("interleaved", 2)]
#[case("zb-h1", 1)]
#[case("zb-v", 2)]
fn the_table_of_schedules_is_what_the_program_says(#[case] schedule: &str, #[case] chunks: u32) {
    let said = plan(schedule, &[]);
    let between = |before: &str, after: &str| {
        let (_, rest) = said.split_once(before).unwrap();
        rest.split_once(after).unwrap().0.to_string()
    };
    let idle = between(" idle (", ")");
    let peak: f64 = between("peak     [", ",").parse().unwrap();
    let kept = peak / f64::from(chunks);
    let page = Page::read("docs/layouts.md");
    let begin = format!("| `{schedule}`");
    let row = page.text.lines().find(|line| line.starts_with(&begin));
    let row: Vec<&str> = row.unwrap().split('|').map(str::trim).collect();
    assert_eq!(row[2], idle, "{row:?}");
    assert_eq!(
        row[3].split(',').next().unwrap(),
        kept.to_string(),
        "{row:?}"
    );
}

#[test]
fn every_picture_is_on_a_page() {
    let links: Vec<String> = pages().iter().flat_map(Page::links).collect();
    for entry in fs::read_dir(root().join("docs/pictures")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let link = format!("pictures/{name}");
        assert!(links.contains(&link), "no page shows docs/pictures/{name}");
        let text = fs::read_to_string(root().join("docs").join(&link)).unwrap();
        // A background of its own, so that it can be read on a dark page too.
        assert!(
            text.contains("height=\"100%\"") && text.contains("fill=\"#ffffff\""),
            "{name}"
        );
    }
}
