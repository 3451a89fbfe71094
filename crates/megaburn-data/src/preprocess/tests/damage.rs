//! Files that are taken away, damaged, or of another program.

use super::*;

#[test]
fn a_data_set_that_is_taken_away_is_made_again() {
    let dir = folder(&[("a.jsonl", b"{\"text\": \"x\"}".into())]);
    let config = config(dir.path(), &["a.jsonl"]);
    let mut taken = 0;
    for operations in 0.. {
        fuse::allow(dir.path(), operations);
        let found = run(&config);
        fuse::remove(dir.path());
        let left = names(dir.path()).into_iter();
        let renamed: Vec<_> = left
            .filter(|name| name.starts_with("out.") && !name.ends_with("-part"))
            .collect();
        let is_left = dir.path().join("out.megaburn-part/journal").exists();
        taken += u32::from(is_left && !renamed.is_empty());
        if is_left || found.is_err() {
            for name in renamed {
                fs::remove_file(dir.path().join(name)).unwrap();
            }
            run(&config).unwrap();
        }
        assert_eq!(documents(dir.path().join("out")), ["x$"], "{operations}");
        let is_whole = found.is_ok() && !dir.path().join("out.megaburn-part").exists() && !is_left;
        let _ = fs::remove_dir(dir.path().join("out.megaburn-part"));
        for name in ["out.bin", "out.idx", "out.megaburn"] {
            fs::remove_file(dir.path().join(name)).unwrap();
        }
        if is_whole {
            break;
        }
        assert!(operations < 200);
    }
    assert!(taken > 2, "only {taken} were taken away");
}

#[test]
fn tokens_of_another_program_are_not_overwritten() {
    let dir = folder(&[("a.jsonl", b"{\"text\": \"x\"}".into())]);
    let config = config(dir.path(), &["a.jsonl"]).with_force(true);
    run(&config).unwrap();
    let path = |ending: &str| dir.path().join(format!("out.{ending}"));
    let bin = fs::read(path("bin")).unwrap();
    // Of the same size, and with an equal index.
    let other = vec![7; bin.len()];
    fs::write(path("bin"), &other).unwrap();
    let refusal = run(&config).unwrap_err();
    assert!(refusal.contains("out.bin` is not overwritten"), "{refusal}");
    // As another writer looks before it ends.
    fs::remove_file(path("idx")).unwrap();
    let refusal = run(&config).unwrap_err();
    assert!(refusal.contains("out.bin` is not overwritten"), "{refusal}");
    assert_eq!(fs::read(path("bin")).unwrap(), other);
    // What megaburn left when it was killed is its own.
    fs::write(path("bin"), bin).unwrap();
    run(&config).unwrap();
}

#[test]
fn damaged_unfinished_work_can_be_dropped() {
    let text = lines(&mut fastrand::Rng::new(), 200) + "bad\n";
    let dir = folder(&[("a.jsonl", text.into_bytes())]);
    let config = config(dir.path(), &["a.jsonl"]).with_skip_bad(false);
    run(&config).unwrap_err();
    fs::write(dir.path().join("out.megaburn-part/0.bin"), "").unwrap();
    let refusal = run(&config).unwrap_err();
    assert!(
        refusal.contains("0.bin` is damaged: it is shorter") && refusal.contains("with --force"),
        "{refusal}"
    );
    let forced = config.with_skip_bad(true).with_force(true);
    assert_eq!(run(&forced).unwrap().counts.documents, 200);
}

#[test]
fn a_data_set_is_not_replaced_by_nothing() {
    let dir = folder(&[("a.jsonl", b"{\"text\": \"x\"}\n3\n".into())]);
    let config = config(dir.path(), &["a.jsonl"]);
    run(&config.clone().with_skip_bad(true)).unwrap();
    let before = files(dir.path());
    let other = config
        .with_field("body")
        .with_skip_bad(true)
        .with_force(true);
    let refusal = run(&other).unwrap_err();
    assert!(
        refusal.contains("all 2 records were skipped") && refusal.contains("line 2: a number"),
        "{refusal}"
    );
    assert_eq!(files(dir.path()), before);
}

#[test]
fn a_damaged_element_of_an_array_is_skipped_and_a_cut_file_is_named() {
    let array =
        b"[{\"text\": \"a\"}, {\"text\": \"\xFF\"}, {\"text\": \"\\ud800\"}, {\"text\": \"b\"}]";
    let dir = folder(&[("a.json", array.into())]);
    let skipping = config(dir.path(), &["a.json"]).with_skip_bad(true);
    assert_eq!(run(&skipping).unwrap().counts.skipped, 2);
    assert_eq!(documents(dir.path().join("out")), ["a$", "b$"]);

    let mut draw = fastrand::Rng::new();
    let array = format!("[{}]", lines(&mut draw, 300).trim_end().replace('\n', ","));
    let packed = gzip(&array);
    let dir = folder(&[("a.json.gz", packed[..packed.len() / 2].into())]);
    let refusal = run(&config(dir.path(), &["a.json.gz"])).unwrap_err();
    assert!(refusal.contains("a.json.gz` cannot be read"), "{refusal}");
}

#[rstest]
#[case("x.bin", "leave the ending out")]
#[case("x.idx", "leave the ending out")]
#[case("", "it is a folder; add a name")]
#[case("no/x", "no`; create it")]
fn a_prefix_that_gives_no_file_names_is_refused(#[case] out: &str, #[case] message: &str) {
    let dir = folder(&[("a.jsonl", b"{\"text\": \"x\"}".into())]);
    let config = PreprocessConfig::new(vec![dir.path().join("a.jsonl")], dir.path().join(out));
    let refusal = run(&config).unwrap_err();
    assert!(refusal.contains(message), "{refusal}");
    assert_eq!(names(dir.path()), ["a.jsonl"]);
}
