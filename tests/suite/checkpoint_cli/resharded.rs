//! `reshard`.

use std::path::Path;

use megaburn::checkpoint::{Checkpoint, PieceInfo};
use megaburn_test_support::run::Run;
use rstest::rstest;

use super::{json, names, output, refused, train, trained};
use crate::{models::transformers::fixture, runs::child::Ranks};

/// The files of a checkpoint: their names, lengths of data, and pieces without hashes.
fn files(checkpoint: &Path) -> Vec<(String, Vec<PieceInfo>)> {
    let opened = Checkpoint::open(checkpoint).unwrap();
    let files = opened.manifest().files.iter().map(|file| {
        let pieces = file.pieces.iter().map(|piece| PieceInfo {
            chunks: Vec::new(),
            ..piece.clone()
        });
        (file.name.clone(), pieces.collect())
    });
    files.collect()
}

#[rstest]
#[case::pipeline("dp2", "tp2-pp2", 4)]
#[case::replicas("tp2-pp2", "tp2-dp2", 4)]
#[case::context("tp2", "cp2-dp2-tp2-sp", 8)]
#[case::one("tp2-dp2", "tp1", 1)]
fn the_files_are_those_that_a_run_of_the_layout_writes(
    #[case] from: &str,
    #[case] to: &str,
    #[case] num_files: usize,
) {
    let run = trained(from);
    let written = json(&run, &format!("reshard /run /out --layout {to}"), 0);
    assert_eq!(written[0]["path"], run.path("out").display().to_string());
    output(&run, "verify /out", 0);
    // Weights, optimizer and trainer's state are equal to the bit.
    output(&run, "diff /run /out", 0);
    let found = files(&run.path("out"));
    assert_eq!(found.len(), num_files);

    let of_layout = trained(to);
    let expected = files(&super::step(&of_layout, 6));
    assert_eq!(found, expected);
    let opened = Checkpoint::open(&run.path("out")).unwrap();
    let layout: megaburn::mesh::Layout = to.parse().unwrap();
    assert_eq!(opened.manifest().layout, layout.to_string());

    // The run continues from it.
    let newest = super::step(&run, 6);
    std::fs::remove_dir_all(&newest).unwrap();
    std::fs::rename(run.path("out"), &newest).unwrap();
    train(&run, to, 8);
}

#[test]
fn experts_and_small_files_are_kept_and_a_layout_that_cannot_be_is_refused() {
    let run = Run::new();
    let hf = fixture("deepseek-v3");
    let imported = run.path("imported").display().to_string();
    Ranks::command(&["convert", "import", hf.to_str().unwrap(), &imported]).finish();
    output(&run, "reshard /imported /out --layout tp2-ep2-pp2-sp", 0);
    output(&run, "diff /imported /out", 0);
    assert_eq!(names(&run.path("out/hf")), names(&run.path("imported/hf")));
    assert_eq!(files(&run.path("out")).len(), 4);
    let error = refused(&run, "reshard /imported /out --layout dp2");
    assert!(error.contains("replace it with --force"), "{error}");
    for (layout, why) in [("tp3", "3"), ("pp64", "64"), ("tp2-qq3", "qq3")] {
        let error = refused(&run, &format!("reshard /imported /other --layout {layout}"));
        assert!(error.contains(why), "{error}");
    }
    assert!(!run.path("other").exists());
    output(&run, "reshard /imported /out --layout dp2 --force", 0);
    assert_eq!(files(&run.path("out")).len(), 2);
}
