//! The page for those who come from Megatron-LM: its flags exist there, and each of its groups has a
//! row.

use std::{collections::BTreeSet, fs};

use super::{Page, pages};
use crate::house::rules::root;

const PAGE: &str = "docs/from-megatron-lm.md";

/// The flags of Megatron-LM's `arguments.py`, and its groups of arguments, as
/// `tests/tools/megatron_flags.py` wrote them.
fn flags() -> (BTreeSet<String>, Vec<String>) {
    let text = fs::read_to_string(root().join("tests/fixtures/megatron-flags.txt")).unwrap();
    let mut flags = BTreeSet::new();
    let mut groups = Vec::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        match line.strip_prefix('[') {
            Some(group) => groups.push(group.trim_end_matches(']').to_string()),
            None => flags.extend(line.split_whitespace().map(str::to_string)),
        }
    }
    assert!(flags.len() > 700 && groups.len() > 30);
    (flags, groups)
}

/// The flags in the backticks of a page.
fn named(page: &Page) -> BTreeSet<String> {
    let code = page.inline_code();
    let words = code.iter().flat_map(|code| code.split(' '));
    let flags = words.filter(|word| word.starts_with("--") && word.len() > 2);
    flags.map(str::to_string).collect()
}

#[test]
fn the_page_names_flags_that_megatron_has() {
    let (flags, _) = flags();
    let page = Page::read(PAGE);
    let mut named = named(&page);
    // Ours, which the page also names.
    for ours in [
        "--config",
        "--set",
        "--layout",
        "--resume",
        "--init",
        "--profile",
        "--dry-run",
    ] {
        named.remove(ours);
    }
    let is_unknown = |flag: &&String| {
        // `--moe-*` stands for all that begin like it.
        let begin = flag.strip_suffix('*');
        let starts = |begin: &str| flags.iter().any(|flag| flag.starts_with(begin));
        !flags.contains(*flag) && !begin.is_some_and(starts)
    };
    let unknown: Vec<&String> = named.iter().filter(is_unknown).collect();
    assert!(unknown.is_empty(), "Megatron-LM has no {unknown:?}");
    assert!(named.len() > 150, "only {} flags", named.len());
}

#[test]
fn every_group_of_arguments_is_on_the_page() {
    let page = Page::read(PAGE);
    let (_, table) = page
        .text
        .split_once("| group | without counterpart |")
        .unwrap();
    let first_cells = table.lines().filter_map(|line| line.split('|').nth(1));
    let named: BTreeSet<&str> = first_cells
        .flat_map(|cell| cell.trim().split(", "))
        .collect();
    for group in flags().1 {
        assert!(
            named.contains(group.as_str()),
            "{PAGE} has no row for `{group}`"
        );
    }
}

#[test]
fn the_pages_name_keys_for_most_flags_of_a_decoder() {
    let known: BTreeSet<String> = pages().iter().flat_map(named).collect();
    for flag in [
        "--tensor-model-parallel-size",
        "--num-layers",
        "--micro-batch-size",
        "--global-batch-size",
        "--lr",
        "--save",
        "--load",
        "--data-path",
        "--tokenizer-type",
        "--bf16",
        "--use-distributed-optimizer",
        "--recompute-granularity",
        "--num-experts",
        "--fp8-format",
    ] {
        assert!(known.contains(flag), "no page says what {flag} is here");
    }
}
