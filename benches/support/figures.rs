//! The figures of measurements, read from their reports: each beside the last one of the same card.
//!
//! A report's file is `YYYY-MM-DD-NAME.md` with tables. `benches/results/figures` holds a file for each card,
//! `NVIDIA-H200.json`, with the newest figure of each cell and the date and commit that it is of.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Parser;
use serde::{Deserialize, Serialize};

use crate::Failure;

/// Percent by which a figure may be worse than the last one.
const TOLERATED: f64 = 3.0;
/// Units of which more is better.
const MORE: [&str; 7] = [
    "TFLOP/s", "TB/s", "GB/s", "tok/s", "tokens/s", "MFU", "PFLOP/s",
];
/// Units of which less is better.
const LESS: [&str; 7] = ["ms", "us", "seconds", "GiB", "GB", "MB", "bytes/parameter"];
/// Who is measured for comparison.
const PEERS: [&str; 5] = ["pytorch", "torch", "megatron", "fsdp", "peer"];

/// A measured number.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    /// As its cell has it.
    pub value: f64,
    /// Of the report.
    pub date: String,
    /// What was measured.
    pub commit: String,
}

/// The figures of a card, by `report / table / row / column`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// As the driver calls it.
    pub card: String,
    /// By where they stand.
    pub figures: BTreeMap<String, Figure>,
}

/// A figure beside the last one.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// `report / table / row / column`.
    pub place: String,
    /// The new one.
    pub now: f64,
    /// The last one, if there is one.
    pub last: Option<Figure>,
    /// Percent by which the new one is worse, negative where it is better.
    pub worse: Option<f64>,
}

impl Change {
    /// Whether it is one of ours that is 3% worse or more.
    pub fn is_slower(&self) -> bool {
        let of_peer = PEERS
            .iter()
            .any(|peer| self.place.to_lowercase().contains(peer));
        !of_peer && self.worse.is_some_and(|worse| worse >= TOLERATED)
    }
}

/// Reads the reports in a folder, older ones first; those of other machines than GPUs are left out.
///
/// # Errors
/// A file cannot be read.
pub fn read(folder: &Path) -> Result<BTreeMap<String, Figures>, Failure> {
    let mut files: Vec<PathBuf> = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            // The measurements of layouts write into folders of their own.
            files.extend(fs::read_dir(&path)?.filter_map(|entry| Some(entry.ok()?.path())));
        } else {
            files.push(path);
        }
    }
    files.retain(|file| file.extension().is_some_and(|extension| extension == "md"));
    files.sort_by_key(|file| file.file_name().map(ToOwned::to_owned));
    let mut cards: BTreeMap<String, Figures> = BTreeMap::new();
    for file in files {
        if let Some((card, figures)) = of_report(&fs::read_to_string(file)?) {
            let known = cards.entry(card.clone()).or_insert(Figures {
                card,
                ..Figures::default()
            });
            known.figures.extend(figures);
        }
    }
    Ok(cards)
}

/// The card and the figures of a report; nothing of one that names none.
fn of_report(text: &str) -> Option<(String, BTreeMap<String, Figure>)> {
    let (name, date) = text.lines().next()?.strip_prefix("# ")?.split_once(", ")?;
    let date = date.get(..10)?;
    let fact = |key: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(&format!("- {key}: ")))
    };
    let (gpus, machine) = fact("machine")?.split_once(" GPUs, ")?;
    gpus.parse::<usize>().ok()?;
    let card = machine.split([',', ';']).next()?.to_string();
    // Behind the commit there may be a remark.
    let commit = fact("commit")?.split_whitespace().next()?.to_string();
    let mut title = "";
    let mut head = Vec::new();
    let mut figures = BTreeMap::new();
    for line in text.lines() {
        if let Some(text) = line.strip_prefix("##") {
            // What stands in parentheses is a remark.
            let text = text.trim_start_matches('#').trim();
            title = text.split_once(" (").map_or(text, |(title, _)| title);
            head = Vec::new();
        }
        let Some(cells) = cells(line) else {
            head.clear();
            continue;
        };
        if head.is_empty() {
            head = cells;
            continue;
        }
        let columns: Vec<Column> = (0..head.len()).map(|i| Column::of(&head, i)).collect();
        let is_key = |i: &usize| columns[..=*i].iter().all(|column| *column == Column::Name);
        let row: Vec<&str> = (0..cells.len().min(head.len()))
            .filter(is_key)
            .map(|i| cells[i])
            .collect();
        for (i, cell) in cells.iter().enumerate().take(head.len()) {
            let peer = match columns[i] {
                Column::Name => continue,
                Column::Ours => "",
                Column::Peers => "peer ",
            };
            let Ok(value) = cell.parse::<f64>() else {
                continue;
            };
            let place = format!("{name} / {title} / {} / {peer}{}", row.join(", "), head[i]);
            figures.insert(
                place,
                Figure {
                    value,
                    date: date.into(),
                    commit: commit.clone(),
                },
            );
        }
    }
    Some((card, figures))
}

/// The cells of a line of a table.
fn cells(line: &str) -> Option<Vec<&str>> {
    let inner = line.trim().strip_prefix('|')?.strip_suffix('|')?;
    Some(inner.split('|').map(str::trim).collect())
}

/// What stands in a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Column {
    /// A part of the row's name, or nothing that is measured.
    Name,
    Ours,
    Peers,
}

impl Column {
    fn of(head: &[&str], index: usize) -> Self {
        let title = head[index];
        let of_peer = PEERS.iter().any(|peer| title.to_lowercase().contains(peer));
        // The peers' columns follow ours and have their names.
        let again = head[..index].contains(&title);
        match is_more_better(title) {
            None if !of_peer => Self::Name,
            None if title.contains("ratio") => Self::Name,
            _ if of_peer || again => Self::Peers,
            _ => Self::Ours,
        }
    }
}

/// Whether more is better of what a column has; nothing where its title has no unit.
fn is_more_better(title: &str) -> Option<bool> {
    let has = |units: &[&str]| {
        title
            .split([' ', ',', '(', ')'])
            .any(|word| units.contains(&word) || units.contains(&word.trim_end_matches("/GPU")))
    };
    match (has(&MORE), has(&LESS)) {
        (true, _) => Some(true),
        (_, true) => Some(false),
        _ => None,
    }
}

/// Each new figure beside the last one.
pub fn compare(now: &Figures, last: &Figures) -> Vec<Change> {
    let change = |(place, figure): (&String, &Figure)| {
        let last = last.figures.get(place).cloned();
        let more = place.rsplit(" / ").next().and_then(is_more_better);
        let worse = last
            .as_ref()
            .zip(more)
            .filter(|(last, _)| last.value != 0.0);
        let worse = worse.map(|(last, more)| {
            let grown = (figure.value / last.value - 1.0) * 100.0;
            if more { -grown } else { grown }
        });
        Change {
            place: place.clone(),
            now: figure.value,
            last,
            worse,
        }
    };
    now.figures.iter().map(change).collect()
}

/// Prints the figures of a folder of reports beside the last ones, and writes all into it.
#[derive(Debug, Parser)]
#[command(name = "bench-figures")]
struct Arguments {
    /// Where reports are.
    folder: PathBuf,
    /// Where the last figures are, a file for each card.
    #[arg(long, value_name = "FOLDER")]
    last: PathBuf,
}

/// The program.
pub fn main(command: Vec<OsString>) -> ExitCode {
    match run(&Arguments::parse_from(command)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(Arguments { folder, last }: &Arguments) -> Result<(), Failure> {
    for (card, now) in read(folder)? {
        let name = format!("{}.json", card.replace(' ', "-"));
        let mut known = match fs::read_to_string(last.join(&name)) {
            Ok(text) => serde_json::from_str(&text)
                .map_err(|error| format!("{}: {error}", last.join(&name).display()))?,
            Err(_) => Figures {
                card: card.clone(),
                ..Figures::default()
            },
        };
        println!("{card}: figure | now | last | of | percent worse");
        let changes = compare(&now, &known);
        for change in &changes {
            println!("{}", line(change));
        }
        let slower = changes.iter().filter(|change| change.is_slower()).count();
        println!(
            "{card}: {} figures, {slower} of them {TOLERATED}% slower or more (marked SLOWER)",
            changes.len()
        );
        known.figures.extend(now.figures);
        let path = folder.join(&name);
        fs::write(&path, serde_json::to_string_pretty(&known)? + "\n")?;
        println!(
            "written to {}: commit it as benches/results/figures/{name}",
            path.display()
        );
    }
    Ok(())
}

fn line(change: &Change) -> String {
    let Change {
        place,
        now,
        last,
        worse,
    } = change;
    let last = last.as_ref().map_or(
        "none | ".into(),
        |Figure {
             value,
             date,
             commit,
         }| {
            let commit: String = commit.chars().take(7).collect();
            format!("{value} | {date} {commit}")
        },
    );
    let worse = worse.map_or(String::new(), |worse| format!("{worse:+.1}"));
    let mark = if change.is_slower() { " SLOWER" } else { "" };
    format!("{place} | {now} | {last} | {worse}{mark}")
}
