//! What rank 0 concludes from the facts of all ranks.

use std::fmt;

use serde::Serialize;

use crate::facts::RankFacts;

/// How an observation is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// It is as it should be.
    Ok,
    /// It may matter to some runs, or explains another observation.
    Note,
    /// It slows runs down, endangers or prevents them.
    Finding,
}

/// One line of a diagnosis.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Observation {
    /// How it is meant.
    pub kind: Kind,
    /// What was looked at, such as `clocks`.
    pub check: &'static str,
    /// The ranks, GPUs or hosts that it is about, and the value that was found.
    pub value: String,
    /// What to do about a finding.
    pub fix: Option<String>,
}

impl Observation {
    /// Something that is as it should be.
    pub(crate) fn ok(check: &'static str, value: impl Into<String>) -> Self {
        Self::of(Kind::Ok, check, value, None)
    }

    /// Something to know.
    pub(crate) fn note(check: &'static str, value: impl Into<String>) -> Self {
        Self::of(Kind::Note, check, value, None)
    }

    /// Something wrong, and what to do.
    pub(crate) fn finding(
        check: &'static str,
        value: impl Into<String>,
        fix: impl Into<String>,
    ) -> Self {
        Self::of(Kind::Finding, check, value, Some(fix.into()))
    }

    fn of(kind: Kind, check: &'static str, value: impl Into<String>, fix: Option<String>) -> Self {
        Self {
            kind,
            check,
            value: value.into(),
            fix,
        }
    }

    /// Whether something is wrong.
    pub fn is_finding(&self) -> bool {
        self.kind == Kind::Finding
    }
}

/// Everything that was found in an examination.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Diagnosis {
    /// Whether there is no finding.
    pub is_well: bool,
    /// The number of ranks.
    pub num_ranks: usize,
    /// The hosts, each with its ranks.
    pub hosts: Vec<(String, Vec<usize>)>,
    /// What was found, findings last.
    pub observations: Vec<Observation>,
    /// What was not looked at, and why.
    pub unchecked: Vec<String>,
    /// What each rank reported.
    pub ranks: Vec<RankFacts>,
}

impl Diagnosis {
    /// The diagnosis of a job whose ranks could not meet, or lost each other, for this reason.
    pub fn of_failure(why: &str) -> Self {
        let fix = "see that every host resolves the address of rank 0, that its port is open \
                   between the hosts (firewall, security group), that all ranks are started with \
                   the same program, `--nnodes` and job token, and that `--timeout` is long enough";
        Self {
            is_well: false,
            num_ranks: 0,
            hosts: Vec::new(),
            observations: vec![Observation::finding("ports", why, fix)],
            unchecked: vec!["everything else, because the ranks did not stay connected".into()],
            ranks: Vec::new(),
        }
    }

    /// The observations that need a fix.
    pub fn findings(&self) -> impl Iterator<Item = &Observation> {
        self.observations
            .iter()
            .filter(|observation| observation.is_finding())
    }
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hosts: Vec<String> = self
            .hosts
            .iter()
            .map(|(host, ranks)| match ranks.as_slice() {
                [rank] => format!("{host} (rank {rank})"),
                ranks => format!("{host} (ranks {})", rank_list(ranks)),
            })
            .collect();
        let plural = if self.num_ranks == 1 { "" } else { "s" };
        if self.num_ranks > 0 {
            writeln!(
                f,
                "ranks    {} rank{plural}: {}",
                self.num_ranks,
                hosts.join(", ")
            )?;
        }
        for Observation {
            kind,
            check,
            value,
            fix,
        } in &self.observations
        {
            let mark = match kind {
                Kind::Ok => "ok",
                Kind::Note => "note",
                Kind::Finding => "FINDING",
            };
            write!(f, "{mark:<8} {check:<13} {value}")?;
            match fix {
                Some(fix) => writeln!(f, "; fix: {fix}")?,
                None => writeln!(f)?,
            }
        }
        for what in &self.unchecked {
            writeln!(f, "skipped  {what}")?;
        }
        match self.findings().count() {
            0 => write!(f, "result   no findings"),
            1 => write!(f, "result   1 finding"),
            many => write!(f, "result   {many} findings"),
        }
    }
}

/// Ranks as ranges, like `0-3, 6`.
pub(crate) fn rank_list(ranks: &[usize]) -> String {
    let mut ranges: Vec<[usize; 2]> = Vec::new();
    for &rank in ranks {
        match ranges.last_mut() {
            Some([_, last]) if *last + 1 == rank => *last = rank,
            _ => ranges.push([rank, rank]),
        }
    }
    let texts = ranges.into_iter().map(|[first, last]| match last - first {
        0 => format!("{first}"),
        _ => format!("{first}-{last}"),
    });
    texts.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_listed_as_ranges() {
        assert_eq!(rank_list(&[0, 1, 2, 3, 6, 8, 9]), "0-3, 6, 8-9");
        assert_eq!(rank_list(&[]), "");
    }
}
