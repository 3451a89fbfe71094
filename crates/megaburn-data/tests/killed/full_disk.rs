//! Files that cannot grow, as on a disk that becomes full.

use std::{fs, path::Path};

use rstest::rstest;

use crate::{
    index, preprocess,
    process::{files, finish, limited},
    text,
};

#[rstest]
#[case::encode(preprocess::JOB, preprocess::write_inputs, "cannot write `")]
#[case::index(index::JOB, index::write_sets, "in the cache cannot be written")]
#[case::text(text::JOB, text::write_text, "in the cache cannot be written")]
fn a_full_disk_is_one_error_after_which_the_work_is_done(
    #[case] job: &str,
    #[case] write: fn(&Path, &mut fastrand::Rng),
    #[case] message: &str,
) {
    let seed = fastrand::u64(..);
    let mut draw = fastrand::Rng::with_seed(seed);
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &mut draw);
    let [whole, full] = ["whole", "full"].map(|name| dir.path().join(name));
    for folder in [&whole, &full] {
        fs::create_dir(folder).unwrap();
    }
    finish(job, &whole);
    for num_blocks in [0, draw.usize(1..300)] {
        let shown = limited(job, &full, num_blocks);
        let refusals: Vec<_> = shown
            .lines()
            .filter(|line| line.contains("refused"))
            .collect();
        assert_eq!(refusals.len(), 1, "{num_blocks}, seed {seed}: {shown}");
        assert!(refusals[0].contains(message), "seed {seed}: {shown}");
        assert!(
            refusals[0].contains("File too large"),
            "seed {seed}: {shown}"
        );
    }
    finish(job, &full);
    assert!(files(&full) == files(&whole), "seed {seed}");
}
