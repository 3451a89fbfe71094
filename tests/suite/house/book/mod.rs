//! The book: the pages of `docs/`, with the README in front of them.

mod commands;
mod first_run;
mod inline;
mod megatron;
mod messages;
mod pictures;
mod programs;
mod settings;
mod shell;
mod summary;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use super::rules::root;

/// A page of Markdown.
pub(super) struct Page {
    /// Its path from the root of the repository.
    pub(super) name: String,
    pub(super) text: String,
}

/// A fenced block of a page.
pub(super) struct Block {
    pub(super) language: String,
    pub(super) text: String,
    /// The line of its fence, from 1.
    pub(super) line: usize,
}

/// All pages of the book and the README.
pub(super) fn pages() -> Vec<Page> {
    let mut names = vec!["README.md".to_string()];
    for entry in fs::read_dir(root().join("docs")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if name.ends_with(".md") && name != "SUMMARY.md" {
            names.push(format!("docs/{name}"));
        }
    }
    names.sort();
    assert!(names.len() > 30, "only {names:?}");
    names.iter().map(|name| Page::read(name)).collect()
}

impl Page {
    pub(super) fn read(name: &str) -> Self {
        let text = fs::read_to_string(root().join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        let name = name.to_string();
        Self { name, text }
    }

    /// The fenced blocks, and the lines outside of them.
    fn parts(&self) -> (Vec<Block>, Vec<&str>) {
        let mut blocks: Vec<Block> = Vec::new();
        let mut prose = Vec::new();
        let mut is_open = false;
        for (number, line) in self.text.lines().enumerate() {
            if let Some(language) = line.trim_start().strip_prefix("```") {
                if !is_open {
                    blocks.push(Block {
                        language: language.to_string(),
                        text: String::new(),
                        line: number + 1,
                    });
                }
                is_open = !is_open;
            } else if is_open {
                let block = blocks.last_mut().unwrap();
                block.text.push_str(line);
                block.text.push('\n');
            } else {
                prose.push(line);
            }
        }
        assert!(!is_open, "{}: a block has no end", self.name);
        (blocks, prose)
    }

    pub(super) fn blocks(&self) -> Vec<Block> {
        self.parts().0
    }

    /// The texts in backticks outside of blocks, and the text between them.
    fn code_and_text(&self) -> (Vec<String>, Vec<String>) {
        let prose = self.parts().1.join("\n");
        let mut code = Vec::new();
        let mut text = Vec::new();
        for (place, piece) in prose.split('`').enumerate() {
            let pieces = if place % 2 == 1 { &mut code } else { &mut text };
            pieces.push(piece.split_whitespace().collect::<Vec<_>>().join(" "));
        }
        assert_eq!(
            text.len(),
            code.len() + 1,
            "{}: a backtick is missing",
            self.name
        );
        (code, text)
    }

    /// The texts in backticks outside of blocks.
    pub(super) fn inline_code(&self) -> Vec<String> {
        self.code_and_text().0
    }

    /// The targets of links and pictures.
    pub(super) fn links(&self) -> Vec<String> {
        // What is in backticks is no link, but a link may have code as its text.
        let text = self.code_and_text().1.join("code");
        let target = |rest: &str| rest.split(')').next().unwrap().to_string();
        text.split("](").skip(1).map(target).collect()
    }

    pub(super) fn headings(&self) -> Vec<&str> {
        let prose = self.parts().1;
        let is_heading = |line: &&str| {
            let marks = line.chars().take_while(|c| *c == '#').count();
            marks > 0 && line[marks..].starts_with(' ')
        };
        prose.into_iter().filter(is_heading).collect()
    }

    /// The title: the only heading with one mark.
    pub(super) fn title(&self) -> &str {
        let headings = self.headings();
        let mut titles = headings.iter().filter_map(|line| line.strip_prefix("# "));
        match (titles.next(), titles.next()) {
            (Some(title), None) => title,
            found => panic!("{} needs one title, and has {found:?}", self.name),
        }
    }

    /// The anchors of the headings, as GitHub and mdBook name them.
    pub(super) fn anchors(&self) -> BTreeSet<String> {
        let mut seen: BTreeMap<String, usize> = BTreeMap::new();
        let anchor = |heading: &str| {
            let name = anchor_of(heading.trim_start_matches('#').trim());
            let count = seen.entry(name.clone()).or_default();
            *count += 1;
            match *count {
                1 => name,
                more => format!("{name}-{}", more - 1),
            }
        };
        self.headings().into_iter().map(anchor).collect()
    }
}

/// The anchor of a heading: its letters in lower case, with hyphens for spaces. A link in it counts
/// with its text.
fn anchor_of(heading: &str) -> String {
    let mut text = String::new();
    let mut rest = heading;
    while let Some((before, after)) = rest.split_once("](") {
        text.push_str(before);
        rest = after.split_once(')').unwrap().1;
    }
    text.push_str(rest);
    text.to_lowercase()
        .chars()
        .filter_map(|c| match c {
            ' ' => Some('-'),
            '-' | '_' => Some(c),
            c if c.is_alphanumeric() => Some(c),
            _ => None,
        })
        .collect()
}

/// The folder of a page.
pub(super) fn folder_of(name: &str) -> &Path {
    Path::new(name).parent().unwrap()
}

#[test]
fn a_page_is_taken_apart() {
    let page = Page {
        name: "docs/x.md".into(),
        text: "# A title: `code`\n\nSee [`x`](y.md#z) and `a](b)`.\n\n```sh\n# no heading\n[no](link)\n```\n## Twice\n## Twice\n"
            .into(),
    };
    assert_eq!(page.title(), "A title: `code`");
    assert_eq!(page.links(), ["y.md#z"]);
    assert_eq!(page.inline_code(), ["code", "x", "a](b)"]);
    let anchors: Vec<String> = page.anchors().into_iter().collect();
    assert_eq!(anchors, ["a-title-code", "twice", "twice-1"]);
    let blocks = page.blocks();
    assert_eq!((blocks[0].language.as_str(), blocks[0].line), ("sh", 5));
    assert_eq!(
        anchor_of("[Rows](#x) of 3.5 GB, per_rank"),
        "rows-of-35-gb-per_rank"
    );
}
