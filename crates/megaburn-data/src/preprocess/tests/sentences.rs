//! Texts that are divided into sentences.

use super::*;

fn split(dir: &TempDir, inputs: &[&str]) -> PreprocessConfig {
    config(dir.path(), inputs).with_split_sentences(true)
}

#[test]
fn sentences_become_sequences() {
    let lines = "{\"text\": \"One. Two? \\n\\n Three\"}\n{\"text\": [\"A b. C\", \"\", \" D \"]}\n\
                 {\"text\": \" \"}\n";
    let dir = folder(&[
        ("a.jsonl", lines.into()),
        ("b.txt", b"Last.  Text.\n".into()),
    ]);
    run(&split(&dir, &["a.jsonl", "b.txt"])).unwrap();
    let found = documents(dir.path().join("out"));
    assert_eq!(found, ["One.|Two?|Three$", "A b.|C|D$", "", "Last.|Text.$"]);
    let set = IndexedDataset::open(dir.path().join("out")).unwrap();
    let description = set.description().unwrap();
    assert_eq!(description["split_sentences"], true);
    assert_eq!(description["plain_text"], true);
    // The bytes of the texts, with the whitespace that is left out.
    let bytes = "One. Two? \n\n Three".len() + "A b. C D ".len() + 1 + "Last.  Text.\n".len();
    assert_eq!(description["text_bytes"], bytes);
}

#[test]
fn a_long_text_is_divided_as_a_short_one() {
    let sentence = |n: usize| format!("{}.", "Ab".repeat(n % 40 + 1));
    let sentences: Vec<String> = (0..400).map(sentence).collect();
    let dir = folder(&[("a.txt", sentences.join(" ").into_bytes())]);
    // A batch has 400 bytes of text, and this one about 16,000.
    run(&split(&dir, &["a.txt"]).with_append_eod(false)).unwrap();
    let found = documents(dir.path().join("out"));
    assert_eq!(found, [sentences.join("|")]);
}

#[test]
fn unfinished_work_without_sentences_is_not_continued() {
    let draw = &mut fastrand::Rng::new();
    let dir = folder(&[("a.jsonl", lines(draw, 90).into_bytes())]);
    fuse::allow(dir.path(), 30);
    run(&config(dir.path(), &["a.jsonl"])).unwrap_err();
    fuse::remove(dir.path());
    let error = run(&split(&dir, &["a.jsonl"])).unwrap_err();
    assert!(
        error.contains("has unfinished work that differs"),
        "{error}"
    );
    run(&split(&dir, &["a.jsonl"]).with_force(true)).unwrap();
}
