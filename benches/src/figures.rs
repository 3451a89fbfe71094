//! Reads the figures of measurements from their reports and compares each with the last one of the
//! same card.
//!
//! A report has the title `NAME, YYYY-MM-DD` and tables. It is a file of its own, or a section of a
//! file in `benches/results`. `benches/results/figures` holds a file for each card, such as
//! `NVIDIA-H200.json`, with the newest figure of each cell and its date and commit.

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

/// A figure counts as slower if it is worse than the last one by at least this many percent.
const TOLERATED: f64 = 3.0;
/// Units for which more is better.
const MORE: [&str; 7] = [
    "TFLOP/s", "TB/s", "GB/s", "tok/s", "tokens/s", "MFU", "PFLOP/s",
];
/// Units for which less is better.
const LESS: [&str; 7] = ["ms", "us", "seconds", "GiB", "GB", "MB", "bytes/parameter"];
/// Words that mark a figure as a peer's, measured only for comparison.
const PEERS: [&str; 5] = ["pytorch", "torch", "megatron", "fsdp", "peer"];

/// A measured number.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    /// The number in its cell.
    pub value: f64,
    /// The date of the report.
    pub date: String,
    /// The commit that was measured.
    pub commit: String,
}

/// The figures of a card, by `report / table / row / column`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// The card's name, as the driver reports it.
    pub card: String,
    /// The figures, by `report / table / row / column`.
    pub figures: BTreeMap<String, Figure>,
}

/// A figure compared with the last one.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// `report / table / row / column`.
    pub place: String,
    /// The new value.
    pub now: f64,
    /// The last figure, if there is one.
    pub last: Option<Figure>,
    /// The percentage by which the new value is worse; negative if it is better.
    pub worse: Option<f64>,
}

impl Change {
    /// Whether this is a figure of megaburn (not of a peer) that is at least 3% worse.
    pub fn is_slower(&self) -> bool {
        let of_peer = PEERS
            .iter()
            .any(|peer| self.place.to_lowercase().contains(peer));
        !of_peer && self.worse.is_some_and(|worse| worse >= TOLERATED)
    }
}

/// Reads the reports in a folder, older ones first, and skips reports of machines without GPUs.
///
/// # Errors
/// A file cannot be read.
pub fn read(folder: &Path) -> Result<BTreeMap<String, Figures>, Failure> {
    let mut files: Vec<PathBuf> = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            // The layout measurements write into subfolders, and older results are in `archive`.
            files.extend(fs::read_dir(&path)?.filter_map(|entry| Some(entry.ok()?.path())));
        } else {
            files.push(path);
        }
    }
    files.retain(|file| file.extension().is_some_and(|extension| extension == "md"));
    let texts: Vec<String> = files
        .iter()
        .map(fs::read_to_string)
        .collect::<Result<_, _>>()?;
    let mut reports: Vec<Report<'_>> = texts.iter().flat_map(|text| reports(text)).collect();
    reports.sort_by_key(|report| (report.date, report.name));
    let mut cards: BTreeMap<String, Figures> = BTreeMap::new();
    for report in reports {
        if let Some((card, figures)) = of_report(report) {
            let known = cards.entry(card.clone()).or_insert(Figures {
                card,
                ..Figures::default()
            });
            known.figures.extend(figures);
        }
    }
    Ok(cards)
}

/// A report: the parts of its title, and the lines that follow the title.
#[derive(Debug)]
struct Report<'a> {
    name: &'a str,
    date: &'a str,
    lines: Vec<&'a str>,
}

/// The reports in a file. Each begins with a heading `NAME, YYYY-MM-DD` of the first or second level
/// and ends where the next one begins.
fn reports(file: &str) -> Vec<Report<'_>> {
    let mut found: Vec<Report<'_>> = Vec::new();
    for line in file.lines() {
        if let Some((name, date)) = title(line) {
            let lines = Vec::new();
            found.push(Report { name, date, lines });
        } else if let Some(last) = found.last_mut() {
            last.lines.push(line);
        }
    }
    found
}

/// The name and the date of a report, if a line is the heading of one.
fn title(line: &str) -> Option<(&str, &str)> {
    let title = line.strip_prefix("## ").or(line.strip_prefix("# "))?;
    let (name, date) = title.split_once(", ")?;
    let date = date.get(..10)?;
    let is_date = date.bytes().enumerate().all(|(at, byte)| match at {
        4 | 7 => byte == b'-',
        _ => byte.is_ascii_digit(),
    });
    is_date.then_some((name, date))
}

/// The card and the figures of a report; `None` if it names no GPU.
fn of_report(
    Report { name, date, lines }: Report<'_>,
) -> Option<(String, BTreeMap<String, Figure>)> {
    let fact = |key: &str| {
        let key = format!("- {key}: ");
        lines.iter().find_map(|line| line.strip_prefix(&key[..]))
    };
    let (gpus, machine) = fact("machine")?.split_once(" GPUs, ")?;
    gpus.parse::<usize>().ok()?;
    let card = machine.split([',', ';']).next()?.to_string();
    // The commit may be followed by a remark.
    let commit = fact("commit")?.split_whitespace().next()?.to_string();
    let mut title = "";
    let mut head = Vec::new();
    let mut figures = BTreeMap::new();
    for line in lines {
        if let Some(text) = line.strip_prefix("##") {
            // Parentheses in a title hold a remark, which is no part of the figure's key.
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

/// The cells of a line of a table; `None` for any other line.
fn cells(line: &str) -> Option<Vec<&str>> {
    let inner = line.trim().strip_prefix('|')?.strip_suffix('|')?;
    Some(inner.split('|').map(str::trim).collect())
}

/// What a column holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Column {
    /// A part of the row's name, or values that are not compared, such as a ratio to a peer.
    Name,
    Ours,
    Peers,
}

impl Column {
    fn of(head: &[&str], index: usize) -> Self {
        let title = head[index];
        let of_peer = PEERS.iter().any(|peer| title.to_lowercase().contains(peer));
        // A peer's column follows ours and may repeat its title.
        let again = head[..index].contains(&title);
        match is_more_better(title) {
            None if !of_peer => Self::Name,
            None if title.contains("ratio") => Self::Name,
            _ if of_peer || again => Self::Peers,
            _ => Self::Ours,
        }
    }
}

/// Whether more is better in a column with this title; `None` if the title has no unit.
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

/// Compares each new figure with the last one.
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

/// Compares the figures in a folder of reports with the last ones, prints them, and writes the
/// updated figures into the folder.
#[derive(Debug, Parser)]
#[command(name = "bench-figures")]
struct Arguments {
    /// The folder of the reports.
    folder: PathBuf,
    /// The folder of the last figures, with a file for each card.
    #[arg(long, value_name = "FOLDER")]
    last: PathBuf,
}

/// Runs the program.
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
