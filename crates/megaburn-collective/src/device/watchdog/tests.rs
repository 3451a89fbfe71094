use std::{
    sync::{Arc, OnceLock},
    thread,
    time::{Duration, Instant},
};

use burn::tensor::DType;

use super::{GroupStatus, Watchdog};
use crate::{
    busy::Phase,
    call::{Call, Collective, ReduceOp},
    device::watched::Watched,
    error::CollectiveError,
    options::GroupOptions,
    recorder::FlightRecorder,
    threads::ThreadTransport,
    transport::Transport,
};

const CHANNEL: u64 = 77;

/// One rank, its watch and its group, without a GPU.
struct Rank {
    watch: Watchdog,
    transport: Arc<ThreadTransport>,
    recorder: Arc<FlightRecorder>,
    failure: Arc<OnceLock<CollectiveError>>,
    group: Arc<Watched>,
    oldest: Option<(u64, Instant)>,
}

fn world(size: usize, timeout: Duration) -> Vec<Rank> {
    let rank = |transport: ThreadTransport| {
        let transport = Arc::new(transport);
        let recorder = Arc::new(FlightRecorder::default());
        let failure = Arc::new(OnceLock::new());
        let rank = transport.rank();
        let members = (0..size).collect();
        let group = Arc::new(Watched::new("tp", rank, members, CHANNEL, timeout));
        let groups = super::Groups::default();
        groups.lock().unwrap().push(group.clone());
        let watch = Watchdog::new(transport.clone(), recorder.clone(), failure.clone(), groups);
        Rank {
            watch,
            transport,
            recorder,
            failure,
            group,
            oldest: None,
        }
    };
    ThreadTransport::world(size, GroupOptions::default())
        .into_iter()
        .map(rank)
        .collect()
}

impl Rank {
    /// Makes a call that its GPU does not complete.
    fn call(&mut self, op: Collective, seq: u64, shape: &[usize]) {
        let call = Call {
            op,
            seq,
            dtype: DType::F32,
            shape: shape.to_vec(),
        };
        self.group.log().push(&call);
        let id = self.recorder.start("tp", &call);
        self.oldest.get_or_insert((id, Instant::now()));
    }

    fn look(&mut self, after: Duration) -> Option<String> {
        let standing = GroupStatus {
            key: CHANNEL,
            oldest: self.oldest,
            ..Default::default()
        };
        self.watch.look(Instant::now() + after, &[standing])
    }
}

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn calls_that_end_are_nobodys_trouble() {
    let mut ranks = world(2, 10 * SECOND);
    for rank in &mut ranks {
        rank.call(Collective::AllReduce(ReduceOp::Sum), 0, &[3]);
        let finished = vec![rank.oldest.unwrap().0];
        let standing = GroupStatus {
            key: CHANNEL,
            finished,
            ..Default::default()
        };
        assert_eq!(rank.watch.look(Instant::now(), &[standing]), None);
        rank.oldest = None;
        assert_eq!(rank.look(100 * SECOND), None);
        assert!(rank.recorder.records()[0].to_string().contains("done"));
    }
}

#[test]
fn a_dead_rank_ends_the_others_at_once() {
    let mut ranks = world(3, 600 * SECOND);
    ranks
        .iter_mut()
        .for_each(|rank| rank.call(Collective::AllGather, 4, &[3, 5]));
    ranks[1]
        .transport
        .die("its connection closed without a message; it may have been killed");
    for rank in [0, 2] {
        let text = ranks[rank].look(Duration::ZERO).unwrap();
        let named = format!("rank {rank}, group tp: all_gather #4 of F32 [3, 5] lost rank 1");
        assert!(text.contains(&named), "{text}");
        // Later looks return the same error.
        assert_eq!(ranks[rank].look(Duration::ZERO), Some(text));
    }
}

#[test]
fn a_rank_that_does_not_answer_is_named_when_the_time_is_over() {
    let mut ranks = world(3, 10 * SECOND);
    ranks
        .iter_mut()
        .for_each(|rank| rank.call(Collective::AllReduce(ReduceOp::Sum), 0, &[3]));
    // Rank 1 is stopped: it never looks.
    for second in 1..10 {
        for rank in [0, 2] {
            assert_eq!(ranks[rank].look(second * SECOND), None, "after {second} s");
        }
    }
    let text = ranks[2].look(10 * SECOND + SECOND / 2).unwrap();
    assert!(
        text.contains("timed out after 10.0 s waiting for rank 1"),
        "{text}"
    );
    let echo = ranks[0].look(10 * SECOND + SECOND / 2).unwrap();
    assert!(
        echo.contains("ended by rank 2") && echo.contains("waiting for rank 1"),
        "{echo}"
    );
}

#[test]
fn a_rank_that_has_not_made_the_call_is_named_when_the_time_is_over() {
    let mut ranks = world(3, 10 * SECOND);
    for (rank, calls) in [(0, 2), (1, 2), (2, 1)] {
        (0..calls)
            .for_each(|seq| ranks[rank].call(Collective::AllReduce(ReduceOp::Sum), seq, &[3]));
        // The first call has ended.
        let (first, _) = ranks[rank].oldest.unwrap();
        ranks[rank].oldest = (calls == 2).then_some((first + 1, Instant::now()));
    }
    for second in 1..10 {
        ranks
            .iter_mut()
            .for_each(|rank| assert_eq!(rank.look(second * SECOND), None));
    }
    let text = ranks[0].look(11 * SECOND).unwrap();
    assert!(
        text.contains("all_reduce(sum) #1") && text.contains("waiting for rank 2"),
        "{text}"
    );
}

#[test]
fn a_rank_that_works_on_something_long_is_waited_for_until_it_does_not_answer() {
    let mut ranks = world(3, 10 * SECOND);
    (0..2).for_each(|rank| ranks[rank].call(Collective::AllReduce(ReduceOp::Sum), 0, &[3]));
    // Rank 2 has made no call of this group yet: it compiles kernels.
    ranks[2].transport.activity().enter(Phase::Start);
    for second in 1..30 {
        ranks
            .iter_mut()
            .for_each(|rank| assert_eq!(rank.look(second * SECOND), None));
    }
    // Then rank 2 is stopped.
    let ends = (30..40).find_map(|second| ranks[0].look(second * SECOND));
    let text = ends.unwrap();
    assert!(text.contains("waiting for rank 2"), "{text}");
}

#[test]
fn ranks_that_made_other_calls_are_told_both_long_before_the_time_is_over() {
    let mut ranks = world(2, 600 * SECOND);
    ranks[0].call(Collective::AllReduce(ReduceOp::Sum), 0, &[3]);
    ranks[1].call(Collective::AllReduce(ReduceOp::Sum), 0, &[4]);
    // Both ranks ask, then both read.
    let looks = (0..4).flat_map(|i| [0, 1].map(|rank| (rank, i)));
    let found: Vec<_> = looks
        .filter_map(|(rank, i)| ranks[rank].look(SECOND * (i + 1)))
        .collect();
    let text = &found[0];
    assert!(text.contains("ranks disagree"), "{text}");
    assert!(
        text.contains("F32 [3]") && text.contains("F32 [4]"),
        "{text}"
    );
    assert!(ranks.iter().all(|rank| rank.failure.get().is_some()));
}

#[test]
fn an_error_on_the_gpu_waits_a_moment_for_its_cause() {
    let mut ranks = world(2, 600 * SECOND);
    ranks
        .iter_mut()
        .for_each(|rank| rank.call(Collective::AllReduce(ReduceOp::Sum), 0, &[3]));
    let fault = Some("NCCL failed: remote process exited".to_string());
    let standing = |rank: &Rank| GroupStatus {
        key: CHANNEL,
        oldest: rank.oldest,
        fault: fault.clone(),
        ..Default::default()
    };
    let (first, other) = ranks.split_at_mut(1);
    let standings = [standing(&first[0])];
    assert_eq!(first[0].watch.look(Instant::now(), &standings), None);
    let later = Instant::now() + SECOND;
    let text = first[0].watch.look(later, &standings).unwrap();
    assert!(
        text.contains("failed on the GPU: NCCL failed: remote process"),
        "{text}"
    );
    let echo = other[0].look(Duration::ZERO).unwrap();
    assert!(
        echo.contains("ended by rank 0") && echo.contains("remote process"),
        "{echo}"
    );
}

#[test]
fn a_member_that_left_ends_who_waits_for_it() {
    let mut ranks = world(2, 600 * SECOND);
    ranks[0].call(Collective::AllReduce(ReduceOp::Sum), 0, &[3]);
    ranks[1].transport.leave("it finished and left");
    assert_eq!(ranks[0].look(SECOND / 2), None);
    let text = ranks[0].look(2 * SECOND).unwrap();
    assert!(text.contains("lost rank 1: it finished and left"), "{text}");
}

#[test]
fn failures_of_the_host_end_the_gpu_too() {
    let mut ranks = world(2, 600 * SECOND);
    ranks[0].call(Collective::AllReduce(ReduceOp::Sum), 0, &[3]);
    let aborting = ranks.remove(1);
    thread::spawn(move || aborting.transport.abort(1, "its disk is full", false))
        .join()
        .unwrap();
    let text = ranks[0].look(Duration::ZERO).unwrap();
    assert!(
        text.contains("ended by rank 1") && text.contains("its disk is full"),
        "{text}"
    );
}
