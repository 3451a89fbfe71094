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
                let part = |path: &str, whole: &[f32], range: Range<usize>| {
                    let found = local(path, whole).try_to_vec::<f32>().unwrap();
                    let len = range.len();
                    Ok::<_, OptimError>(TensorData::new(found[range].to_vec(), [len]))
                };
                let net = optimizer.restore_params(net, FloatDType::F32, |path, range| {
                    let kept = sharding.kept(
                        path,
                        cut(&plan.get(path).unwrap().shard, &one.params[path]).len(),
                    );
                    assert!(!sharding.is_param_sharded(path) || range == kept, "{path}");
                    part(path, &one.params[path], range)
                })?;
                optimizer.load_state(2, &grads, |path, moment, range| {
                    part(path, &one.state[&(moment, path.to_string())], range)
                })?;
                let state = full_state(&optimizer)?.into_iter();
                let moments: BTreeMap<_, _> = state
                    .filter_map(|((moment, path), state)| Some(((moment?, path), state)))
                    .collect();
                let keys = one
                    .state
                    .keys()
                    .filter(|(_, path)| plan.get(path).is_some());
                assert!(moments.keys().eq(keys));
                for ((moment, path), found) in moments {
                    let expected = local(&path, &one.state[&(moment, path.clone())]);
                    assert_eq!(found, expected.try_to_vec::<f32>().unwrap(), "{path}");
                }
                // What this rank holds of it, and a part of that.
                let len = |path: &str| plan.get(path).unwrap().shard.local_shape().iter().product();
                for ((moment, path), held) in optimizer
                    .held_state(len, |_| crate::testing::unused())
                    .moments
                {
                    let whole = local(&path, &one.state[&(moment, path.clone())]);
                    let whole = whole.try_to_vec::<f32>().unwrap();
                    let range = held.range.clone();
                    assert_eq!(range, sharding.kept(&path, whole.len()));
                    let mid = range.start..range.start + range.len().div_ceil(2);
                    if !mid.is_empty() {
                        let (copy, _) = held.clone().copy_to_host(mid.clone())?;
                        assert_eq!(copy.read()?.try_to_vec::<f32>().unwrap(), whole[mid]);
                    }
                    let found = held.read(range.clone())?.try_to_vec::<f32>().unwrap();
                    assert_eq!(found, whole[range]);
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
