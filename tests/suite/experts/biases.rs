//! Experts with biases, of which many get no token in a micro-batch.

use megaburn::{
    mesh::Layout,
    train::{ConfigLayers, TrainConfig, config::Dtype},
};
use rstest::rstest;

use crate::{
    layouts::grid::{compare_within, train},
    precision::bf16::{assert_updates_close, first_update, plain_descent},
};
use megaburn_test_support::{
    layout_grid::{EPSILON, STEPS},
    run::Run,
    text::{fresh_seed, write_random_text},
};

/// 16 experts for the 4 tokens of a micro-batch. A rank may hold none of the experts that they choose.
fn config(data: &str, layout: &str, sets: &[&str]) -> TrainConfig {
    let text = format!(
        "[model]\nhidden = 16\nffn = 8\nlayers = 2\nheads = 2\nkv_heads = 2\nexperts.num = 16
        experts.top_k = 1\nexperts.normalise = false\nparts.mlp_bias = true\nparts.qkv_bias = true
        [data]\npath = {data:?}\nseq_len = 4
        [train]\nsteps = {STEPS}\nglobal_batch = 8\nmicro_batch = 1
        [optimizer]\nlr = 1e-3\neps = {EPSILON}\nwarmup_steps = 0"
    );
    let layers = ConfigLayers::new().with_text("biases", &text).unwrap();
    let layers = layers.with_layout(layout).unwrap();
    let layers = sets
        .iter()
        .try_fold(layers, |layers, set| layers.with_set(set));
    layers.unwrap().load().unwrap()
}

#[rstest]
fn experts_without_tokens_learn_as_on_one_rank(
    #[values("dp4-ep4", "dp4-ep2", "tp2-dp2-ep2-sp", "dp2-etp2", "pp2-dp2-ep2")] layout: &str,
    #[values(0, 1, 2, 3)] zero: u8,
) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("text.txt");
    write_random_text(&path, 2_000, fresh_seed());
    let data = path.to_str().unwrap();
    let zero = format!("parallel.zero={zero}");
    let sets = [zero.as_str(), "parallel.bucket_size=500"];
    let found = train(config(data, layout, &sets), layout.parse().unwrap());
    let expected = train(config(data, "tp1", &[]), Layout::SINGLE);
    let is_unused = |path: &str| expected.grads[path].iter().all(|x| *x == 0.0);
    let biases = || {
        expected
            .grads
            .keys()
            .filter(|path| path.ends_with("up.bias"))
    };
    assert!(biases().any(|path| is_unused(path)) && !biases().all(|path| is_unused(path)));
    compare_within(&found, &expected, &format!("{layout}, {zero}"), 1e-4);
}

/// The choice of experts does not depend on rounding, so only the rounding of activations differs.
#[test]
fn bf16_updates_of_expert_biases_are_those_of_f32_up_to_rounding() {
    let updates = |dtype| {
        let of = |run: &Run| {
            let mut config = plain_descent(run, "dp2-ep2", dtype);
            config.model.parts.get_or_insert_default().mlp_bias = Some(true);
            let experts = config.model.experts.get_or_insert_default();
            (experts.num, experts.top_k) = (4, 2);
            config.moe.force_balance = true;
            config
        };
        first_update(of).1
    };
    let [mut narrow, wide] = [Dtype::Bf16, Dtype::F32].map(updates);
    narrow.retain(|path, _| path.contains(".experts."));
    let biases = narrow.keys().filter(|path| path.ends_with(".bias")).count();
    assert_eq!(biases, 2 * 2 * 4);
    let wide = wide
        .into_iter()
        .filter(|(path, _)| path.contains(".experts."))
        .collect();
    assert_updates_close(&narrow, &wide, 3e-2, "bf16");
}
