//! Two groups with the same module that write the same file at once.

use std::fs;

use megaburn_records::{Layout, RecordFile, RecordsError};
use rstest::rstest;

use super::{
    SIZES,
    modules::{Parallel, Plain},
    ranks, save_plain,
};

#[rstest]
#[case::burnpack("bpk")]
#[case::safetensors("safetensors")]
fn groups_that_write_one_file_leave_one_of_their_files(#[case] extension: &str) {
    let folder = tempfile::tempdir().unwrap();
    let given = folder.path().join(format!("given.{extension}"));
    let written = folder.path().join(format!("written.{extension}"));
    save_plain(&Plain::new(SIZES[1]), &given, Layout::Burn);
    let expected = folder.path().join(format!("expected.{extension}"));
    let found = ranks(4, |world| {
        let first = world.rank() / 2 * 2;
        let tp = world.subgroup("tp", &[first, first + 1])?;
        let module = RecordFile::new(&given).load(Parallel::new(SIZES[1], &tp)?)?;
        if first == 0 {
            RecordFile::new(&expected).save(&module, &tp)?;
        }
        for _ in 0..5 {
            let file = RecordFile::new(&written).with_overwrite(true);
            file.save(&module, &tp)?;
        }
        Ok::<_, RecordsError>(())
    });
    found.into_iter().for_each(|rank| rank.unwrap());
    assert_eq!(fs::read(&written).unwrap(), fs::read(&expected).unwrap());
    // Nothing else is left.
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
}
