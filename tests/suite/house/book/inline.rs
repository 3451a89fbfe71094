//! Commands and keys that the text of a page names in backticks exist.

use clap::Command;
use megaburn::cli;
use rstest::rstest;

use super::{
    pages,
    settings::{is_known, sections},
    shell::is_program,
};

/// Names that look like keys and are something else: files, parameters, keys of `metrics.jsonl`.
fn is_no_key(name: &str) -> bool {
    let files = [".json", ".jsonl", ".pt", ".rs", ".safetensors", ".toml"];
    let parameters = [
        "model.layers.",
        "model.embed_tokens.",
        "model.norm.",
        "optimizer.optimizer.",
    ];
    let metrics = ["precision.layers", "precision.fallbacks"];
    files.iter().any(|ending| name.ends_with(ending))
        || parameters.iter().any(|begin| name.starts_with(begin))
        || metrics.contains(&name)
}

/// What is wrong with a text in backticks, if anything.
fn wrong(code: &str) -> Option<String> {
    let words: Vec<&str> = code.split(' ').collect();
    if is_program(words[0]) && words[0] != "cargo" && words.len() > 1 && words[1] != "=" {
        return wrong_command(cli::command(), &words[1..]);
    }
    if words[0] == "--set" {
        let text = words[1..].join(" ").replace(['\'', '"'], "");
        return wrong_key(text.split('=').next().unwrap());
    }
    wrong_key(code.split([' ', '=']).next().unwrap())
}

/// A dotted name whose first part is a section must be a key.
fn wrong_key(name: &str) -> Option<String> {
    let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || ".-_".contains(c);
    let (section, rest) = name.split_once('.')?;
    let is_key = sections().contains(&section.to_string())
        && name.chars().all(is_name)
        && rest.starts_with(|c: char| c.is_ascii_lowercase())
        && !is_no_key(name);
    (is_key && !is_known(name)).then(|| format!("there is no key `{name}`"))
}

/// The subcommands that begin a command must exist, and the flags behind them. Arguments may be
/// missing.
fn wrong_command(mut command: Command, words: &[&str]) -> Option<String> {
    command.build();
    let mut words = words.iter();
    while command.has_subcommands() {
        let word = words.next()?;
        if word.starts_with(['-', '.']) {
            return None;
        }
        let word = word.trim_end_matches(',');
        let Some(below) = command.find_subcommand(word) else {
            return Some(format!("`{}` has no command `{word}`", command.get_name()));
        };
        command = below.clone();
    }
    for word in words.take_while(|word| **word != "--" && **word != "|") {
        let flag = word.split('=').next().unwrap().strip_prefix("--");
        let Some(flag) = flag else { continue };
        let is_flag = |arg: &clap::Arg| arg.get_long() == Some(flag);
        if !command.get_arguments().any(is_flag) {
            return Some(format!("`{}` has no flag `--{flag}`", command.get_name()));
        }
    }
    None
}

#[test]
fn commands_and_keys_in_the_text_exist() {
    let mut looked_at = 0;
    let mut found = Vec::new();
    for page in pages() {
        for code in page.inline_code() {
            looked_at += 1;
            if let Some(why) = wrong(&code) {
                found.push(format!("{}: `{code}`: {why}", page.name));
            }
        }
    }
    assert!(found.is_empty(), "{found:#?}");
    assert!(looked_at > 2000, "only {looked_at}");
}

#[rstest]
#[case("parallel.zeros = 1", "there is no key `parallel.zeros`")]
#[case("--set train.stesp=3", "there is no key `train.stesp`")]
#[case("megaburn trian", "`megaburn` has no command `trian`")]
#[case("megaburn checkpoint list", "has no command `list`")]
#[case("megaburn train --steppes 3", "has no flag `--steppes`")]
fn what_does_not_exist_is_found(#[case] code: &str, #[case] message: &str) {
    let error = wrong(code).expect("it was accepted");
    assert!(error.contains(message), "{error}");
}

#[rstest]
#[case("megaburn launch --nproc 4 -- prog --own-flag")]
#[case("megaburn checkpoint ls")]
#[case("model.layers.0.mlp")]
#[case("run.json")]
#[case("optimizer.*_dtype")]
#[case("parallel.zero = 3")]
fn what_exists_is_accepted(#[case] code: &str) {
    assert_eq!(wrong(code), None);
}
