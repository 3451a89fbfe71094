//! A schedule that was tampered with is refused, unless it is still sound.

use std::collections::BTreeMap;

use megaburn_pipeline::{
    Action, Costs, Links, Op, PipelineError, Schedule, ScheduleConfig, ScheduleKind, Stages,
};
use proptest::{collection::vec, prelude::*, sample::Index};

/// An event in a pipeline: a pass of a stage, or a message to one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Forward(usize, usize),
    Backward(usize, usize),
    Weight(usize, usize),
    Activation(usize, usize),
    Gradient(usize, usize),
}

fn event(stages: Stages, rank: usize, action: Action) -> Event {
    let stage = stages.stage(rank, action.chunk);
    let i = action.micro_batch;
    match action.op {
        Op::Forward => Event::Forward(stage, i),
        Op::Backward | Op::BackwardInput => Event::Backward(stage, i),
        Op::BackwardWeight => Event::Weight(stage, i),
        Op::ReceiveActivation => Event::Activation(stage, i),
        Op::SendActivation => Event::Activation(stage + 1, i),
        Op::ReceiveGradient => Event::Gradient(stage, i),
        Op::SendGradient => Event::Gradient(stage - 1, i),
    }
}

/// The events that an event depends on; only some of them exist in this pipeline.
fn needs(event: Event) -> Vec<Event> {
    match event {
        Event::Forward(0, _) => vec![],
        Event::Forward(s, i) => vec![Event::Activation(s, i), Event::Forward(s - 1, i)],
        Event::Backward(s, i) => {
            vec![
                Event::Forward(s, i),
                Event::Gradient(s, i),
                Event::Backward(s + 1, i),
            ]
        }
        Event::Weight(s, i) => vec![Event::Backward(s, i)],
        Event::Activation(s, i) => vec![Event::Forward(s - 1, i)],
        Event::Gradient(s, i) => vec![Event::Backward(s + 1, i)],
    }
}

/// Whether a reordering of a sound schedule's actions is sound. Unlike the simulator, this checks
/// that the dependency graph has no cycle.
fn has_no_circle(schedule: &Schedule) -> bool {
    let mut after: BTreeMap<Event, Vec<Event>> = BTreeMap::new();
    for (rank, actions) in schedule.ranks.iter().enumerate() {
        let events = actions
            .iter()
            .map(|action| event(schedule.stages, rank, *action));
        let events: Vec<Event> = events.collect();
        for event in &events {
            after.entry(*event).or_default();
        }
        for pair in events.windows(2) {
            after.entry(pair[0]).or_default().push(pair[1]);
        }
    }
    let all: Vec<Event> = after.keys().copied().collect();
    for event in &all {
        for needed in needs(*event) {
            after.entry(needed).and_modify(|after| after.push(*event));
        }
    }
    let mut missing: BTreeMap<Event, usize> = all.iter().map(|event| (*event, 0)).collect();
    for event in after.values().flatten() {
        *missing.get_mut(event).unwrap() += 1;
    }
    let mut ready: Vec<Event> = all
        .iter()
        .copied()
        .filter(|event| missing[event] == 0)
        .collect();
    let mut done = 0;
    while let Some(event) = ready.pop() {
        done += 1;
        for next in &after[&event] {
            let missing = missing.get_mut(next).unwrap();
            *missing -= 1;
            ready.extend((*missing == 0).then_some(*next));
        }
    }
    done == all.len()
}

fn schedules() -> impl Strategy<Value = Schedule> {
    let kind = prop::sample::select(ScheduleKind::ALL.to_vec());
    (kind, 1..=5_usize, 1..=3_usize, 1..=7_usize).prop_filter_map("no such schedule", |sizes| {
        let (kind, num_ranks, num_chunks, num_micro_batches) = sizes;
        let config = ScheduleConfig::new(kind, num_ranks, num_micro_batches);
        config.with_num_chunks(num_chunks).build().ok()
    })
}

fn place(schedule: &Schedule, rank: Index, index: Index) -> (usize, usize) {
    let rank = rank.index(schedule.ranks.len());
    (rank, index.index(schedule.ranks[rank].len()))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(1000) })]

    #[test]
    fn an_action_less_is_refused(
        schedule in schedules(), rank in any::<Index>(), index in any::<Index>(),
    ) {
        let mut broken = schedule;
        let (rank, index) = place(&broken, rank, index);
        let action = broken.ranks[rank].remove(index);
        let expected = PipelineError::Count { rank, action, found: 0, expected: 1 };
        prop_assert_eq!(broken.prove(), Err(expected));
    }

    #[test]
    fn an_action_more_is_refused(
        schedule in schedules(), rank in any::<Index>(), [from, to] in any::<[Index; 2]>(),
    ) {
        let mut broken = schedule;
        let (rank, index) = place(&broken, rank, from);
        let action = broken.ranks[rank][index];
        let to = to.index(broken.ranks[rank].len() + 1);
        broken.ranks[rank].insert(to, action);
        let expected = PipelineError::Count { rank, action, found: 2, expected: 1 };
        prop_assert_eq!(broken.prove(), Err(expected));
    }

    #[test]
    fn another_action_is_refused(
        schedule in schedules(), rank in any::<Index>(), index in any::<Index>(),
        op in prop::sample::select(Op::ALL.to_vec()), micro_batch in 0..8_usize, chunk in 0..4_usize,
    ) {
        let mut broken = schedule.clone();
        let (rank, index) = place(&broken, rank, index);
        broken.ranks[rank][index] = Action { op, micro_batch, chunk };
        prop_assert_eq!(broken.prove().is_ok(), broken == schedule);
    }

    #[test]
    fn a_transfer_that_both_ends_forget_is_refused(
        schedule in schedules(), index in any::<Index>(),
    ) {
        let mut broken = schedule;
        let actions = broken.ranks.iter().enumerate().flat_map(|(r, all)| all.iter().map(move |a| (r, a)));
        let messages: Vec<_> =
            actions.filter_map(|(rank, action)| broken.stages.message(rank, *action)).collect();
        prop_assume!(!messages.is_empty());
        let message = Some(*index.get(&messages));
        let stages = broken.stages;
        for (rank, actions) in broken.ranks.iter_mut().enumerate() {
            actions.retain(|action| stages.message(rank, *action) != message);
        }
        let is_count = matches!(broken.prove(), Err(PipelineError::Count { .. }));
        prop_assert!(is_count);
    }

    /// Up to three swaps within ranks.
    #[test]
    fn swapped_actions_are_refused_unless_nothing_waits_in_a_circle(
        schedule in schedules(), swaps in vec(any::<[Index; 3]>(), 1..4),
    ) {
        let mut broken = schedule;
        for [rank, a, b] in swaps {
            let (rank, a) = place(&broken, rank, a);
            let b = b.index(broken.ranks[rank].len());
            broken.ranks[rank].swap(a, b);
        }
        prop_assert_eq!(broken.prove().is_ok(), has_no_circle(&broken), "{:?}", broken.prove());
    }

    #[test]
    fn neighbours_that_change_places_are_refused_unless_nothing_waits_in_a_circle(
        schedule in schedules(), rank in any::<Index>(), index in any::<Index>(),
    ) {
        let mut broken = schedule;
        let (rank, index) = place(&broken, rank, index);
        let next = (index + 1).min(broken.ranks[rank].len() - 1);
        broken.ranks[rank].swap(index, next);
        prop_assert_eq!(broken.prove().is_ok(), has_no_circle(&broken), "{:?}", broken.prove());
    }
}

/// 1F1B in its naive form: each receive just before it is needed.
#[test]
fn sends_that_wait_for_each_other_are_a_deadlock_and_are_named() {
    let mut schedule = ScheduleConfig::new(ScheduleKind::OneForwardOneBackward, 2, 3)
        .build()
        .unwrap();
    for actions in &mut schedule.ranks {
        let is_receive = |op| matches!(op, Op::ReceiveActivation | Op::ReceiveGradient);
        let receives: Vec<Action> = actions
            .iter()
            .copied()
            .filter(|action| is_receive(action.op))
            .collect();
        actions.retain(|action| !is_receive(action.op));
        for receive in receives {
            let user = match receive.op {
                Op::ReceiveActivation => Op::Forward,
                _ => Op::Backward,
            };
            let user = Action {
                op: user,
                ..receive
            };
            let index = actions.iter().position(|action| *action == user).unwrap();
            actions.insert(index, receive);
        }
    }
    let costs = [Costs::UNIT; 2];
    let error = schedule.simulate(&costs, Links::Rendezvous).unwrap_err();
    assert_eq!(schedule.prove(), Err(error.clone()));
    assert_eq!(
        error.to_string(),
        "deadlock: rank 0 waits for rank 1 at action 3, the send of the activation of micro-batch \
         1 in chunk 0; rank 1 waits for rank 0 at action 3, the send of the gradient of \
         micro-batch 0 in chunk 0"
    );
    let timing = schedule.simulate(&costs, Links::PrePosted).unwrap();
    assert_eq!(timing.makespan(), 12, "with receives posted ahead it runs");
}

#[test]
fn messages_in_another_order_than_they_are_received_are_named() {
    let mut schedule = ScheduleConfig::new(ScheduleKind::ForwardOnly, 2, 2)
        .build()
        .unwrap();
    schedule.ranks[0] = [
        (Op::Forward, 0),
        (Op::Forward, 1),
        (Op::SendActivation, 1),
        (Op::SendActivation, 0),
    ]
    .map(|(op, micro_batch)| Action::new(op, micro_batch, 0))
    .into();
    let error = schedule.prove().unwrap_err().to_string();
    let expected = "transfer 0 from rank 0 to rank 1: the activation of micro-batch 1 for stage 1 \
                    is sent, but the activation of micro-batch 0 for stage 1 is received";
    assert_eq!(error, expected);
}

#[test]
fn lists_and_costs_for_another_number_of_ranks_are_named() {
    let mut schedule = ScheduleConfig::new(ScheduleKind::ZbH1, 3, 2)
        .build()
        .unwrap();
    let error = schedule
        .simulate(&[Costs::UNIT; 2], Links::PrePosted)
        .unwrap_err();
    assert_eq!(
        error,
        PipelineError::Costs {
            found: 2,
            expected: 3
        }
    );
    schedule.ranks.pop();
    assert_eq!(
        schedule.prove(),
        Err(PipelineError::Ranks {
            found: 2,
            expected: 3
        })
    );
}

#[test]
fn a_schedule_survives_being_written_down() {
    let schedule = ScheduleConfig::new(ScheduleKind::ZbV, 3, 7)
        .build()
        .unwrap();
    let text = serde_json::to_string(&schedule).unwrap();
    assert_eq!(serde_json::from_str::<Schedule>(&text).unwrap(), schedule);
}
