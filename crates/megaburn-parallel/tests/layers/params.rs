//! Reads and loads parameters by path, under all layouts.

use burn::tensor::{Tensor, TensorData};
use megaburn_collective::Group;
use megaburn_parallel::{ParallelError, load_params, read_params, shard_plan};
use rstest::rstest;

use crate::{
    plan::Model,
    support::{assert_bits, autodiff, cut, floats, fresh_seed, join, normal, on_ranks},
};

#[rstest]
fn loaded_parameters_are_used_and_still_learn(#[values(1, 2, 4)] ranks: usize) {
    let seed = fresh_seed();
    let shards = on_ranks(ranks, seed, |group| {
        let model = Model::new(&group).unwrap();
        let plan = shard_plan(&model).unwrap();
        let model = load_params(model, |path, shape| {
            let spec = &plan.get(path).expect("every parameter is planned").shard;
            assert_eq!(spec.local_shape(), shape);
            Ok::<_, ParallelError>(cut(&normal(&spec.global_shape, seed, path), spec, false))
        })
        .unwrap();
        let x = Tensor::<3>::from_data(normal(&[2, 3, 6], seed, "x"), &autodiff());
        let y = model.forward(x);
        let grads = y.clone().sum().backward();
        assert!(
            model
                .head
                .as_ref()
                .unwrap()
                .weight
                .val()
                .grad(&grads)
                .is_some()
        );
        let spec = |path: &str| plan.get(path).unwrap().shard.clone();
        let params = read_params(&model);
        (
            params
                .into_iter()
                .map(|(p, d)| (spec(&p), p, d))
                .collect::<Vec<_>>(),
            floats(&y.into_data()),
        )
    });
    for index in 0..shards[0].0.len() {
        let path = &shards[0].0[index].1;
        let all: Vec<_> = shards
            .iter()
            .map(|(params, _)| (params[index].0.clone(), params[index].2.clone()))
            .collect();
        let shape = all[0].0.global_shape.clone();
        assert_bits(path, &join(path, &all), &normal(&shape, seed, path));
    }
    assert!(shards.iter().all(|(_, y)| *y == shards[0].1));
}

#[test]
fn the_first_error_of_loading_is_returned() {
    let model = Model::new(&Group::single(0)).unwrap();
    let mut asked = Vec::new();
    let error = load_params(model, |path, _| {
        asked.push(path.to_string());
        Err::<TensorData, _>(format!("{path} is not in the file"))
    });
    assert_eq!(error.unwrap_err(), "embedding.weight is not in the file");
    assert_eq!(asked, ["embedding.weight"]);
}

#[test]
#[should_panic(expected = "the new value of `embedding.weight`")]
fn a_value_of_another_shape_is_refused() {
    let model = Model::new(&Group::single(0)).unwrap();
    let other = |_: &str, _: &[usize]| Ok::<_, ParallelError>(normal(&[2, 2], 0, "other"));
    let _ = load_params(model, other);
}
