//! The result of a comparison as text.

use std::fmt;

use megaburn_collective::CallState;

use super::{
    analysis::{Finding, HangAnalysis, What},
    line::HangLine,
    system::is_usual,
};

impl fmt::Display for HangAnalysis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reported = self.lines.len();
        let start = self.lines.values().next().map_or("?", |line| &line.start);
        writeln!(
            f,
            "hang in the start of {start}: {reported} of {} ranks have reported",
            self.world_size
        )?;
        for (at, finding) in self.findings.iter().enumerate() {
            let first = if at == 0 { "first   " } else { "then    " };
            writeln!(f, "{first} {finding}")?;
        }
        if self.findings.is_empty() && self.look_at.is_empty() {
            writeln!(
                f,
                "nothing  no collective differs between the ranks that have reported"
            )?;
        }
        for rank in &self.look_at {
            let why = match self.lines.contains_key(rank) && self.was_stopped(*rank) {
                true => "",
                false => ", which waits for no other",
            };
            writeln!(f, "look at  rank {rank}{why}: {}", self.place(*rank))?;
        }
        if self.look_at.is_empty() && !self.findings.is_empty() {
            writeln!(
                f,
                "look at  the order of calls: each of these ranks waits for another one of them"
            )?;
        }
        for rank in 0..self.world_size {
            writeln!(f, "rank {rank:<3} {}", self.place(rank))?;
        }
        Ok(())
    }
}

impl HangAnalysis {
    /// Where a rank is, and what it did last.
    fn place(&self, rank: usize) -> String {
        match self.lines.get(&rank) {
            Some(line) => format!("{}{}", place_of(line), self.seen(rank)),
            None => self.place_of_silent(rank),
        }
    }

    /// That others saw the process of a rank stopped, or waiting in the kernel: a launcher lets a
    /// stopped process continue to end it, and then it reports.
    fn seen(&self, rank: usize) -> String {
        let seen = self.lines.iter().find_map(|(by, line)| {
            let state = &line.processes.get(&rank)?.state;
            (!is_usual(state)).then(|| format!("; rank {by} found that it {state}"))
        });
        seen.unwrap_or_default()
    }

    /// What others know about a rank that did not report.
    fn place_of_silent(&self, rank: usize) -> String {
        let mut seen = self.lines.values().filter_map(|line| {
            let process = line.processes.get(&rank)?;
            let (pid, state) = (process.pid, &process.state);
            Some(format!("process {pid} on {} {state}", line.host))
        });
        let state = seen
            .next()
            .unwrap_or_else(|| "its host says nothing".into());
        let heard = self.lines.iter().flat_map(|(by, line)| {
            let heard = line
                .report
                .heard
                .iter()
                .filter(move |heard| heard.from == rank);
            heard.map(move |heard| (heard, by))
        });
        let last = heard.max_by_key(|(heard, _)| heard.call.seq);
        let last = last.map_or(String::new(), |(heard, by)| {
            format!("; rank {by} received its {} {}", heard.group, heard.call)
        });
        format!("no report: {state}{last}")
    }
}

fn place_of(line: &HangLine) -> String {
    let report = &line.report;
    let phases = report.phases.iter();
    let phases = phases.filter(|phase| !report.sections.contains(phase));
    let names = phases.chain(&report.sections).map(String::as_str);
    let names: Vec<&str> = names.collect();
    let place = match names.is_empty() {
        true => "between its steps".to_string(),
        false => format!("in `{}`", names.join("/")),
    };
    let waits = match &report.waits_for[..] {
        [] if report
            .calls
            .iter()
            .any(|call| call.state != CallState::Done) =>
        {
            ", in a collective".to_string()
        }
        [] => format!(" for {:.1} s, in no collective", report.section_seconds),
        ranks => format!(", waits for {}", list(ranks)),
    };
    let last = report.calls.last().map_or(String::new(), |call| {
        let state = match call.state {
            CallState::Waiting => "not done",
            CallState::Done => "done",
            CallState::Failed => "not done",
        };
        format!("; last call {} {}, {state}", call.group, call.call)
    });
    format!(
        "process {} on {}: {place}{waits}{last}",
        line.pid, line.host
    )
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.what {
            What::Differ(kinds) => {
                write!(f, "in {}, ranks made different calls: ", self.group)?;
                for (at, (call, ranks)) in kinds.iter().enumerate() {
                    let comma = if at == 0 { "" } else { ", " };
                    write!(f, "{comma}{} {call}", list(ranks))?;
                }
                Ok(())
            }
            What::NotEntered {
                call,
                waiting,
                absent,
            } => {
                let wait = if waiting.len() == 1 { "waits" } else { "wait" };
                let have = if absent.len() == 1 { "has" } else { "have" };
                write!(
                    f,
                    "{} {call}: {} {wait} ({:.1} s), {} {have} not entered it",
                    self.group,
                    list(waiting),
                    self.seconds,
                    list(absent)
                )
            }
        }
    }
}

/// `rank 1`, or `ranks 0, 2, 3`; the first ones of many.
fn list(ranks: &[usize]) -> String {
    const MOST: usize = 16;
    let names: Vec<_> = ranks.iter().take(MOST).map(usize::to_string).collect();
    let more = match ranks.len().saturating_sub(MOST) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let plural = if ranks.len() == 1 { "" } else { "s" };
    format!("rank{plural} {}{more}", names.join(", "))
}
