use std::collections::BTreeSet;

use super::*;

/// The norm on every rank if one rank has a non-finite number in the gradient of one parameter,
/// either before or after the sum over ranks.
fn norms(setup: &Setup, on_gpu: bool, bad: (usize, &str, f32), is_summed: bool) -> Vec<f64> {
    let (rank, path, value) = bad;
    let norms = run_threads(
        setup.layout.world_size(),
        GroupOptions::default(),
        |world| {
            let groups = ProcessGroups::new(&world, setup.layout)?;
            let mut mine = setup.start(&groups)?;
            let mut own = setup.grads(&mine.plan, &groups, (0, 0));
            let is_bad = world.rank() == rank;
            if is_bad && !is_summed {
                *own.get_mut(path).unwrap().last_mut().unwrap() = value;
            }
            mine.micro_batch(&own, true)?;
            mine.grads.reduce()?;
            if is_bad && is_summed {
                let entry = mine.grads.entries.get_mut(path).unwrap();
                entry.sum = Some(entry.grad_or_zeros() * value);
            }
            mine.grads.norm_on(on_gpu)?.read()
        },
    );
    norms.into_iter().map(Result::unwrap).collect()
}

#[rstest]
fn a_bad_gradient_of_one_copy_of_an_expert_is_seen_by_all(
    #[values(
        "dp2-ep2",
        "dp4-ep2",
        "tp2-dp2-ep2-sp",
        "tp2-dp2-etp2-sp",
        "pp2-dp2-ep2",
        "tp2-sp"
    )]
    layout: &str,
    #[values(f32::NAN, f32::INFINITY)] value: f32,
    #[values(false, true)] on_gpu: bool,
) {
    for level in LEVELS {
        // Without main gradients, so that layers do not multiply the bad value by zeros.
        let setup = Setup::new(layout, "adamw", ShardingConfig::new(level), false);
        let mesh = megaburn_mesh::Mesh::new(setup.layout);
        let mut seen = BTreeSet::new();
        for rank in 0..setup.layout.world_size() {
            let coords = mesh.coords(rank);
            // The last stage has the experts.
            if coords.pp + 1 < setup.layout.pp {
                continue;
            }
            let expert = coords.ep * NUM_EXPERTS / setup.layout.ep;
            let path = format!("blocks.2.experts.{expert}.bias");
            let norms = norms(&setup, on_gpu, (rank, &path, value), false);
            assert!(
                norms.iter().all(|norm| !norm.is_finite()),
                "{level:?} {rank}: {norms:?}"
            );
            seen.insert(path);
        }
        assert_eq!(seen.len(), setup.layout.ep);
    }
}

/// Rank 0's copy of the bias is counted, rank 1's is not.
#[rstest]
#[case("tp2-sp", "blocks.1.experts.0.bias")]
#[case("dp2-etp2", "blocks.1.experts.0.bias")]
#[case("tp2-dp2-ep2-etp2-sp", "blocks.1.experts.0.bias")]
fn a_bad_value_in_an_uncounted_copy_of_an_expert_spoils_the_norm_of_all(
    #[case] layout: &str,
    #[case] path: &str,
    #[values(false, true)] on_gpu: bool,
) {
    let setup = Setup::new(
        layout,
        "adamw",
        ShardingConfig::new(ShardingLevel::None),
        false,
    );
    let norms = norms(&setup, on_gpu, (1, path, f32::NAN), true);
    assert!(norms.iter().all(|norm| norm.is_nan()), "{norms:?}");
}

#[test]
fn a_plan_with_other_experts_is_refused() {
    let setup = Setup::new(
        "dp2-ep2",
        "adamw",
        ShardingConfig::new(ShardingLevel::None),
        false,
    );
    let ranks = run_threads(2, GroupOptions::default(), |world| {
        let groups = ProcessGroups::new(&world, setup.layout)?;
        let Rank { plan, net, .. } = setup.start(&groups)?;
        let sharding = setup.config.init(&net, &groups)?;
        GradientAccumulator::new(&net, &plan, &sharding).map(|_| ())
    });
    for rank in ranks {
        let error = rank.unwrap_err().to_string();
        assert!(
            error.contains("is an expert parameter in only one of the shard plan and the sharding"),
            "{error}"
        );
    }
}
