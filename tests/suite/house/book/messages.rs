//! The messages that pages explain are those of the program.

use std::fs;

use super::Page;
use crate::house::rules::{root, visit};

/// Tables whose first column has messages, by the first cell of their head.
const HEADS: [&str; 2] = ["| message |", "| symptom |"];

/// The shortest text between two omissions that is looked for.
const SHORTEST: usize = 6;

/// The string literals of the sources, without the line breaks inside of them.
fn literals() -> Vec<String> {
    let mut all = Vec::new();
    for folder in ["crates", "cubecl-kernels"] {
        visit(&root().join(folder), &mut |path| {
            let text = fs::read_to_string(path).unwrap();
            let is_code = |line: &&str| !line.trim_start().starts_with("//");
            let text: String = text.split_inclusive('\n').filter(is_code).collect();
            let mut lines = text.split("\\\n");
            let mut code = lines.next().unwrap().to_string();
            lines.for_each(|line| code.push_str(line.trim_start()));
            let code = code.replace("'\"'", "").replace("\\\"", "");
            all.extend(code.split('"').skip(1).step_by(2).map(str::to_string));
        });
    }
    all
}

/// The texts in backticks of the columns of messages of a page.
fn messages(page: &Page) -> Vec<String> {
    let mut found = Vec::new();
    let mut column = None;
    for line in page.text.lines() {
        if !line.starts_with('|') {
            column = None;
        } else if HEADS.iter().any(|head| line.starts_with(head)) {
            // A table of symptoms may have a column of what is printed.
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            let printed = cells.iter().position(|cell| *cell == "what is printed");
            column = Some(printed.unwrap_or(1));
        } else if let Some(column) = column
            && !line.starts_with("|---")
        {
            let cell = line.split(" | ").nth(column - 1).unwrap();
            let quotes = cell.split('`').skip(1).step_by(2);
            found.extend(quotes.map(str::to_string));
        }
    }
    found
}

/// The parts of a message between what is left out, `..`, and numbers.
fn parts(message: &str) -> Vec<&str> {
    let message = message.split(|c: char| c.is_ascii_digit());
    let parts = message.flat_map(|part| part.split(".."));
    let parts = parts.map(|part| part.trim_matches(|c: char| !c.is_alphanumeric()));
    parts.filter(|part| part.len() >= SHORTEST).collect()
}

/// Whether one literal has all parts of a message.
fn is_in(literals: &[String], parts: &[&str]) -> bool {
    let has_all = |literal: &String| parts.iter().all(|part| literal.contains(part));
    literals.iter().any(has_all)
}

#[test]
fn messages_on_pages_are_those_of_the_program() {
    let literals = literals();
    let mut looked_for = 0;
    let mut missing = Vec::new();
    for name in ["docs/failures.md", "docs/your-data.md"] {
        for message in messages(&Page::read(name)) {
            // Words of the system.
            if message == "No space left on device" {
                continue;
            }
            let parts = parts(&message);
            looked_for += 1;
            if !parts.is_empty() && !is_in(&literals, &parts) {
                missing.push(format!("{name}: `{message}`"));
            }
        }
    }
    assert!(missing.is_empty(), "no message has {missing:#?}");
    assert!(looked_for > 40, "only {looked_for} messages");
    assert!(!is_in(&literals, &["cannot save step", "No tensor named"]));
}

#[test]
fn a_message_is_divided_at_what_it_leaves_out() {
    let parts = parts("cannot save step ..: .. is full, 12 of 34; is it");
    assert_eq!(parts, ["cannot save step", "is full"]);
    let page = Page {
        name: "x".into(),
        text:
            "| message | fix |\n|---|---|\n| `a message`, `b` | `c` |\n\n| key | x |\n| `d` | e |\n"
                .into(),
    };
    assert_eq!(messages(&page), ["a message", "b"]);
}
