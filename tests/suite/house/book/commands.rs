//! Every command in a block of the README, of the book and of the job files is one that the program
//! accepts: it is parsed by the definition of the command line, with its settings and layouts.

use std::{fs, path::Path};

use rstest::rstest;

use super::{Block, Page, pages, programs::check, shell::commands};
use crate::house::rules::root;

/// The commands of a block, each with what is wrong with it.
fn checked(block: &Block) -> Vec<(Vec<String>, Result<(), String>)> {
    let found = match block.language.as_str() {
        "sh" => commands(&block.text, false),
        "text" => commands(&block.text, true),
        _ => return Vec::new(),
    };
    match found {
        Ok(found) => found
            .into_iter()
            .map(|words| {
                let result = check(&words);
                (words, result)
            })
            .collect(),
        Err(why) => vec![(vec!["the block".into()], Err(why))],
    }
}

/// The scripts of `docs/clusters` as blocks, each with its name.
fn job_files() -> Vec<(String, Block)> {
    let read = |path: &Path| {
        let text = fs::read_to_string(path).unwrap();
        let name = path.file_name().unwrap().to_str().unwrap().to_string();
        let text = match name.ends_with(".yaml") {
            true => command_of_a_pod(&text),
            false => text,
        };
        let language = "sh".into();
        (
            name,
            Block {
                language,
                text,
                line: 1,
            },
        )
    };
    let entries = fs::read_dir(root().join("docs/clusters")).unwrap();
    entries.map(|entry| read(&entry.unwrap().path())).collect()
}

/// The command in a folded text: the line that begins with `exec`, and those with its indentation
/// after it.
fn command_of_a_pod(yaml: &str) -> String {
    let lines: Vec<&str> = yaml.lines().collect();
    let indentation = |line: &str| line.len() - line.trim_start().len();
    let is_begin = |line: &&str| line.trim_start().starts_with("exec ");
    let begin = lines.iter().position(is_begin).expect("a line with exec");
    let is_inside = |line: &&&str| indentation(line) == indentation(lines[begin]);
    let lines = lines[begin..].iter().take_while(is_inside);
    lines.map(|line| line.trim()).collect::<Vec<_>>().join(" ")
}

#[test]
fn every_command_of_the_book_is_accepted() {
    let mut blocks = Vec::new();
    for page in pages() {
        let of_page = page.blocks().into_iter();
        blocks.extend(of_page.map(|block| (page.name.clone(), block)));
    }
    blocks.extend(job_files());
    // A block of another language would not be looked at.
    let languages = ["diff", "json", "rust", "sh", "text", "toml"];
    for (name, Block { language, line, .. }) in &blocks {
        let is_known = languages.contains(&language.as_str());
        assert!(is_known, "{name}:{line}: use one of {languages:?}");
    }
    let mut accepted = 0;
    let mut wrong = Vec::new();
    for (name, block) in &blocks {
        for (words, result) in checked(block) {
            match result {
                Ok(()) => accepted += 1,
                Err(why) => {
                    let command = words.join(" ");
                    wrong.push(format!("{name}:{}: {command}\n{why}", block.line));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(accepted > 120, "only {accepted} commands were found");
    for file in ["kubernetes.yaml", "mpi.sh", "slurm.sbatch", "torchrun.sh"] {
        let block = &blocks.iter().find(|(name, _)| name == file).unwrap().1;
        assert!(!checked(block).is_empty(), "no command in {file}");
    }
}

#[rstest]
#[case("megaburn trian --steps 3", "unrecognized subcommand 'trian'")]
#[case("megaburn train --step-count 3", "unexpected argument '--step-count'")]
#[case("megaburn train --steps many", "invalid value 'many'")]
#[case("megaburn train --set train.stesp=3", "unknown key `train.stesp`")]
#[case("megaburn train --set optimizer.name=adam", "adam")]
#[case("megaburn train --layout tp2-xp2", "xp2")]
#[case("megaburn train --layout dp3", "3")]
#[case(
    "megaburn plan configs/llama-3-9b.toml",
    "configs/llama-3-9b.toml does not exist"
)]
#[case("megaburn generate", "required arguments")]
#[case(
    "megaburn launch --nproc 2 -- megaburn train --num-steps 3",
    "'--num-steps'"
)]
#[case("srun as-rank.sh megaburn train --fast", "'--fast'")]
#[case("ssh host megaburn watch --ports 1 runs", "'--ports'")]
#[case("cargo run --releases --example memory", "'--releases'")]
#[case("cargo run --example llama_train", "no example llama_train")]
#[case("cargo run --example llama_pretrain -- --num-steps 3", "'--num-steps'")]
#[case("cargo run --example own_model -- --num-steps 3", "'--num-steps'")]
#[case("cargo build --features cuda13", "feature cuda13")]
#[case("cargo test -p megaburn-suite", "package megaburn-suite")]
#[case("megaburn info \"runs", "a quote has no end")]
fn a_wrong_command_is_found(#[case] command: &str, #[case] message: &str) {
    let page = Page {
        name: "a page".into(),
        text: format!("```sh\n{command}\n```\n"),
    };
    let found = checked(&page.blocks()[0]);
    assert_eq!(found.len(), 1, "{found:?}");
    let error = found[0].1.as_ref().expect_err("it was accepted");
    assert!(error.contains(message), "{error}");
}

/// The table of commands in `docs/training.md` has each command that `--help` lists.
#[test]
fn the_page_on_runs_names_every_command() {
    let page = Page::read("docs/training.md");
    let rows: Vec<&str> = page
        .text
        .lines()
        .filter(|line| line.starts_with("| `megaburn "))
        .collect();
    let command = megaburn::cli::command();
    for below in command
        .get_subcommands()
        .filter(|below| !below.is_hide_set())
    {
        let name = format!("`megaburn {}", below.get_name());
        let row = rows.iter().find(|row| row.contains(&name));
        let row = row.unwrap_or_else(|| panic!("docs/training.md does not name {name}`"));
        for part in below.get_subcommands() {
            let is_named = row.contains(&format!("{}`", part.get_name()));
            assert!(is_named, "{row} does not name `{}`", part.get_name());
        }
    }
}
