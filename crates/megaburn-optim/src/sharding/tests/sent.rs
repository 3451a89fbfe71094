use megaburn_collective::FlightRecord;

use super::*;

/// Runs one step on each rank, without the update.
fn steps<T: Send>(setup: &Setup, see: impl Fn(Rank, Vec<FlightRecord>) -> T + Sync) -> Vec<T> {
    let ranks = run_threads(
        setup.layout.world_size(),
        GroupOptions::default(),
        |world| {
            let groups = ProcessGroups::new(&world, setup.layout)?;
            let mut rank = setup.start(&groups)?;
            let own = setup.grads(&rank.plan, &groups, (0, 0));
            rank.micro_batch(&own, true)?;
            rank.grads.reduce()?;
            rank.grads.norm()?;
            Ok::<_, OptimError>(see(rank, world.flight_records()))
        },
    );
    ranks.into_iter().map(Result::unwrap).collect()
}

#[test]
fn what_backward_completes_first_is_sent_first() {
    let config = ShardingConfig::new(ShardingLevel::Optimizer).with_bucket(Some(1));
    let setup = Setup::new("dp4-ep2", "adamw", config, true);
    let orders = steps(&setup, |rank, _| {
        let buckets = rank.sharding.buckets().iter();
        buckets
            .map(|bucket| bucket.slots[0].path.clone())
            .collect::<Vec<_>>()
    });
    let expected = "2.experts.1.down 2.experts.1.up 2.experts.0.down 2.experts.0.up 2.attention \
        1.experts.1.down 1.experts.1.up 1.experts.0.down 1.experts.0.up 1.attention 0.attention \
        2.norm 2.experts.1.bias 2.experts.0.bias 1.norm 1.experts.1.bias 1.experts.0.bias 0.norm";
    let expected: Vec<_> = expected
        .split(' ')
        .map(|path| format!("blocks.{path}"))
        .collect();
    assert_eq!(orders[0], expected);
    // The other ranks' experts have the same positions.
    let others: Vec<_> = expected
        .iter()
        .map(|p| p.replace("ts.1.", "ts.3.").replace("ts.0.", "ts.2."))
        .collect();
    assert_eq!(orders[1], others);
}

/// There are three attention matrices, and eight expert matrices where other ranks hold copies of
/// them.
#[rstest]
#[case("dp2-ep2", 3)]
#[case("dp4-ep2", 11)]
#[case("tp2-sp", 16)]
fn the_buckets_of_both_kinds_are_sent_by_the_backward_that_completes_them(
    #[case] layout: &str,
    #[case] sent: usize,
) {
    for level in LEVELS {
        let config = ShardingConfig::new(level).with_bucket(Some(1));
        // The first backward pass of a run only counts gradients.
        let expected = if level >= ShardingLevel::Gradients {
            [0, sent, sent, sent, sent, sent]
        } else {
            [0, 0, sent, 0, 0, sent]
        };
        for rank in Setup::new(layout, "adamw", config, true).check() {
            assert_eq!(rank.num_sent, expected, "{level:?}");
        }
    }
}

/// The groups that a step uses, and how often it uses them.
fn groups_used(layout: &str, level: ShardingLevel) -> Vec<BTreeMap<String, usize>> {
    let setup = Setup::new(layout, "adamw", ShardingConfig::new(level), true);
    steps(&setup, |_, records| {
        let mut counts = BTreeMap::new();
        records
            .into_iter()
            .for_each(|record| *counts.entry(record.group).or_default() += 1);
        counts
    })
}

#[rstest]
// Matrices, other parameters, and the norm of the stage's experts.
#[case("dp2-ep2", ShardingLevel::None, &[("dp-cp", 2), ("world", 1)])]
// The same buckets for experts as well.
#[case("dp4-ep2", ShardingLevel::None, &[("dp-cp", 2), ("edp", 2), ("ep", 1)])]
// All ranks that shard take part in the norm, so `world` appears twice.
#[case("dp4-ep2", ShardingLevel::Optimizer, &[("dp-cp", 2), ("edp", 2), ("world", 2)])]
#[case("dp2", ShardingLevel::Optimizer, &[("dp-cp", 4), ("world", 2)])]
fn only_who_holds_copies_sums(
    #[case] layout: &str,
    #[case] level: ShardingLevel,
    #[case] expected: &[(&str, usize)],
) {
    let expected = expected
        .iter()
        .map(|(group, count)| (group.to_string(), *count))
        .collect();
    for used in groups_used(layout, level) {
        assert_eq!(used, expected, "{layout} {level:?}");
    }
}

/// A stage without experts sends the same as if no stage had experts.
#[test]
fn a_stage_without_experts_does_nothing_for_them() {
    let used = groups_used("pp2-dp2-ep2", ShardingLevel::None);
    let of = |pairs: &[(&str, usize)]| -> BTreeMap<String, usize> {
        pairs
            .iter()
            .map(|(group, count)| (group.to_string(), *count))
            .collect()
    };
    let dense = of(&[("dp-cp", 2), ("model", 1)]);
    assert_eq!(used[..2], [dense.clone(), dense]);
    let moe = of(&[("dp-cp", 2), ("ep", 1), ("model", 1)]);
    assert_eq!(used[2..], [moe.clone(), moe]);
}
