//! The gradient of a step is that of the mean over masked tokens plus the mean over rows.

use std::sync::Arc;

use burn::tensor::{Device, Int, Tensor, TensorData};
use megaburn::{
    collective::{Group, ProcessGroups},
    data::Sample,
    mesh::Layout,
    models::{DecoderConfig, decoder::ModelOptions},
    optim::{GradientAccumulator, Sharding},
    parallel::{BatchContext, shard_plan},
    train::{RunData, TrainConfig, Trainer},
};
use rstest::rstest;

use super::corpus::Sentences;
use crate::layouts::grid::train;
use megaburn_test_support::{
    gather::{FullParams, relative_distance},
    text::fresh_seed,
};

/// The model of a run, and the samples of its first step.
fn start(config: &TrainConfig) -> (DecoderConfig, Vec<Sample>) {
    let groups = ProcessGroups::single(config.run.seed);
    let data = Arc::new(RunData::load(config).unwrap());
    let device = Device::flex().autodiff();
    let trainer = Trainer::new(Arc::new(config.clone()), groups, device, data).unwrap();
    let batches = 0..trainer.num_micro_batches();
    let samples = batches.flat_map(|index| trainer.micro_batch(index).unwrap().1);
    (trainer.model().config().clone(), samples.collect())
}

/// The gradients of the two means at the start of a run, from each row alone and without its
/// padding.
fn by_definition(config: &TrainConfig) -> FullParams {
    let device = Device::flex().autodiff();
    let (model, samples) = start(config);
    let group = Group::single(config.run.seed);
    let model = model
        .init(&group, &ModelOptions::default(), &device)
        .unwrap();
    let column = |ids: Vec<i64>| {
        let shape = [ids.len(), 1];
        Tensor::<2, Int>::from_data(TensorData::new(ids, shape), &device)
    };
    let mut sums: Option<[Tensor<1>; 2]> = None;
    let mut num_masked = 0;
    for sample in &samples {
        let Sample::Bert(row) = sample else {
            panic!("the data are masked sentences");
        };
        let held = row.padding_mask.iter().filter(|is_text| **is_text).count();
        let masked = row.loss_mask.iter().zip(&row.labels).take(held);
        let labels = masked.map(|(is_masked, label)| if *is_masked { *label } else { -100 });
        let labels: Vec<i64> = labels.collect();
        num_masked += labels.iter().filter(|label| **label >= 0).count();
        let types = row.types[..held].iter().map(|id| *id as usize).collect();
        let batch = BatchContext {
            token_types: Some(vec![types].into()),
            sentence_order: Some(column(vec![row.is_random.into()])),
            ..BatchContext::default()
        };
        let tokens = row.text[..held].iter().map(|id| i64::from(*id)).collect();
        let x = model.embed(column(tokens), &batch);
        let x = model.forward_stage(0, x, &batch);
        let found = model.losses(x, column(labels), &[], &batch);
        let own = [found.main, found.binary.unwrap()];
        sums = Some(match sums {
            Some([main, binary]) => [main + own[0].clone(), binary + own[1].clone()],
            None => own,
        });
    }
    let [main, binary] = sums.unwrap();
    let loss = main / num_masked as f64 + binary / samples.len() as f64;
    let plan = shard_plan(&model).unwrap();
    let mut grads = GradientAccumulator::new(&model, &plan, &Sharding::none()).unwrap();
    grads.accumulate(&model, &mut loss.backward());
    grads.reduce().unwrap();
    let values = |path: &str| grads.get(path).unwrap().into_data().try_to_vec().unwrap();
    grads
        .paths()
        .map(|path| (path.to_string(), values(path)))
        .collect()
}

fn norm(grads: &FullParams) -> f64 {
    let squares = grads.values().flatten().map(|x| f64::from(*x).powi(2));
    squares.sum::<f64>().sqrt()
}

#[rstest]
#[case(&["train.global_batch=6", "train.micro_batch=2", "data.seq_len=24"], "dp3")]
#[case(&["train.global_batch=5", "train.micro_batch=1", "data.seq_len=17"], "tp1")]
#[case(&["train.global_batch=4", "train.micro_batch=4", "data.seq_len=32"], "tp2-sp")]
fn the_loss_is_the_mean_over_masked_tokens_plus_the_mean_over_rows(
    #[case] sets: &[&str],
    #[case] layout: &str,
) {
    let sentences = Sentences::new(40, fresh_seed());
    let expected = by_definition(&sentences.config(&[sets, &["train.micro_batch=1"]].concat()));
    let layout: Layout = layout.parse().unwrap();
    let found = train(sentences.config(sets), layout).grads;
    assert!(found.keys().eq(expected.keys()));
    // The first moment after one step is the clipped gradient times a constant.
    let scale = norm(&found) / norm(&expected);
    for (path, expected) in &expected {
        // One rank holds the rows of the vocabulary with its padding.
        let (expected, padding) = expected.split_at(found[path].len());
        assert!(
            padding.iter().all(|x| *x == 0.0),
            "{path} has gradients of padding"
        );
        let expected: Vec<f32> = expected
            .iter()
            .map(|x| (f64::from(*x) * scale) as f32)
            .collect();
        let distance = relative_distance(&found[path], &expected);
        assert!(
            distance < 1e-4,
            "the gradient of {path} differs by {distance:e}"
        );
    }
}
