//! Which rank did what else.

use std::collections::{BTreeMap, BTreeSet};

use megaburn_collective::{Call, CallState, Collective, ReportedCall};
use serde::Serialize;

use super::{line::HangLine, system::is_stopped};

/// What the reports of ranks say together.
#[derive(Debug, Serialize)]
pub struct HangAnalysis {
    /// The number of ranks of the run.
    pub world_size: usize,
    /// The ranks that did not report: they are stopped, lost, or stuck with all their threads.
    pub silent: Vec<usize>,
    /// The ranks that others wait for and that wait for no other, as far as is known, and those that
    /// another rank found stopped.
    pub look_at: Vec<usize>,
    /// Where ranks differ, the most telling first.
    pub findings: Vec<Finding>,
    /// The reports, by rank.
    #[serde(skip)]
    pub(super) lines: BTreeMap<usize, HangLine>,
}

/// A collective in which ranks differ, or which some have not entered.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finding {
    /// The group's name.
    pub group: String,
    /// What differs.
    #[serde(flatten)]
    pub what: What,
    /// How long the first of the ranks has been in it.
    pub seconds: f64,
}

/// What differs between ranks.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// Members made different calls with the same number: each call, and who made it.
    Differ(Vec<(Call, Vec<usize>)>),
    /// Members wait in a call that others have not made.
    NotEntered {
        /// The call.
        call: Call,
        /// The members that wait in it.
        waiting: Vec<usize>,
        /// The members that have not made it, and those that did not report.
        absent: Vec<usize>,
    },
}

/// A group: its name and members.
type GroupKey<'a> = (&'a str, &'a [usize]);

impl HangAnalysis {
    /// Compares the lines of a hang.
    pub fn of(lines: Vec<HangLine>) -> Self {
        let sizes = lines.iter().map(|line| line.report.world_size);
        let world_size = sizes.max().unwrap_or_default();
        let lines: BTreeMap<usize, HangLine> = lines
            .into_iter()
            .map(|line| (line.report.rank, line))
            .collect();
        let silent = (0..world_size).filter(|rank| !lines.contains_key(rank));
        let mut analysis = Self {
            world_size,
            silent: silent.collect(),
            look_at: Vec::new(),
            findings: Vec::new(),
            lines,
        };
        let mut findings = analysis.in_groups();
        findings.extend(analysis.in_pairs());
        let absent = findings.iter().flat_map(|finding| finding.what.absent());
        let roots: BTreeSet<usize> = absent.filter(|rank| !analysis.waits(*rank)).collect();
        findings.sort_by(|a, b| {
            let order = |finding: &Finding| match &finding.what {
                What::Differ(_) => 0,
                what if what.absent().any(|rank| roots.contains(&rank)) => 1,
                _ => 2,
            };
            order(a)
                .cmp(&order(b))
                .then(b.seconds.total_cmp(&a.seconds))
        });
        let stopped = (0..world_size).filter(|rank| analysis.was_stopped(*rank));
        analysis.look_at = roots.into_iter().chain(stopped).collect();
        analysis.look_at.sort_unstable();
        analysis.look_at.dedup();
        analysis.findings = findings;
        analysis
    }

    /// Whether a rank waits in a collective.
    fn waits(&self, rank: usize) -> bool {
        self.lines.get(&rank).is_some_and(|line| {
            !line.report.waits_for.is_empty() || line.report.calls.iter().any(is_unfinished)
        })
    }

    /// Whether another rank found the process of a rank stopped.
    pub(super) fn was_stopped(&self, rank: usize) -> bool {
        let processes = self.lines.values().flat_map(|line| &line.processes);
        let mut of_rank = processes.filter(|(of, _)| **of == rank);
        of_rank.any(|(_, process)| is_stopped(&process.state))
    }

    /// The groups that ranks reported calls of.
    fn groups(&self) -> BTreeSet<GroupKey<'_>> {
        let calls = self.lines.values().flat_map(|line| {
            let keys = line.report.calls.iter();
            keys.filter_map(move |call| {
                members(line, &call.group).map(|of| (call.group.as_str(), of))
            })
        });
        calls.collect()
    }

    /// The calls of all members together.
    fn in_groups(&self) -> Vec<Finding> {
        let mut found = Vec::new();
        for (group, of) in self.groups() {
            let reported = of
                .iter()
                .filter_map(|rank| Some((*rank, self.lines.get(rank)?)));
            let calls: BTreeMap<usize, Vec<&ReportedCall>> = reported
                .map(|(rank, line)| {
                    let own = line.report.calls.iter();
                    let own =
                        own.filter(|call| call.group == group && call.call.op != Collective::Send);
                    (rank, own.collect())
                })
                .collect();
            let what = differ(&calls).or_else(|| not_entered(of, &calls));
            found.extend(what.map(|(what, seconds)| Finding {
                group: group.to_string(),
                what,
                seconds,
            }));
        }
        found
    }

    /// Messages between two ranks, whose numbers are those of the pair.
    fn in_pairs(&self) -> impl Iterator<Item = Finding> {
        self.lines.iter().filter_map(|(rank, line)| {
            let waiting =
                |call: &&ReportedCall| is_unfinished(call) && call.call.op == Collective::Send;
            let call = line.report.calls.iter().rfind(waiting)?;
            (!line.report.waits_for.is_empty()).then(|| Finding {
                group: call.group.clone(),
                what: What::NotEntered {
                    call: call.call.clone(),
                    waiting: vec![*rank],
                    absent: line.report.waits_for.clone(),
                },
                seconds: call.seconds,
            })
        })
    }
}

impl What {
    /// The ranks that others wait for.
    fn absent(&self) -> impl Iterator<Item = usize> {
        let absent: &[usize] = match self {
            Self::Differ(_) => &[],
            Self::NotEntered { absent, .. } => absent,
        };
        absent.iter().copied()
    }
}

fn is_unfinished(call: &ReportedCall) -> bool {
    call.state != CallState::Done
}

/// The members of a rank's group. Its calls on GPUs have a group of their own with the same members.
fn members<'a>(line: &'a HangLine, group: &str) -> Option<&'a [usize]> {
    let groups = &line.report.groups;
    groups.get(group).map(Vec::as_slice)
}

/// The first number with which members made different calls.
fn differ(calls: &BTreeMap<usize, Vec<&ReportedCall>>) -> Option<(What, f64)> {
    let mut by_number: BTreeMap<u64, Vec<(usize, &ReportedCall)>> = BTreeMap::new();
    for (rank, own) in calls {
        for call in own {
            by_number
                .entry(call.call.seq)
                .or_default()
                .push((*rank, *call));
        }
    }
    for same in by_number.into_values() {
        let mut kinds: Vec<(Call, Vec<usize>)> = Vec::new();
        for (rank, call) in &same {
            match kinds.iter_mut().find(|(kind, _)| kind.agrees(&call.call)) {
                Some((_, ranks)) => ranks.push(*rank),
                None => kinds.push((call.call.clone(), vec![*rank])),
            }
        }
        if kinds.len() > 1 {
            // Most ranks are right.
            kinds.sort_by_key(|(_, ranks)| usize::MAX - ranks.len());
            let seconds = same.iter().map(|(_, call)| call.seconds);
            return Some((What::Differ(kinds), seconds.fold(0.0, f64::max)));
        }
    }
    None
}

/// The first call that some members wait in and others have not made.
fn not_entered(of: &[usize], calls: &BTreeMap<usize, Vec<&ReportedCall>>) -> Option<(What, f64)> {
    let unfinished = calls.values().flatten().filter(|call| is_unfinished(call));
    let first = unfinished.min_by_key(|call| call.call.seq)?;
    let seq = first.call.seq;
    let in_it = |rank: &usize| {
        let own = calls.get(rank)?;
        own.iter()
            .find(|call| call.call.seq == seq && is_unfinished(call))
    };
    let has_made = |rank: &usize| {
        let last = calls.get(rank).and_then(|own| own.last());
        last.is_some_and(|last| last.call.seq >= seq)
    };
    let waiting: Vec<usize> = of
        .iter()
        .copied()
        .filter(|rank| in_it(rank).is_some())
        .collect();
    let absent: Vec<usize> = of.iter().copied().filter(|rank| !has_made(rank)).collect();
    let seconds = of.iter().filter_map(in_it).map(|call| call.seconds);
    let seconds = seconds.fold(0.0, f64::max);
    let call = first.call.clone();
    (!absent.is_empty()).then_some((
        What::NotEntered {
            call,
            waiting,
            absent,
        },
        seconds,
    ))
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;
    use megaburn_collective::{HeardCall, RankReport, ReduceOp};

    use super::{super::line::ProcessState, *};

    const SUM: Collective = Collective::AllReduce(ReduceOp::Sum);

    fn call(op: Collective, seq: u64) -> Call {
        Call {
            op,
            seq,
            dtype: DType::F32,
            shape: vec![4],
        }
    }

    fn reported(group: &str, op: Collective, seq: u64, state: CallState) -> ReportedCall {
        ReportedCall {
            group: group.into(),
            call: call(op, seq),
            state,
            seconds: 60.0,
        }
    }

    /// The line of a rank of four with tp 2 and dp 2.
    fn line(rank: usize, calls: Vec<ReportedCall>, waits_for: &[usize]) -> HangLine {
        let tp = vec![rank / 2 * 2, rank / 2 * 2 + 1];
        let dp = vec![rank % 2, rank % 2 + 2];
        let world = (0..4).collect();
        let groups = [("tp", tp), ("dp", dp), ("world", world)];
        HangLine {
            host: "h".into(),
            report: RankReport {
                rank,
                world_size: 4,
                groups: groups.map(|(name, of)| (name.to_string(), of)).into(),
                calls,
                waits_for: waits_for.to_vec(),
                ..RankReport::default()
            },
            ..HangLine::default()
        }
    }

    /// Rank 3 is stuck: rank 2 waits for it, rank 0 for rank 2, and rank 1 for rank 3.
    #[test]
    fn the_rank_that_waits_for_no_other_is_found() {
        let done = |group| reported(group, SUM, 7, CallState::Done);
        let waits = |group| reported(group, SUM, 8, CallState::Failed);
        let lines = vec![
            line(0, vec![done("dp"), waits("dp")], &[2]),
            line(1, vec![done("dp"), waits("dp")], &[3]),
            line(2, vec![done("dp"), done("tp"), waits("tp")], &[3]),
            line(3, vec![done("dp"), done("tp")], &[]),
        ];
        let analysis = HangAnalysis::of(lines);
        assert_eq!(analysis.look_at, [3]);
        // What rank 0 waits for says less, so it is the last.
        let absent: Vec<Vec<usize>> = analysis
            .findings
            .iter()
            .map(|finding| finding.what.absent().collect())
            .collect();
        assert_eq!(absent, [vec![3], vec![3], vec![2]]);
        let text = analysis.to_string();
        let first =
            "first    dp all_reduce(sum) #8 of F32 [4]: rank 1 waits (60.0 s), rank 3 has not";
        assert!(text.contains(first), "{text}");
    }

    #[test]
    fn a_stopped_rank_is_described_by_what_others_know() {
        let waits = || vec![reported("world", SUM, 8, CallState::Waiting)];
        let mut lines: Vec<_> = [0, 1, 3].map(|rank| line(rank, waits(), &[2])).into();
        let state = "is stopped".to_string();
        lines[1].processes = [(2, ProcessState { pid: 77, state })].into();
        lines[0].report.heard = vec![HeardCall {
            from: 2,
            group: "world".into(),
            call: call(SUM, 7),
        }];
        let analysis = HangAnalysis::of(lines);
        assert_eq!(
            (&analysis.silent[..], &analysis.look_at[..]),
            (&[2][..], &[2][..])
        );
        let text = analysis.to_string();
        let known = "rank 2   no report: process 77 on h is stopped; rank 0 received its world \
            all_reduce(sum) #7 of F32 [4]";
        assert!(text.contains(known), "{text}");
    }

    /// A launcher lets a stopped rank continue to end it, and then it enters the collective, too.
    #[test]
    fn a_rank_that_was_stopped_is_found_although_it_reports() {
        let waits = || vec![reported("world", SUM, 8, CallState::Failed)];
        let mut lines: Vec<_> = (0..4).map(|rank| line(rank, waits(), &[2])).collect();
        for (rank, state) in [(1, "sleeps"), (2, "is stopped"), (3, "runs")] {
            let state = state.to_string();
            lines[0]
                .processes
                .insert(rank, ProcessState { pid: 77, state });
        }
        let analysis = HangAnalysis::of(lines);
        assert_eq!(analysis.look_at, [2]);
        let text = analysis.to_string();
        let found = text
            .lines()
            .find(|line| line.starts_with("look at  rank 2: "));
        assert!(found.is_some_and(|line| line.ends_with("; rank 0 found that it is stopped")));
        assert!(!text.contains("nothing "), "{text}");
    }

    #[test]
    fn calls_that_differ_come_first_with_those_who_made_them() {
        let early = |op, state| reported("world", op, 3, state);
        let late = |state| reported("world", SUM, 9, state);
        let lines = (0..4).map(|rank| {
            let op = if rank == 2 {
                Collective::AllGather
            } else {
                SUM
            };
            line(
                rank,
                vec![early(op, CallState::Done), late(CallState::Failed)],
                &[],
            )
        });
        let analysis = HangAnalysis::of(lines.collect());
        let calls = vec![
            (call(SUM, 3), vec![0, 1, 3]),
            (call(Collective::AllGather, 3), vec![2]),
        ];
        assert_eq!(analysis.findings[0].what, What::Differ(calls));
    }

    #[test]
    fn a_message_of_a_pipeline_leads_to_its_sender() {
        let recv = reported("pp", Collective::Send, 5, CallState::Failed);
        let lines = vec![line(0, vec![recv], &[1]), line(1, vec![], &[])];
        assert_eq!(HangAnalysis::of(lines).look_at, [1]);
    }
}
