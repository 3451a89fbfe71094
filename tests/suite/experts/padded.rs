//! Batches of models with experts that data-parallel ranks cannot split evenly.

use megaburn::{mesh::Layout, train::ConfigLayers};
use rstest::rstest;

use crate::layouts::grid::{compare, train};
use megaburn_test_support::text::{fresh_seed, write_random_text};

/// Samples that do not count go to no expert, and count in no loss.
#[rstest]
fn a_padded_batch_trains_as_on_one_rank(
    #[values(("dp3", 1), ("dp3-ep3", 1), ("pp2-dp2-ep2", 3), ("tp2-dp3-sp", 1))] row: (&str, usize),
) {
    let (layout, micro_batch) = row;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("text.txt");
    write_random_text(&path, 4000, fresh_seed());
    let config = |micro_batch: usize| {
        let sets = [
            format!("data.path={}", path.display()),
            format!("train.micro_batch={micro_batch}"),
            "train.pad_batch=true train.global_batch=5 train.steps=3".into(),
            "model.family=mixtral model.layers=2 model.hidden=16 model.heads=4 model.kv_heads=2"
                .into(),
            "model.ffn=24 model.experts.num=6 data.seq_len=16".into(),
            // A loss over micro-batches depends on how ranks split the batch, so it is off.
            "moe.global_aux_loss=0.02 moe.seq_aux_loss=0.01 moe.z_loss=0.001".into(),
        ];
        let sets = sets.iter().flat_map(|sets| sets.split(' '));
        let layers = sets.fold(ConfigLayers::new(), |layers, set| {
            layers.with_set(set).unwrap()
        });
        layers.load().unwrap()
    };
    let expected = train(config(5), Layout::SINGLE);
    assert!(expected.steps[2].loss != expected.steps[0].loss);
    let found = train(config(micro_batch), layout.parse().unwrap());
    compare(&found, &expected, layout);
}
