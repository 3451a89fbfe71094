//! Profiles of runs on the CPU: the trace, the table, and that a run is the same with them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::PathBuf,
};

use megaburn::report::profile::{CallPlace, RankTrace, Summary, Trace, read_chrome};
use megaburn_test_support::run::Run;
use rstest::rstest;

use super::child::{Ended, Ranks};

const STEPS: u64 = 6;

/// The trace of the run's profile of steps `first` to `last`.
fn path(run: &Run, first: u64, last: u64) -> PathBuf {
    run.path(&format!("run/profile/steps-{first}-{last}.trace.json"))
}

/// The parts of a rank's host thread: those of its steps, and the collectives that it waits in.
fn host_parts(rank: &RankTrace) -> Vec<(u64, u64, &str)> {
    let spans = rank.spans.iter();
    let spans = spans.map(|span| (span.start, span.end, span.name.as_str()));
    let calls = rank
        .calls
        .iter()
        .filter(|call| call.place == CallPlace::Host);
    let calls = calls.map(|call| (call.start, call.end, "collective"));
    let mut parts: Vec<_> = spans.chain(calls).collect();
    parts.sort_by_key(|(start, end, _)| (*start, u64::MAX - *end));
    parts
}

/// Each part is inside another one, or after it.
fn check_nesting(rank: &RankTrace) {
    let mut open: Vec<(u64, u64, &str)> = Vec::new();
    for part in host_parts(rank) {
        let (start, end, _) = part;
        assert!(start <= end, "{part:?}");
        while open.last().is_some_and(|(_, outer, _)| *outer <= start) {
            open.pop();
        }
        if let Some(outer) = open.last() {
            assert!(end <= outer.1, "{part:?} ends after {outer:?}");
        }
        open.push(part);
    }
}

/// The numbers of the collectives of each group, apart from those of two ranks.
fn calls(rank: &RankTrace) -> BTreeMap<&str, Vec<(u64, &str, u64)>> {
    let mut found: BTreeMap<&str, Vec<_>> = BTreeMap::new();
    for call in rank.calls.iter().filter(|call| call.op != "send/recv") {
        let group = found.entry(call.group.as_str()).or_default();
        group.push((call.seq, call.op.as_str(), call.bytes));
    }
    found
}

/// No collective is missing: each group counts its calls, and all its members make the same ones.
fn check_calls(trace: &Trace, same: &[(&str, [usize; 2])]) {
    for rank in &trace.ranks {
        for (group, calls) in calls(rank) {
            let first = calls[0].0;
            let numbers: Vec<u64> = calls.iter().map(|(seq, ..)| *seq).collect();
            let expected: Vec<u64> = (first..first + calls.len() as u64).collect();
            assert_eq!(numbers, expected, "{group} on rank {}", rank.rank);
        }
    }
    for (group, ranks) in same {
        let [a, b] = ranks.map(|rank| calls(&trace.ranks[rank]));
        assert!(a[group].len() > 1, "{group}: {:?}", a[group]);
        assert_eq!(a[group], b[group], "{group}");
    }
}

fn check_steps(run: &Run, trace: &Trace, steps: &[u64]) {
    let metrics = run.steps();
    for rank in &trace.ranks {
        let found: Vec<_> = rank.steps().collect();
        let numbers: Vec<u64> = found.iter().map(|(step, _)| *step).collect();
        assert_eq!(numbers, steps, "rank {}", rank.rank);
    }
    for (at, step) in steps.iter().enumerate() {
        let metrics = metrics
            .iter()
            .find(|metrics| metrics.step == *step)
            .unwrap();
        // The metrics have the time of the rank that began the step first, until the ranks agree on
        // it. After that there is little to do, but a busy machine may be slow at it.
        let seconds = metrics.tokens as f64 / metrics.tokens_per_second;
        let spans = trace.ranks.iter().filter_map(|rank| rank.steps().nth(at));
        let longest = spans.map(|(_, [begin, end])| end - begin).max().unwrap() as f64 / 1e9;
        assert!(
            longest > 0.99 * seconds && longest < 2.0 * seconds + 1.0,
            "step {step}: {longest} s, not {seconds}"
        );
    }
    let first = &trace.ranks[0];
    for rank in &trace.ranks {
        // Ranks do each step together, so their clocks agree.
        for ((_, mine), (_, theirs)) in first.steps().zip(rank.steps()) {
            assert!(
                mine[0] < theirs[1] && theirs[0] < mine[1],
                "{mine:?} {theirs:?}"
            );
        }
    }
}

/// The parts of a step add up to its time.
fn check_sums(summary: &Summary) {
    for rank in &summary.ranks {
        let sum: f64 = rank.host.parts().iter().map(|(_, time)| time).sum();
        assert!((sum - rank.step).abs() < 0.01 * rank.step, "{rank:?}");
        assert!(
            rank.host.parts().iter().all(|(_, time)| *time >= 0.0),
            "{rank:?}"
        );
        for part in [
            rank.host.forward,
            rank.host.backward,
            rank.host.communication,
        ] {
            assert!(part > 0.0, "{rank:?}");
        }
        assert!(rank.gpu.is_none());
    }
}

fn profiled(layout: &str, args: &[&str]) -> (Run, Vec<Ended>) {
    let run = Run::new();
    let mut all = run.args(layout, STEPS, &["train.checkpoint_interval=3"]);
    all.extend(args.iter().map(ToString::to_string));
    let ended = Ranks::threads(&all).finish();
    (run, ended)
}

#[rstest]
#[case("tp2-dp2-sp", &[("tp", [0, 1]), ("dp-cp", [0, 2])])]
#[case("pp2", &[("world", [0, 1])])]
fn a_profile_has_every_part_and_collective_and_changes_no_bit(
    #[case] layout: &str,
    #[case] same: &[(&str, [usize; 2])],
) {
    let (run, ended) = profiled(layout, &["--profile", "steps=2-4"]);
    let (plain, _) = profiled(layout, &[]);
    assert_eq!(run.numbers(), plain.numbers());
    for step in [3, STEPS] {
        assert!(run.tensors(step) == plain.tensors(step), "step {step}");
    }
    assert!(!plain.path("run/profile").exists());

    let file = path(&run, 2, 4);
    let trace = read_chrome(&file).unwrap();
    assert_eq!(trace.ranks.len(), if layout == "pp2" { 2 } else { 4 });
    assert_eq!(trace.layout, layout);
    assert_eq!(trace.notes, Vec::<String>::new());
    trace.ranks.iter().for_each(check_nesting);
    check_calls(&trace, same);
    check_steps(&run, &trace, &[2, 3, 4]);
    let summary = Summary::of(&trace);
    check_sums(&summary);
    assert!(summary.slowest_rank.is_some() && summary.kernels.is_empty());
    for rank in &trace.ranks {
        let names: BTreeSet<&str> = rank.spans.iter().map(|span| span.name.as_str()).collect();
        let parts = [
            "step", "data", "forward", "backward", "reduce", "update", "wait", "save",
        ];
        for part in parts {
            assert!(names.contains(&part), "{part} is not in {names:?}");
        }
        // 8 samples in micro-batches of 1.
        let passes = if layout == "pp2" { 8 } else { 4 };
        for pass in ["forward", "backward"] {
            let passes_found = rank.spans.iter().filter(|span| span.name == pass);
            let numbers: Vec<u64> = passes_found.map(|span| span.numbers[0].1).collect();
            assert_eq!(numbers.len(), 3 * passes, "{pass} on rank {}", rank.rank);
            assert_eq!(numbers.iter().max(), Some(&(passes as u64 - 1)));
        }
        let sends = rank
            .calls
            .iter()
            .filter(|call| call.op == "send/recv")
            .count();
        assert_eq!(sends > 0, layout == "pp2");
        assert!(rank.calls.iter().all(|call| !call.dtype.is_empty()));
    }

    // The table is printed, stands next to the trace, and is printed again from it.
    let text = fs::read_to_string(file.with_file_name("steps-2-4.txt")).unwrap();
    let printed = text.lines().filter(|line| !line.is_empty());
    for line in printed {
        assert!(
            ended[0].stdout.contains(line),
            "{line}: {}",
            ended[0].stdout
        );
    }
    let again = Ranks::command(&["profile", &file.display().to_string()]).finish();
    assert_eq!(again[0].stdout.trim_end(), text.trim_end());
    let json = fs::read_to_string(file.with_file_name("steps-2-4.json")).unwrap();
    let read: Summary = serde_json::from_str(&json).unwrap();
    assert_eq!(read.ranks.len(), summary.ranks.len());
    assert!((read.median.step - summary.median.step).abs() < 1e-3);
}

/// Each process has a clock of its own.
#[test]
fn the_clocks_of_processes_are_those_of_rank_0() {
    let run = Run::new();
    let args = run.args("dp2", STEPS, &["profile.steps=\"3\""]);
    let ended = Ranks::processes(2, &args).finish();
    let trace = read_chrome(&path(&run, 3, 3)).unwrap();
    assert_eq!(trace.ranks.len(), 2);
    check_steps(&run, &trace, &[3]);
    trace.ranks.iter().for_each(check_nesting);
    check_calls(&trace, &[("world", [0, 1])]);
    // Only rank 0 prints the table.
    assert!(ended[0].stdout.contains("slowest  rank"), "{ended:?}");
    assert!(!ended[1].stdout.contains("slowest  rank"), "{ended:?}");
}

#[test]
fn a_run_that_stops_within_the_steps_has_those_that_were_done() {
    let (run, ended) = profiled(
        "tp1",
        &["--profile", "steps=4-9", "--set", "train.exit_at_step=5"],
    );
    let trace = read_chrome(&path(&run, 4, 5)).unwrap();
    check_steps(&run, &trace, &[4, 5]);
    assert!(!ended[0].stdout.contains("slowest"), "{ended:?}");
    // The rest comes from the next start.
    let args = run.args("tp1", STEPS, &["profile.steps=\"4-9\""]);
    Ranks::threads(&args).finish();
    let trace = read_chrome(&path(&run, 6, 6)).unwrap();
    check_steps(&run, &trace, &[6]);
}

#[rstest]
#[case(&["train", "--profile", "layers"], "`profile.steps` is layers: it must be a step or")]
#[case(&["profile", "/nowhere/trace.json"], "cannot read `/nowhere/trace.json`")]
fn what_cannot_be_profiled_is_refused(#[case] args: &[&str], #[case] why: &str) {
    let ended = Ranks::command(args).wait_all().remove(0);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.stderr.contains(why), "{ended:?}");
}

#[test]
fn files_of_others_are_kept() {
    let run = Run::new();
    let folder = run.path("run/profile");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("steps-1-1.txt"), "mine").unwrap();
    let sets = ["profile.steps=\"1\"", "run.allow_other_files=true"];
    let args = run.args("tp1", 2, &sets);
    Ranks::threads(&args).finish();
    assert_eq!(
        fs::read_to_string(folder.join("steps-1-1.txt")).unwrap(),
        "mine"
    );
    let trace = read_chrome(&folder.join("steps-1-1-2.trace.json")).unwrap();
    assert_eq!(trace.ranks[0].steps().count(), 1);
}
