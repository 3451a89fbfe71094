//! The printed report of a measurement, which `--save` adds to the measurement's results.

use std::{
    fmt::Write,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use chrono::Utc;
use clap::Parser;
use sysinfo::System;

use crate::Failure;

/// The flags of every measurement.
#[derive(Debug, Parser)]
pub struct Args {
    /// Also put the result on top of `benches/results/NAME.md`.
    #[arg(long)]
    pub save: bool,
    /// Write the result to `YYYY-MM-DD-NAME.md` in this folder instead.
    #[arg(long, value_name = "FOLDER")]
    pub out: Option<PathBuf>,
    /// Run only a few repetitions, to check that the measurement works, not how fast it is.
    #[arg(long)]
    pub quick: bool,
    /// Ignored; `cargo bench` passes this.
    #[arg(long, hide = true)]
    pub bench: bool,
}

/// A markdown table.
#[derive(Clone, Debug)]
pub struct Table {
    title: String,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Creates a table with a head and no rows.
    pub fn new(title: impl Into<String>, head: &[&str]) -> Self {
        let head = head.iter().map(ToString::to_string).collect();
        Self {
            title: title.into(),
            rows: vec![head],
        }
    }

    /// Adds a row, which must have as many cells as the head.
    pub fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// Formats the table with aligned columns: the first one to the left, all others to the right.
    pub fn to_markdown(&self) -> String {
        let columns = self.rows[0].len();
        let width = |column: usize| {
            self.rows
                .iter()
                .map(|row| row[column].chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let mut text = format!("### {}\n\n", self.title);
        for (index, row) in self.rows.iter().enumerate() {
            let cells = row
                .iter()
                .zip(&widths)
                .enumerate()
                .map(|(column, (cell, width))| {
                    if column == 0 {
                        format!("{cell:<width$}")
                    } else {
                        format!("{cell:>width$}")
                    }
                });
            let _ = writeln!(text, "| {} |", cells.collect::<Vec<_>>().join(" | "));
            if index == 0 {
                let rule = |(column, width): (usize, &usize)| match column {
                    0 => "-".repeat(width + 2),
                    _ => format!("{}:", "-".repeat(width + 1)),
                };
                let rules: Vec<_> = widths.iter().enumerate().map(rule).collect();
                let _ = writeln!(text, "|{}|", rules.join("|"));
            }
        }
        text
    }
}

/// The result of a measurement: a description of what was measured, and tables.
#[derive(Clone, Debug)]
pub struct Report {
    name: &'static str,
    about: String,
    load_before: f64,
    body: String,
}

impl Report {
    /// Creates a report without tables and prints the description.
    pub fn new(name: &'static str, about: impl Into<String>) -> Self {
        let about = about.into();
        println!("{name}: {about}\n");
        Self {
            name,
            about,
            load_before: System::load_average().one,
            body: String::new(),
        }
    }

    /// Prints a table and adds it to the report.
    pub fn table(&mut self, table: &Table) {
        self.text(&table.to_markdown());
    }

    /// Prints a paragraph and adds it to the report.
    pub fn text(&mut self, text: &str) {
        let text = text.trim_end();
        println!("{text}\n");
        let _ = write!(self.body, "{text}\n\n");
    }

    /// Writes the report if `args` ask for it: `--save` on top of the results of this measurement,
    /// `--out` into a file of its own.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn finish(&self, args: &Args) -> Result<(), Failure> {
        let date = Utc::now().format("%Y-%m-%d").to_string();
        let report = self.document(&date, args);
        let (path, text) = match &args.out {
            Some(folder) => {
                fs::create_dir_all(folder)?;
                let path = folder.join(format!("{date}-{}.md", self.name));
                (path, format!("# {report}"))
            }
            None if args.save => {
                let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("results");
                let path = results.join(format!("{}.md", self.name.replace('-', "_")));
                let known = match fs::read_to_string(&path) {
                    Ok(text) => text,
                    Err(_) => format!("# {}\n", self.name),
                };
                (path, with_section(&known, &report))
            }
            None => return Ok(()),
        };
        fs::write(&path, text)?;
        println!("written to {}", path.display());
        Ok(())
    }

    /// The command that reproduces the result.
    fn command(&self, quick: &str) -> String {
        match std::env::var_os("MEGABURN_BUNDLE") {
            Some(_) => format!("`{}`, from the bundle of `.ci/bundle`", arguments()),
            None => {
                format!(
                    "`cargo bench -p megaburn-benches --bench {} -- --save{quick}`",
                    self.name
                )
            }
        }
    }

    /// The report from its title on, without the title's `#`.
    fn document(&self, date: &str, args: &Args) -> String {
        let Self {
            name,
            about,
            load_before,
            body,
        } = self;
        let quick = if args.quick { " --quick" } else { "" };
        let facts = [
            ("machine", machine()),
            (
                "load",
                format!(
                    "{load_before:.2} before, {:.2} after",
                    System::load_average().one
                ),
            ),
            ("commit", commit()),
            ("command", self.command(quick)),
            (
                "versions",
                format!(
                    "burn {}, {}",
                    burn_version(),
                    output("rustc", &["--version"])
                ),
            ),
        ];
        let facts = facts
            .map(|(key, value)| format!("- {key}: {value}\n"))
            .concat();
        format!(
            "{name}, {date}\n\n{about}\n\n{facts}\n{}\n",
            body.trim_end()
        )
    }
}

/// Results with a new section in front of the others.
fn with_section(results: &str, section: &str) -> String {
    let begin = results.find("\n## ").map_or(results.len(), |at| at + 1);
    let (head, others) = results.split_at(begin);
    let gap = if others.is_empty() { "" } else { "\n" };
    format!("{}\n\n## {section}{gap}{others}", head.trim_end())
}

/// The commit of the sources: of this repository or, in a bundle, the one it was built from.
fn commit() -> String {
    let bundle = std::env::var_os("MEGABURN_BUNDLE");
    let written =
        bundle.and_then(|bundle| fs::read_to_string(Path::new(&bundle).join("COMMIT")).ok());
    written.map_or_else(
        || {
            let here = env!("CARGO_MANIFEST_DIR");
            output(
                "git",
                &["-C", here, "describe", "--always", "--dirty", "--abbrev=12"],
            )
        },
        |commit| commit.trim().to_string(),
    )
}

fn machine() -> String {
    let system = System::new_all();
    let cpu = system
        .cpus()
        .first()
        .map_or("unknown processor", |cpu| cpu.brand().trim());
    let cores = system.cpus().len();
    let memory = system.total_memory() as f64 / (1u64 << 30) as f64;
    let os = System::long_os_version().unwrap_or_default();
    let gpus = output(
        "nvidia-smi",
        &["--query-gpu=name,driver_version", "--format=csv,noheader"],
    );
    let gpus = if gpus.starts_with("unknown") {
        String::new()
    } else {
        format!(
            "{} GPUs, {}; ",
            gpus.lines().count(),
            gpus.lines().next().unwrap_or("")
        )
    };
    format!("{gpus}{cpu}, {cores} cores, {memory:.0} GiB memory, {os}")
}

/// The command line, with the program's folder removed.
fn arguments() -> String {
    let mut arguments = std::env::args();
    let program = arguments.next().unwrap_or_default();
    let program = program.rsplit('/').next().unwrap_or_default().to_string();
    [program]
        .into_iter()
        .chain(arguments)
        .collect::<Vec<_>>()
        .join(" ")
}

/// The version of burn that was built, read from the lock file.
fn burn_version() -> String {
    let lock = include_str!("../../Cargo.lock");
    let after = lock
        .split_once("name = \"burn\"\nversion = \"")
        .map_or("", |(_, after)| after);
    after.split('"').next().unwrap_or_default().to_string()
}

fn output(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output();
    match output {
        Ok(output) if output.status.success() => {
            String::from_utf8_lossy(&output.stdout).trim().to_string()
        }
        _ => format!("unknown ({program} failed)"),
    }
}
