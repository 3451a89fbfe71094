//! The table of a profile as text.

use super::{
    breakdown::{GpuTimes, HostTimes},
    summary::{RankTimes, Summary},
};

/// How the text begins.
pub const TITLE: &str = "profile of steps ";
/// The most ranks that have a line: of more, the slowest and the fastest are shown.
const RANKS: usize = 16;

/// The table as text of several lines: where the time of a step went on each rank and in the
/// median.
pub fn table(summary: &Summary) -> String {
    let [first, last] = summary.steps;
    let mut lines = vec![format!(
        "{TITLE}{first} to {last}, milliseconds of a step; layout {}",
        summary.layout
    )];
    let shown = shown(summary);
    if summary.median.gpu.is_some() {
        let columns = |rank: &RankTimes| rank.gpu.map(|gpu: GpuTimes| gpu.parts());
        lines.push("what the GPU did:".into());
        lines.extend(rows(summary, &shown, columns));
        lines.push(String::new());
    }
    lines.push("what the host thread did:".into());
    lines.extend(rows(summary, &shown, |rank| {
        Some(HostTimes::parts(&rank.host))
    }));
    if let Some(slowest) = summary.slowest_rank.and_then(|rank| summary.rank(rank)) {
        let on = match slowest.host_name.is_empty() {
            true => String::new(),
            false => format!(" on {}", slowest.host_name),
        };
        lines.push(format!(
            "slowest  rank {}{on} works {:.2} of {:.2} ms and waits least for others",
            slowest.rank,
            slowest.work(),
            slowest.step
        ));
    }
    if !summary.kernels.is_empty() {
        lines.push(String::new());
        lines.push("kernels with the most time:".into());
    }
    for kernel in &summary.kernels {
        lines.push(format!(
            "{:10.3} ms {:8.1} x  {:13}  {}",
            kernel.time,
            kernel.launches,
            kernel.class.name(),
            kernel.name
        ));
    }
    lines.extend(summary.notes.iter().map(|note| format!("note     {note}")));
    lines.join("\n") + "\n"
}

/// The ranks that have a line, in rank order.
fn shown(summary: &Summary) -> Vec<&RankTimes> {
    let mut ranks: Vec<&RankTimes> = summary.ranks.iter().collect();
    if ranks.len() > RANKS {
        ranks.sort_by(|a, b| b.work().total_cmp(&a.work()));
        ranks.drain(RANKS / 2..ranks.len() - RANKS / 2);
        ranks.sort_by_key(|rank| rank.rank);
    }
    ranks
}

/// A line of titles, one for each rank and one for the median.
fn rows(
    summary: &Summary,
    shown: &[&RankTimes],
    parts: impl Fn(&RankTimes) -> Option<[(&'static str, f64); 8]>,
) -> Vec<String> {
    let names = parts(&summary.median).map(|parts| parts.map(|(name, _)| name));
    let names = names.unwrap_or_default();
    let line = |title: String, cells: Vec<String>| {
        let cells = cells.iter().zip(["step"].iter().chain(&names));
        let cells = cells.map(|(cell, name)| format!("{cell:>width$}", width = name.len().max(9)));
        format!("{title:<9}{}", cells.collect::<Vec<_>>().join(" "))
    };
    let titles = ["step"].iter().chain(&names).map(ToString::to_string);
    let mut lines = vec![line("rank".into(), titles.collect())];
    let row = |title: String, rank: &RankTimes| {
        let times = parts(rank).map(|parts| parts.map(|(_, time)| time));
        let times = times.into_iter().flatten();
        let cells = [rank.step].into_iter().chain(times);
        line(title, cells.map(|time| format!("{time:.2}")).collect())
    };
    lines.extend(shown.iter().map(|rank| row(rank.rank.to_string(), rank)));
    if summary.ranks.len() > shown.len() {
        let left_out = summary.ranks.len() - shown.len();
        lines.push(format!(
            "..       {left_out} ranks between these are left out"
        ));
    }
    if summary.ranks.len() > 1 {
        lines.push(row("median".into(), &summary.median));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::{KernelClass, KernelTime};

    #[test]
    fn each_number_stands_under_its_title() {
        let rank = |rank: usize, exposed: f64| RankTimes {
            rank,
            host_name: "n1".into(),
            step: 120.5,
            host: HostTimes {
                forward: 20.0,
                ..HostTimes::default()
            },
            gpu: Some(GpuTimes {
                exposed,
                ..GpuTimes::default()
            }),
        };
        let summary = Summary {
            steps: [10, 12],
            layout: "dp2".into(),
            ranks: vec![rank(0, 7.25), rank(1, 3.5)],
            median: rank(0, 5.375),
            slowest_rank: Some(1),
            kernels: vec![KernelTime {
                name: "nvjet".into(),
                class: KernelClass::Products,
                launches: 96.0,
                time: 64.5,
            }],
            notes: vec!["rank 1: 3 records were dropped".into()],
            ..Summary::default()
        };
        let text = table(&summary);
        let lines: Vec<&str> = text.lines().collect();
        assert!(
            lines[0].starts_with(TITLE) && lines[0].contains("10 to 12"),
            "{text}"
        );
        let column = lines[2].find("exposed").unwrap() + "exposed".len();
        let under = |line: &str| line[..column].split(' ').next_back().unwrap().to_string();
        assert_eq!(
            [under(lines[3]), under(lines[4]), under(lines[5])],
            ["7.25", "3.50", "5.38"]
        );
        for words in [
            "slowest  rank 1 on n1 works 117.00 of 120.50 ms",
            "64.500 ms     96.0 x  products       nvjet",
            "note     rank 1: 3 records",
        ] {
            assert!(text.contains(words), "{text}");
        }
    }

    #[test]
    fn of_many_ranks_the_ends_are_shown() {
        let ranks = (0..100).map(|rank| RankTimes {
            rank,
            step: 100.0,
            host: HostTimes {
                communication: rank as f64,
                ..HostTimes::default()
            },
            ..RankTimes::default()
        });
        let summary = Summary {
            ranks: ranks.collect(),
            ..Summary::default()
        };
        let text = table(&summary);
        assert!(
            text.contains("\n7  ") && !text.contains("\n8  ") && text.contains("\n92 "),
            "{text}"
        );
        assert!(text.contains("84 ranks between"), "{text}");
    }
}
