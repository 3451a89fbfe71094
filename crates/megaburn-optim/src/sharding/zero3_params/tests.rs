use LinearPass::{Backward, Forward};
use burn::{module::Param, tensor::Device};
use megaburn_collective::{GroupOptions, ProcessGroups, run_threads};
use megaburn_kernels::{LinearOptions, linear};

use super::*;
use crate::{
    accumulator::GradientAccumulator,
    error::OptimError,
    rule::AdamWConfig,
    sharding::{ParamKind, Sharding, ShardingConfig, ShardingLevel},
    testing::{Net, full_state::full_state, plan_of, values},
};

fn numbers(from: usize, len: usize) -> Vec<f32> {
    (from..from + len).map(|i| i as f32).collect()
}

fn tensor(values: &[f32]) -> Tensor<1> {
    Tensor::from_floats(values, &Device::flex())
}

/// Three buckets with a `[3, 200]` matrix each, `a`, `b` and `c`, as a rank of `group` keeps them.
fn given(group: &Group) -> Zero3Params {
    let params = ["a", "b", "c"].map(|path| (path.to_string(), 600));
    let buckets = Bucket::fill(ParamKind::Dense, 0, params.clone(), 600, group.size());
    let shapes = params.map(|(path, _)| (path, [3, 200])).into();
    let shared = buckets
        .iter()
        .map(|bucket| (bucket.clone(), group.clone()))
        .collect();
    let shares = Zero3Params::new(shared, &shapes);
    for (index, bucket) in buckets.iter().enumerate() {
        let slot = &bucket.slots[0];
        let kept = slot.within(&bucket.share(group.rank(), group.size()));
        let part = tensor(&numbers(1000 * index, 600)).slice(kept.clone());
        shares.give(&slot.path, if kept.is_empty() { tensor(&[]) } else { part });
    }
    shares
}

impl Zero3Params {
    fn is_whole(&self, bucket: usize) -> bool {
        self.lock().whole.contains_key(&bucket)
    }

    fn read(&self, path: &str, pass: LinearPass) -> Vec<f32> {
        let whole = self.lock().read(path, pass);
        assert_eq!(whole.dims(), [3, 200]);
        values(whole)
    }
}

#[test]
fn what_is_read_is_whole_and_what_was_read_is_let_go() {
    let results = run_threads(3, GroupOptions::default(), |group| {
        let shares = given(&group);
        shares.attach(&BTreeMap::new(), true);
        let order = [
            (Forward, "c"),
            (Forward, "b"),
            (Forward, "a"),
            (Backward, "a"),
        ];
        let order = order.into_iter().chain([(Backward, "b"), (Backward, "c")]);
        for round in 0..3 {
            let order: Vec<_> = order.clone().collect();
            for (at, (pass, path)) in order.iter().enumerate() {
                let index = (path.as_bytes()[0] - b'a') as usize;
                assert_eq!(shares.read(path, *pass), numbers(1000 * index, 600));
                // Read twice, as tied layers do.
                assert_eq!(shares.read(path, *pass), numbers(1000 * index, 600));
                let next = order
                    .get(at + 1)
                    .map(|(_, path)| (path.as_bytes()[0] - b'a') as usize);
                for bucket in 0..3 {
                    let fetched = round > 0 && next == Some(bucket);
                    let here = shares.is_whole(bucket);
                    assert_eq!(here, bucket == index || fetched, "{round} {pass:?} {path}");
                }
            }
            // After an update, the bucket that is read first is prefetched.
            let old = shares.take("c").expect("a share");
            assert!((0..3).all(|bucket| !shares.is_whole(bucket)));
            shares.put("c", old, None);
            shares.updated();
            assert!(shares.is_whole(2) && !shares.is_whole(0));
        }
        shares.release();
        assert!((0..3).all(|bucket| !shares.is_whole(bucket)));
        // A forward pass without backward leaves no trace in the learned order if `release` follows
        // it.
        for path in ["b", "c", "a"] {
            let index = (path.as_bytes()[0] - b'a') as usize;
            assert_eq!(shares.read(path, Forward), numbers(1000 * index, 600));
        }
        shares.release();
        // The bucket that a micro-batch reads last is read first by the next one, and is still
        // gathered.
        for (pass, path) in order.clone() {
            shares.read(path, pass);
        }
        assert!(shares.is_whole(2) && !shares.is_whole(1));
        shares.read("c", Forward);
        assert!(shares.is_whole(2) && shares.is_whole(1));
        Ok::<_, OptimError>(shares.check()?)
    });
    results.into_iter().for_each(|result| result.unwrap());
}

/// Two stages, with `a` and `b` in one and `c` in the other, whose passes come in a different order
/// each time.
#[test]
fn each_stage_has_an_order_of_its_own_forward_and_backward() {
    let forward = [
        [(Forward, "a"), (Forward, "b")].to_vec(),
        [(Forward, "c")].to_vec(),
    ];
    let backward = [
        [(Backward, "b"), (Backward, "a")].to_vec(),
        [(Backward, "c")].to_vec(),
    ];
    let [first, second] = forward;
    let [last, before] = backward;
    let plain = [&first, &second, &before, &last];
    let warm = [
        &first, &first, &second, &before, &second, &last, &before, &last,
    ];
    let cool = [
        &first, &second, &first, &before, &second, &before, &last, &last,
    ];
    let results = run_threads(2, GroupOptions::default(), |group| {
        let shares = given(&group);
        shares.attach(&BTreeMap::new(), true);
        for (index, step) in [&plain[..], &warm, &cool, &warm].into_iter().enumerate() {
            for stage in step {
                for (at, (pass, path)) in stage.iter().enumerate() {
                    shares.read(path, *pass);
                    if let (Some((_, next)), true) = (stage.get(at + 1), index > 0) {
                        let next = (next.as_bytes()[0] - b'a') as usize;
                        assert!(shares.is_whole(next), "{index}: {pass:?} {path}");
                    }
                }
            }
            shares.updated();
            assert!(shares.is_whole(0));
        }
        Ok::<_, OptimError>(shares.check()?)
    });
    results.into_iter().for_each(|result| result.unwrap());
}

/// A stage with blocks that are recomputed before their backward pass.
#[test]
fn what_is_computed_again_has_another_order() {
    let order = [
        (Forward, "a"),
        (Forward, "b"),
        (Forward, "c"),
        (Forward, "b"),
        (Forward, "c"),
        (Backward, "c"),
        (Backward, "b"),
        (Forward, "a"),
        (Backward, "a"),
    ];
    let results = run_threads(2, GroupOptions::default(), |group| {
        let shares = given(&group);
        shares.attach(&BTreeMap::new(), true);
        for round in 0..3 {
            for (at, (pass, path)) in order.iter().enumerate() {
                shares.read(path, *pass);
                if let (Some((_, next)), true) = (order.get(at + 1), round > 0) {
                    let next = (next.as_bytes()[0] - b'a') as usize;
                    assert!(shares.is_whole(next), "{round}: {at} {pass:?} {path}");
                }
            }
            shares.updated();
        }
        Ok::<_, OptimError>(shares.check()?)
    });
    results.into_iter().for_each(|result| result.unwrap());
}

#[test]
fn a_part_is_what_this_rank_keeps() {
    let results = run_threads(2, GroupOptions::default(), |group| {
        let shares = given(&group);
        // 600 elements are padded to 1024.
        let expected = if group.rank() == 0 {
            numbers(1000, 512)
        } else {
            numbers(1512, 88)
        };
        assert_eq!(values(shares.part("b").expect("it was given")), expected);
        assert!(shares.part("d").is_none() && !shares.has("d") && shares.has("a"));
        Ok::<_, OptimError>(())
    });
    results.into_iter().for_each(|result| result.unwrap());
}

#[test]
fn what_could_not_be_gathered_is_no_number_and_is_told() {
    let results = run_threads(2, GroupOptions::default(), |group| {
        let shares = given(&group);
        if group.rank() == 1 {
            return Ok::<_, OptimError>(None);
        }
        let found = shares.read("a", Forward);
        assert!(found.iter().all(|x| x.is_nan()));
        Ok(shares.check().err().map(|error| error.to_string()))
    });
    let error = results
        .into_iter()
        .next()
        .unwrap()
        .unwrap()
        .expect("rank 1 is gone");
    assert!(error.contains("rank 1"), "{error}");
}

/// A layer that reads its weight from its shards, and the optimizer that replaces it.
#[test]
fn a_layer_trains_on_what_it_gathers() {
    let start = Net::new(30, 40, 0, 1, &Device::default());
    let start = (start.matrix.val().into_data(), start.bias.val().into_data());
    let train = |level: ShardingLevel| {
        run_threads(2, GroupOptions::default(), |world| {
            let groups = ProcessGroups::new(&world, "dp2".parse().expect("a layout"))?;
            let device = Device::default().autodiff();
            // Ranks of one process must not share a graph: backward locks it while it waits for
            // other ranks.
            let (matrix, bias) = start.clone();
            let net = Net {
                matrix: Param::from_data(matrix, &device),
                bias: Param::from_data(bias, &device),
            };
            let main = MainGrad::default();
            let weights: BTreeMap<_, _> = [("matrix".to_string(), main.clone())].into();
            let config = ShardingConfig::new(level).with_direct(["matrix".to_string()]);
            let sharding: Sharding = config.init(&net, &groups)?;
            sharding.attach(&weights, true);
            let mut optimizer = AdamWConfig::new().init(&sharding)?;
            let mut net = optimizer.cast_params(net, burn::tensor::FloatDType::F32);
            let mut grads = GradientAccumulator::new(&net, &plan_of(30, 40, 0, 1), &sharding)?;
            grads = grads.with_main_grads(weights);
            let is_sharded = level == ShardingLevel::Parameters;
            let mut losses = Vec::new();
            for step in 0..4 {
                let held = values(net.matrix.val());
                assert_eq!(held.iter().all(|x| x.is_nan()), is_sharded);
                let x = Tensor::<2>::ones([3, 30], &device) * (step + world.rank()) as f32;
                let options = LinearOptions {
                    main_grad: Some(main.clone()),
                    ..Default::default()
                };
                let y = linear(
                    x.require_grad(),
                    net.matrix.val(),
                    Some(net.bias.val()),
                    options,
                );
                grads.reset();
                let loss = y.square().mean();
                losses.extend(values(loss.clone().inner().reshape([1])));
                grads.accumulate(&net, &mut loss.backward());
                grads.end_micro_batch()?;
                grads.reduce()?;
                net = optimizer.step(1e-2, net, &grads)?;
            }
            let mut state: Vec<_> = full_state(&optimizer)?.into_iter().collect();
            if !is_sharded {
                sharding.settle();
                state.insert(0, ((None, "matrix".to_string()), values(net.matrix.val())));
            }
            Ok::<_, OptimError>((losses, state))
        })
    };
    let [expected, found] = [ShardingLevel::Gradients, ShardingLevel::Parameters].map(train);
    for (expected, found) in expected.into_iter().zip(found) {
        let expected = expected.unwrap();
        let found = found.unwrap();
        assert!(expected.0.iter().all(|loss| loss.is_finite()));
        assert!(expected == found, "losses {:?} {:?}", expected.0, found.0);
    }
}
