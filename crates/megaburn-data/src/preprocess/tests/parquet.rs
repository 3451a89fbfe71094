//! Tables that pyarrow wrote (`tests/tools/parquet.py`).

use std::fs;

use rstest::rstest;

use super::*;

fn fixture(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/parquet");
    path.join(name)
}

fn folder_with<'n>(names: &[&'n str]) -> TempDir {
    let read = |name: &&'n str| (*name, fs::read(fixture(name)).unwrap());
    folder(&names.iter().map(read).collect::<Vec<_>>())
}

#[rstest]
fn a_table_gives_the_documents_of_its_rows(
    #[values("snappy.parquet", "gzip.parquet", "plain.parquet")] name: &str,
    #[values(&["text"], &["meta.title", "text"])] keys: &[&str],
) {
    let dir = folder_with(&[name, "rows.jsonl"]);
    let keys: Vec<String> = keys.iter().map(|key| key.to_string()).collect();
    let mut written = Vec::new();
    for input in [name, "rows.jsonl"] {
        let config = config(dir.path(), &[input]).with_json_keys(keys.clone());
        assert_eq!(run(&config).unwrap().counts.documents, 100);
        let is_data = |(name, _): &(String, Vec<u8>)| !name.ends_with(".megaburn");
        written.push(
            files(dir.path())
                .into_iter()
                .filter(is_data)
                .collect::<Vec<_>>(),
        );
        clear(dir.path());
    }
    assert_eq!(written[0].len(), 2 * keys.len());
    assert!(written[0] == written[1]);
}

#[test]
fn work_on_tables_that_is_interrupted_continues_to_the_same_bytes() {
    let names = ["snappy.parquet", "plain.parquet"];
    let dir = folder_with(&names);
    let config = config(dir.path(), &names);
    run(&config).unwrap();
    let expected = files(dir.path());
    clear(dir.path());
    for _ in 0..30 {
        fuse::allow(dir.path(), fastrand::u64(0..150));
        let found = run(&config);
        fuse::remove(dir.path());
        if found.is_err() {
            run(&config).unwrap();
        }
        let _ = fs::remove_dir(dir.path().join("out.megaburn-part"));
        assert!(files(dir.path()) == expected);
        clear(dir.path());
    }
}

#[rstest]
#[case("zstd.parquet", "text", "the column `text` is compressed with ZSTD")]
#[case(
    "snappy.parquet",
    "body",
    "no column `body`, only [id, text, meta.title, "
)]
#[case(
    "snappy.parquet",
    "id",
    "the column `id` is of type INT64, not of strings"
)]
#[case("snappy.parquet", "meta", "no column `meta`")]
#[case("snappy.parquet", "parts.list.element", "has lists, not strings")]
#[case("nulls.parquet", "text", "row 2: column `text` is null, not a string")]
#[case(
    "nulls.parquet",
    "meta.title",
    "row 1: column `meta.title` is null, not a string"
)]
fn what_is_no_text_is_named(#[case] name: &str, #[case] field: &str, #[case] message: &str) {
    let dir = folder_with(&[name]);
    let refusal = run(&config(dir.path(), &[name]).with_field(field)).unwrap_err();
    assert!(refusal.contains(message), "{refusal}");
    assert_eq!(names(dir.path()), [name]);
}

#[test]
fn nulls_are_skipped_and_counted_if_they_are_to_be() {
    let dir = folder_with(&["nulls.parquet"]);
    let config = config(dir.path(), &["nulls.parquet"]).with_skip_bad(true);
    let counts = run(&config).unwrap().counts;
    assert_eq!((counts.documents, counts.skipped), (2, 1));
    assert_eq!(documents(dir.path().join("out")), ["a$", "c$"]);
}

#[test]
fn a_damaged_table_is_an_error() {
    let whole = fs::read(fixture("snappy.parquet")).unwrap();
    let seed = fastrand::u64(..);
    let mut draw = fastrand::Rng::with_seed(seed);
    for case in 0..60 {
        let mut bytes = whole.clone();
        if case < 10 {
            bytes.truncate(draw.usize(..whole.len()));
        } else {
            let at = draw.usize(..whole.len());
            bytes[at] ^= 1 << draw.u32(0..8);
        }
        let dir = folder(&[("a.parquet", bytes)]);
        // A bit of the text may have changed: then there are other documents.
        if let Err(refusal) = run(&config(dir.path(), &["a.parquet"])) {
            assert!(refusal.contains("a.parquet`"), "seed {seed}: {refusal}");
        } else {
            assert!(case >= 10, "seed {seed}");
        }
    }
}
