use burn::tensor::TensorData;

use super::*;

/// Every layout loads the state that a single rank has reached. Before that, its copies have other
/// values.
#[rstest]
fn state_of_one_rank_is_read_under_any_layout(
    #[values("dp4-ep2", "tp2-dp2-ep2-sp", "tp2-dp2-ep2-etp2-sp", "pp2-dp2-ep2")] layout: &str,
    #[values("adamw", "muon")] rule: &'static str,
) {
    for level in LEVELS {
        let config = ShardingConfig::new(level).with_bucket(Some(600));
        let setup = Setup::new(layout, rule, config, true);
        let one = setup.alone().train(&ProcessGroups::single(0)).unwrap();
        let ranks = run_threads(
            setup.layout.world_size(),
            GroupOptions::default(),
            |world| {
                let groups = ProcessGroups::new(&world, setup.layout)?;
                let Rank {
                    plan,
                    net,
                    sharding,
                    mut optimizer,
                    grads,
                    ..
                } = setup.start(&groups)?;
                let local = |path: &str, whole: &[f32]| {
                    let shard = &plan.get(path).unwrap().shard;
                    TensorData::new(cut(shard, whole), shard.local_shape())
                };
                let net = optimizer.load_params(net, FloatDType::F32, |path, _| {
                    Ok::<_, OptimError>(local(path, &one.params[path]))
                })?;
                optimizer.load_state(2, &grads, |path, moment| {
                    Ok::<_, OptimError>(local(path, &one.state[&(moment, path.to_string())]))
                })?;
                let is_wanted = |path: &str| plan.get(path).unwrap().is_expert();
                let moments = optimizer.full_state(is_wanted)?.moments;
                let shared = |path: &str| sharding.num_shares(path) > 1;
                let keys = one
                    .state
                    .keys()
                    .filter(|(_, path)| plan.get(path).is_some());
                let keys = keys.filter(|(_, path)| is_wanted(path) || !shared(path));
                assert!(moments.keys().eq(keys), "what nobody wants is not gathered");
                for ((moment, path), state) in moments {
                    let found = state.read()?.try_to_vec::<f32>().unwrap();
                    let expected = local(&path, &one.state[&(moment, path.clone())]);
                    assert_eq!(found, expected.try_to_vec::<f32>().unwrap(), "{path}");
                }
                for (path, found) in sharding.whole(net)?.values() {
                    let expected = local(&path, &one.params[&path]);
                    assert_eq!(found, expected.try_to_vec::<f32>().unwrap(), "{path}");
                }
                Ok::<_, OptimError>(())
            },
        );
        ranks.into_iter().for_each(|rank| rank.unwrap());
    }
}
