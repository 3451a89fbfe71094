use std::{os::unix::process::CommandExt, process::Command, sync::mpsc::channel, thread};

use super::*;

/// A supervisor of one rank whose end is never reported, as if the rank hung in the kernel.
fn held(options: &LaunchOptions) -> Supervisor<'_> {
    // In a group of its own, as a rank is.
    let child = Command::new("sleep").arg("600").process_group(0).spawn();
    let child = child.unwrap();
    let mut run = Supervisor::new(options, 0, None);
    run.add(RankProcess::of(child, 0, 0));
    run
}

#[test]
fn a_rank_that_sigkill_does_not_end_is_left_behind_by_name() {
    let options = LaunchOptions {
        give_up: Duration::from_millis(50),
        ..LaunchOptions::new(1, vec!["sleep".into()])
    };
    let mut run = held(&options);
    let pid = run.ranks[0].pid;
    let begin = Instant::now();
    let (_sender, events) = channel();
    run.kill();
    run.supervise(&events);
    assert!(begin.elapsed() < Duration::from_secs(5));
    run.ranks[0].end();
    let (outcome, waiting) = run.into_outcome();
    assert!(waiting.is_empty());
    let text = outcome.to_string();
    assert!(
        text.contains(&format!("process {pid} is still running")),
        "{text}"
    );
    assert_eq!(outcome.exit_code(), 137);
}

#[test]
fn two_signals_within_a_second_start_no_grace_and_a_later_one_does() {
    let options = LaunchOptions::new(1, vec!["sleep".into()]);
    let mut run = Supervisor::new(&options, 0, None);
    run.forward_signal(15);
    run.forward_signal(2);
    assert_eq!((run.plan, run.signal), (Plan::Wait, Some(15)));
    thread::sleep(Duration::from_millis(1010));
    run.forward_signal(2);
    assert!(
        matches!(run.plan, Plan::Kill(_)) && run.signal == Some(2),
        "{:?}",
        run.plan
    );
}

#[test]
fn ranks_that_stop_with_one_code_have_time_to_end_and_a_failure_among_them_cuts_it_short() {
    let options = LaunchOptions::new(3, vec!["sleep".into()]);
    let mut run = Supervisor::new(&options, 0, None);
    let left = |run: &Supervisor<'_>| match run.plan {
        Plan::Terminate(at) => at.saturating_duration_since(Instant::now()),
        plan => panic!("{plan:?}"),
    };
    for (rank, code) in [(0, 75), (1, 75), (2, 1)] {
        run.ends.push((rank, EndedBy::Code(code), false));
        run.settle();
        assert_eq!(left(&run) > SETTLE, code == 75, "{:?}", run.plan);
    }
}

#[test]
fn a_rank_that_restarts_in_place_has_time_to_close_its_groups() {
    let options = LaunchOptions::new(2, vec!["sleep".into()]);
    let mut run = held(&options);
    let waits = |hangs| {
        FromRank::Waits(WaitReason::LostPeer {
            after_step: 3,
            hangs,
        })
    };
    run.hear(0, &FromRank::Enrolled);
    run.settle();
    let patience = |run: &Supervisor<'_>| match run.plan {
        Plan::Terminate(at) => at.saturating_duration_since(Instant::now()),
        plan => panic!("{plan:?}"),
    };
    assert!(patience(&run) > STOPPING / 2, "{:?}", run.plan);
    run.hear(0, &waits(false));
    assert!(patience(&run) <= SETTLE);
    let (_sender, events) = channel();
    // It neither ended nor runs.
    run.supervise(&events);
    let (outcome, mut waiting) = run.into_outcome();
    assert_eq!(outcome.to_string(), "rank 0 lost another rank");
    assert_eq!(waiting[0].lost_after(), Some(3));
    assert!(waiting[0].is_alive());
    waiting[0].end();
}

#[test]
fn the_others_have_less_time_if_a_rank_hangs() {
    let options = LaunchOptions::new(2, vec!["sleep".into()]);
    let mut run = held(&options);
    let second = held(&options).ranks.remove(0);
    run.add(second);
    run.ranks[1].serial = 1;
    run.ranks
        .iter_mut()
        .for_each(|rank| rank.hear(&FromRank::Enrolled));
    run.hear(
        0,
        &FromRank::Waits(WaitReason::LostPeer {
            after_step: 3,
            hangs: true,
        }),
    );
    let Plan::Terminate(at) = run.plan else {
        panic!("{:?}", run.plan);
    };
    let left = at.saturating_duration_since(Instant::now());
    assert!(left <= SETTLE, "{left:?}");
    for rank in &mut run.ranks {
        rank.end();
    }
}
