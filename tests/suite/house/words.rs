//! Comments and pages use the field's words: `docs/glossary.md` has them.

use std::{collections::BTreeMap, fs};

use super::rules::{root, visit};

/// Words that the texts of this project do without. The field says "range", "slice" or "chunk"; names the
/// rank, process or caller; counts "n" or "this number of"; puts things "next to" each other or runs them
/// "concurrently"; "recomputes", "reports", "shards", "distributes" and "continues".
const WORDS: [&str; 19] = [
    "stretch",
    "stretches",
    "nobody",
    "somebody",
    "everybody",
    "so many",
    "so much",
    "beside",
    "once more",
    "shall",
    "told",
    "shared out",
    "share out",
    "shares out",
    "dealt out",
    "deals out",
    "goes on",
    "in vain",
    "one's own",
];

/// The number of such words that a file may still have. This list may only shrink.
const ALLOWED: [(&str, usize); 0] = [];

/// The text of a line that people read: all of a page, and the comment of a line of code.
fn prose(line: &str, is_page: bool) -> &str {
    if line.trim_start().starts_with("//") || is_page {
        return line;
    }
    line.split_once(" // ").map_or("", |(_, comment)| comment)
}

fn count(text: &str) -> usize {
    let text = text.to_lowercase();
    let is_letter = |c: char| c.is_alphanumeric() || c == '_';
    let found = |word: &str| {
        text.match_indices(word)
            .filter(|(at, word)| {
                let before = text[..*at].ends_with(is_letter);
                !before && !text[at + word.len()..].starts_with(is_letter)
            })
            .count()
    };
    WORDS.into_iter().map(found).sum()
}

#[test]
fn texts_use_the_words_of_the_field() {
    let allowed = BTreeMap::from(ALLOWED);
    let mut found = BTreeMap::new();
    let mut look = |path: &std::path::Path| {
        let is_page = path.extension().is_some_and(|extension| extension == "md");
        let name = path.strip_prefix(root()).unwrap().display().to_string();
        let text = fs::read_to_string(path).unwrap();
        let words = text.lines().map(|line| count(prose(line, is_page))).sum();
        if words > 0 && name != "tests/suite/house/words.rs" {
            found.insert(name, words);
        }
    };
    for folder in ["crates", "cubecl-kernels", "examples", "tests", "benches"] {
        visit(&root().join(folder), &mut look);
    }
    for page in [
        "README.md",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "tools/cuda-emulator/README.md",
    ] {
        look(&root().join(page));
    }
    for folder in ["docs", "benches/results", "benches/results/archive"] {
        for page in fs::read_dir(root().join(folder)).unwrap() {
            let path = page.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "md") {
                look(&path);
            }
        }
    }
    let limit = |name: &str| allowed.get(name).copied().unwrap_or(0);
    let more: Vec<_> = found
        .iter()
        .filter(|(name, words)| **words > limit(name))
        .collect();
    assert!(more.is_empty(), "say it in the field's words: {more:#?}");
    let fewer: Vec<_> = allowed
        .iter()
        .filter(|(name, words)| found.get(**name).copied().unwrap_or(0) < **words)
        .collect();
    assert!(fewer.is_empty(), "lower what `ALLOWED` allows: {fewer:#?}");
}

#[test]
fn whole_words_of_prose_count() {
    assert_eq!(count("A stretch beside, stretched; besides"), 2);
    assert_eq!(count("So many go on, and one goes on"), 2);
    assert_eq!(prose("    let beside = 1; // after", false), "after");
    assert_eq!(prose("    let beside = 1;", false), "");
    assert_eq!(prose("    // beside", false), "    // beside");
}
