//! Proves every schedule up to 8 ranks, 4 chunks and 24 micro-batches, and compares it with its
//! formula.

use megaburn_pipeline::{
    Costs, Links, Op, PipelineError, Placement, Schedule, ScheduleConfig, ScheduleKind,
};
use rstest::rstest;

const COSTS: [Costs; 3] = [
    Costs::UNIT,
    Costs {
        forward: 3,
        backward_input: 4,
        backward_weight: 2,
        transfer: 0,
    },
    Costs {
        forward: 2,
        backward_input: 3,
        backward_weight: 5,
        transfer: 0,
    },
];

/// All configurations of a kind, including refused ones.
fn configs(kind: ScheduleKind) -> impl Iterator<Item = ScheduleConfig> {
    let groups = move |m| {
        if kind == ScheduleKind::Interleaved {
            m + 1
        } else {
            0
        }
    };
    (1..=8).flat_map(move |p| {
        (1..=4).flat_map(move |v| {
            (1..=24).flat_map(move |m| {
                let config = ScheduleConfig::new(kind, p, m).with_num_chunks(v);
                let grouped = config.clone();
                let groups = (1..=groups(m)).map(move |n| grouped.clone().with_group_size(n));
                std::iter::once(config).chain(groups)
            })
        })
    })
}

fn idle(schedule: &Schedule, costs: Costs, links: Links) -> u64 {
    let num_ranks = schedule.stages.num_ranks;
    let timing = schedule.simulate(&vec![costs; num_ranks], links).unwrap();
    let idle = timing.idle(0);
    assert!(
        (0..num_ranks).all(|rank| timing.idle(rank) == idle),
        "equal work, equal idleness"
    );
    idle
}

#[rstest]
#[case(ScheduleKind::GPipe, 8 * 4 * 24)]
#[case(ScheduleKind::OneForwardOneBackward, 8 * 24)]
#[case(ScheduleKind::Interleaved, 3954)]
#[case(ScheduleKind::ZbH1, 8 * 24)]
#[case(ScheduleKind::ZbV, 8 * 24)]
#[case(ScheduleKind::ForwardOnly, 8 * 4 * 24)]
fn a_schedule_is_sound_and_has_the_bubble_and_the_peak_of_its_formula(
    #[case] kind: ScheduleKind,
    #[case] num_legal: usize,
) {
    let mut found = 0;
    for config in configs(kind) {
        let Ok(schedule) = config.build() else {
            continue;
        };
        found += 1;
        let proof = schedule.prove().unwrap();
        for (rank, peak) in proof.peak_activations.iter().enumerate() {
            assert_eq!(
                Some(*peak),
                config.expected_peak(rank),
                "rank {rank} of {config:?}"
            );
        }
        for costs in COSTS {
            let expected = config.expected_idle(costs);
            let has_formula = kind != ScheduleKind::ZbV
                || costs == Costs::UNIT
                    && !(config.num_ranks + 1..2 * config.num_ranks)
                        .contains(&config.num_micro_batches);
            assert_eq!(expected.is_some(), has_formula, "{config:?}");
            let Some(expected) = expected else { continue };
            assert_eq!(
                idle(&schedule, costs, Links::PrePosted),
                expected,
                "{config:?} {costs:?}"
            );
        }
    }
    assert_eq!(found, num_legal);
}

/// The formulas, written a second time in the papers' form.
#[test]
fn the_formulas_are_those_of_the_papers() {
    for (p, m) in [(2_u32, 4_u32), (4, 8), (4, 12), (8, 16), (8, 24)] {
        let ratio = |kind, v: usize| {
            let config = ScheduleConfig::new(kind, p as usize, m as usize).with_num_chunks(v);
            let timing = config.build().unwrap();
            timing
                .simulate(&vec![Costs::UNIT; p as usize], Links::PrePosted)
                .unwrap()
                .bubble_ratio()
        };
        let ideal = f64::from(p - 1) / f64::from(m);
        let m = f64::from(m);
        let p = f64::from(p);
        assert_eq!(ratio(ScheduleKind::GPipe, 1), ideal);
        assert_eq!(ratio(ScheduleKind::OneForwardOneBackward, 1), ideal);
        for v in 2..=4 {
            assert_eq!(
                ratio(ScheduleKind::Interleaved, v),
                (p - 1.0) / (m * v as f64)
            );
        }
        // (p-1)(f + b - w) of m(f + b + w): a third of 1F1B's.
        assert_eq!(ratio(ScheduleKind::ZbH1, 1), (p - 1.0) / (3.0 * m));
        // Half a pass of a rank's layers for each rank before the last, which start later by that
        // time.
        assert_eq!(ratio(ScheduleKind::ZbV, 2), (p - 1.0) / (6.0 * m));
    }
}

#[test]
fn zb_v_has_no_bubble_between_a_ranks_first_and_last_pass() {
    for p in 1..=8 {
        for m in 2 * p..=24 {
            let schedule = ScheduleConfig::new(ScheduleKind::ZbV, p, m)
                .build()
                .unwrap();
            let timing = schedule
                .simulate(&vec![Costs::UNIT; p], Links::PrePosted)
                .unwrap();
            for rank in 0..p {
                assert_eq!(timing.idle_between(rank), 0, "p {p}, m {m}, rank {rank}");
            }
        }
    }
}

/// The bubble with other costs than the paper's; the documentation states the same numbers.
#[rstest]
#[case(Costs { forward: 1, backward_input: 2, backward_weight: 1, transfer: 0 }, 14)]
#[case(Costs { forward: 2, backward_input: 3, backward_weight: 2, transfer: 0 }, 21)]
fn zb_v_with_unequal_passes_has_the_bubble_that_is_documented(
    #[case] costs: Costs,
    #[case] expected: u64,
) {
    let schedule = ScheduleConfig::new(ScheduleKind::ZbV, 8, 16)
        .build()
        .unwrap();
    assert_eq!(idle(&schedule, costs, Links::PrePosted), expected);
}

#[test]
fn zero_bubble_keeps_no_more_than_1f1b() {
    for p in 1..=8 {
        for m in 1..=24 {
            let peak = |kind| {
                let proof = ScheduleConfig::new(kind, p, m)
                    .build()
                    .unwrap()
                    .prove()
                    .unwrap();
                proof.peak_activations.into_iter().max().unwrap()
            };
            let of_1f1b = peak(ScheduleKind::OneForwardOneBackward);
            assert_eq!(peak(ScheduleKind::ZbH1), of_1f1b);
            // Counted in halves of a rank's layers.
            assert_eq!(peak(ScheduleKind::ZbV), 2 * of_1f1b);
        }
    }
}

/// The cost of a send that blocks its rank until the receiver finishes its current pass.
#[rstest]
fn rendezvous_costs_what_is_documented(
    #[values(
        ScheduleKind::GPipe,
        ScheduleKind::OneForwardOneBackward,
        ScheduleKind::Interleaved,
        ScheduleKind::ZbH1,
        ScheduleKind::ZbV,
        ScheduleKind::ForwardOnly
    )]
    kind: ScheduleKind,
) {
    for config in configs(kind).filter(|config| config.group_size.is_none()) {
        let Ok(schedule) = config.build() else {
            continue;
        };
        let more = |costs| {
            idle(&schedule, costs, Links::Rendezvous).checked_sub(idle(
                &schedule,
                costs,
                Links::PrePosted,
            ))
        };
        let p = config.num_ranks;
        let m = config.num_micro_batches as u64;
        let found = more(Costs::UNIT).unwrap();
        let v = schedule.stages.num_chunks as u64;
        match kind {
            ScheduleKind::Interleaved if p == 2 && m.is_multiple_of(2) => {
                assert_eq!(found, 2 * (v - 1) * (m - 2), "{config:?}");
            }
            ScheduleKind::Interleaved if p % 3 == 2 && m > 1 => {
                assert!(found < 3 * (v - 1) * m, "{config:?}: {found}");
            }
            ScheduleKind::Interleaved => assert!(found <= 2, "{config:?}: {found}"),
            _ => assert_eq!(found, 0, "{config:?}"),
        }
        assert!(
            more(Costs {
                transfer: 2,
                ..Costs::UNIT
            })
            .is_some(),
            "{config:?}"
        );
    }
}

#[test]
fn a_model_in_a_vee_can_be_evaluated() {
    for (p, m) in [(1, 1), (2, 5), (4, 3), (8, 24)] {
        for kind in [ScheduleKind::GPipe, ScheduleKind::ForwardOnly] {
            let config = ScheduleConfig::new(kind, p, m).with_num_chunks(2);
            let config = config.with_placement(Placement::Vee);
            assert_eq!(config.expected_idle(Costs::UNIT), None);
            let schedule = config.build().unwrap();
            let as_trained = ScheduleConfig::new(ScheduleKind::ZbV, p, m)
                .build()
                .unwrap();
            assert_eq!(schedule.stages, as_trained.stages);
        }
    }
}

#[rstest]
#[case(4, 9, None, Ok(5))]
#[case(4, 8, None, Ok(4))]
#[case(4, 7, None, Ok(7))]
#[case(4, 3, None, Ok(3))]
#[case(2, 5, Some(3), Ok(3))]
#[case(4, 8, Some(3), Err(PipelineError::GroupTooSmall { group_size: 3, num_ranks: 4 }))]
#[case(4, 8, Some(9), Err(PipelineError::GroupTooLarge { group_size: 9, num_micro_batches: 8 }))]
#[case(4, 9, Some(4), Err(PipelineError::Rest { num_micro_batches: 9, group_size: 4, rest: 1, num_ranks: 4 }))]
fn groups_follow_megatrons_rule(
    #[case] num_ranks: usize,
    #[case] num_micro_batches: usize,
    #[case] asked: Option<usize>,
    #[case] expected: Result<usize, PipelineError>,
) {
    let mut config = ScheduleConfig::new(ScheduleKind::Interleaved, num_ranks, num_micro_batches);
    config.group_size = asked;
    assert_eq!(config.group_size(), expected);
    assert_eq!(config.build().map(drop), expected.map(drop));
}

#[rstest]
#[case(
    ScheduleConfig::new(ScheduleKind::GPipe, 0, 1),
    "the schedule has 0 ranks"
)]
#[case(
    ScheduleConfig::new(ScheduleKind::GPipe, usize::MAX, 9),
    "more than 1048576 forward passes"
)]
#[case(
    ScheduleConfig::new(ScheduleKind::GPipe, 1024, 1025),
    "choose fewer ranks, chunks or"
)]
#[case(
    ScheduleConfig::new(ScheduleKind::GPipe, 1, 0),
    "the schedule has 0 micro-batches"
)]
#[case(ScheduleConfig::new(ScheduleKind::GPipe, 1, 1).with_num_chunks(0), "the schedule has 0 chunks")]
#[case(
    ScheduleConfig::new(ScheduleKind::Interleaved, 1, 1).with_group_size(0),
    "the schedule has 0 micro-batches per group"
)]
#[case(
    ScheduleConfig::new(ScheduleKind::OneForwardOneBackward, 2, 4).with_num_chunks(2),
    "1f1b with 2 chunks per rank: it has 1 chunk per rank; for more, use interleaved"
)]
#[case(ScheduleConfig::new(ScheduleKind::ZbH1, 2, 4).with_num_chunks(2), "zb-v has 2")]
#[case(ScheduleConfig::new(ScheduleKind::ZbV, 2, 4).with_num_chunks(3), "zb-v with 3 chunks")]
#[case(
    ScheduleConfig::new(ScheduleKind::Interleaved, 2, 4).with_num_chunks(1),
    "for 1, use 1f1b"
)]
#[case(
    ScheduleConfig::new(ScheduleKind::ZbV, 2, 4).with_placement(Placement::Loop),
    "zb-v does not support the loop placement"
)]
#[case(
    ScheduleConfig::new(ScheduleKind::ZbH1, 2, 4).with_group_size(2),
    "zb-h1 has no micro-batch groups, but a group size of 2 is set: remove it"
)]
fn what_cannot_be_is_named(#[case] config: ScheduleConfig, #[case] message: &str) {
    let error = config.build().unwrap_err().to_string();
    assert!(error.contains(message), "{error}");
}

/// A prepared schedule takes as long as the simulated one, whatever ranks and links cost, and holds
/// as much at its peaks as at any moment.
#[rstest]
fn a_prepared_schedule_is_the_built_one(
    #[values(
        ScheduleKind::GPipe,
        ScheduleKind::OneForwardOneBackward,
        ScheduleKind::Interleaved,
        ScheduleKind::ZbH1,
        ScheduleKind::ZbV,
        ScheduleKind::ForwardOnly
    )]
    kind: ScheduleKind,
) {
    let mut compared = 0;
    for config in configs(kind).filter(|config| config.num_micro_batches % 5 < 2) {
        let Ok(schedule) = config.build() else {
            assert!(config.prepare().is_err(), "{config:?}");
            continue;
        };
        let prepared = config.prepare().unwrap();
        for transfer in [0, 1, 7] {
            let cost = |rank: usize| Costs {
                forward: 3 + rank as u64 % 3,
                backward_input: 4 + rank as u64 % 2,
                backward_weight: 2,
                transfer,
            };
            let costs: Vec<Costs> = (0..config.num_ranks).map(cost).collect();
            let timing = schedule.simulate(&costs, Links::PrePosted).unwrap();
            let makespan = prepared.makespan(&costs).unwrap();
            assert_eq!(makespan, timing.makespan(), "{config:?} {transfer}");
        }
        for (rank, actions) in schedule.ranks.iter().enumerate() {
            let peaks = prepared.peaks(rank);
            let mut in_flight = vec![0; config.stages().num_chunks];
            let mut seen = vec![false; peaks.len()];
            for action in actions.iter().filter(|_| kind.has_backward()) {
                match action.op {
                    Op::Forward => in_flight[action.chunk] += 1,
                    Op::Backward | Op::BackwardWeight => in_flight[action.chunk] -= 1,
                    _ => continue,
                }
                let covers = |peak: &Vec<usize>| (0..peak.len()).all(|c| in_flight[c] <= peak[c]);
                assert!(
                    peaks.iter().any(covers),
                    "{config:?} {in_flight:?} {peaks:?}"
                );
                for (peak, seen) in peaks.iter().zip(&mut seen) {
                    *seen |= *peak == in_flight;
                }
            }
            assert!(seen.into_iter().all(|seen| seen), "{config:?} {peaks:?}");
        }
        compared += 1;
    }
    assert!(compared > 50, "{compared}");
}
