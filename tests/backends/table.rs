//! The table of `docs/backends.md`.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
};

/// The page with the table.
pub(crate) const PAGE: &str = "docs/backends.md";

/// The first line of the table, whose cells are the backends.
const HEAD: &str = "| what runs | Flex | NdArray | wgpu |";

/// Whether something runs on a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cell {
    /// It runs and computes what Flex computes.
    Yes,
    /// It does not.
    No,
    /// It was not tried.
    NotRun,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Yes => "yes",
            Self::No => "no",
            Self::NotRun => "not run",
        })
    }
}

impl Cell {
    fn parse(text: &str) -> Self {
        let cells = [Self::Yes, Self::No, Self::NotRun];
        let cell = cells.into_iter().find(|cell| cell.to_string() == text);
        cell.unwrap_or_else(|| panic!("{PAGE}: a cell is \"{text}\""))
    }
}

/// The rows of the page: a name, and a cell for each backend.
#[derive(Debug)]
pub(crate) struct Table {
    page: String,
    rows: Vec<(String, Vec<Cell>)>,
}

impl Table {
    /// The table of the page as it is.
    pub(crate) fn read() -> Self {
        let page = fs::read_to_string(path()).expect("the page can be read");
        let lines = page.lines().skip_while(|line| *line != HEAD).skip(2);
        let row = |line: &str| {
            let mut cells = line.trim_matches('|').split('|').map(str::trim);
            let name = cells.next().unwrap_or_default().to_owned();
            (name, cells.map(Cell::parse).collect())
        };
        let rows = lines.take_while(|line| line.starts_with('|')).map(row);
        Self {
            rows: rows.collect(),
            page,
        }
    }

    /// Sets a cell, and returns whether it was another one.
    pub(crate) fn set(&mut self, name: &str, backend: &str, cell: Cell) -> bool {
        let backends: Vec<&str> = HEAD.trim_matches('|').split('|').skip(1).collect();
        let column = backends.iter().position(|other| other.trim() == backend);
        let column = column.expect("the backend has a column");
        let at = match self.rows.iter().position(|(row, _)| row == name) {
            Some(at) => at,
            None => {
                let cells = vec![Cell::NotRun; backends.len()];
                self.rows.push((name.to_owned(), cells));
                self.rows.len() - 1
            }
        };
        let old = std::mem::replace(&mut self.rows[at].1[column], cell);
        old != cell
    }

    /// The rows of the page that are none of these.
    pub(crate) fn unknown(&self, names: &[&str]) -> Vec<String> {
        let rows = self.rows.iter().map(|(name, _)| name);
        let unknown = rows.filter(|name| !names.contains(&name.as_str()));
        unknown.map(|name| format!("no test of {name}")).collect()
    }

    /// Writes the rows of these names to the page.
    pub(crate) fn write(&self, names: &[&str]) {
        let row = |name: &&str| {
            let (_, cells) = self.rows.iter().find(|(row, _)| row == name)?;
            let cells: Vec<String> = cells.iter().map(Cell::to_string).collect();
            Some(format!("| {name} | {} |\n", cells.join(" | ")))
        };
        let rows: String = names.iter().filter_map(row).collect();
        let (before, after) = self.page.split_once(HEAD).expect("the page has a table");
        let rest = after.split_once("\n\n").map_or("", |(_, rest)| rest);
        let page = format!("{before}{HEAD}\n|---|---|---|---|\n{rows}\n{rest}");
        fs::write(path(), page).expect("the page can be written");
    }
}

fn path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(PAGE)
}
