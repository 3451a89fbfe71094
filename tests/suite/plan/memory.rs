//! The memory of a plan is that of the formulas, which other tests compare with what trainers hold.

use megaburn::{
    plan::Gpu,
    train::{
        ConfigLayers,
        estimate::{MemoryEstimate, Scores},
    },
};
use rstest::rstest;

use super::{LLAMA, config, plan, root};

#[rstest]
#[case("gpt2", &[])]
#[case("llama-3-8b", &["parallel.zero=2"])]
#[case("llama-3-8b", &["parallel.zero=3", "recompute.method=uniform"])]
#[case("llama-3-70b", &[])]
#[case("llama-3-70b", &["parallel.schedule=zb-v", "train.dtype=f32"])]
#[case("qwen3-8b", &["precision.recipe=tensorwise"])]
fn parts_are_those_of_the_estimate(#[case] name: &str, #[case] sets: &[&str]) {
    let layers = ConfigLayers::new().with_file(root().join(format!("configs/{name}.toml")));
    let layers = sets
        .iter()
        .fold(layers.unwrap(), |layers, set| layers.with_set(set).unwrap());
    let config = layers.load().unwrap();
    let layout = config.layout(None).unwrap();
    let scores = match sets.contains(&"train.dtype=f32") {
        true => Scores::Kept,
        false => Scores::Never,
    };
    let expected = MemoryEstimate::of_stages(&config, &layout, scores).unwrap();
    let planned = plan(config, Gpu::H100);
    assert_eq!(planned.memory.len(), expected.len());
    for (stage, (memory, estimate)) in planned.memory.iter().zip(&expected).enumerate() {
        assert_eq!(memory.stage, stage);
        assert_eq!(memory.parameters_bytes, estimate.parameters);
        assert_eq!(memory.gradients_bytes, estimate.gradients);
        assert_eq!(memory.optimizer_bytes, estimate.optimizer);
        assert_eq!(memory.activations_bytes, estimate.activations);
        let sum = estimate.total() + memory.buffers_bytes + memory.runtime_bytes;
        assert_eq!(memory.total_bytes, sum - memory.reused_bytes);
        let left = Gpu::H100.memory_bytes as i64 - memory.total_bytes as i64;
        assert_eq!(memory.headroom_bytes, left);
    }
    let fits = planned
        .memory
        .iter()
        .all(|memory| memory.headroom_bytes >= 0);
    assert_eq!(planned.fits, fits);
    assert!(!planned.fits || planned.changes.is_empty());
}

/// A change that is proposed is planned again with its flags: it fits, with the numbers that were
/// given.
#[rstest]
#[case("dp8", "")]
#[case("tp2-dp4-sp", "data.seq_len=32768")]
fn a_change_that_is_proposed_fits(#[case] layout: &str, #[case] sets: &str) {
    let sets = format!("model.layers=32 data.seq_len=8192 {sets}");
    let planned = plan(config(LLAMA, layout, 1, &sets), Gpu::H100);
    assert!(!planned.fits && !planned.changes.is_empty(), "{planned}");
    for change in &planned.changes {
        let layout = change.layout.unwrap_or(planned.layout);
        let layers = ConfigLayers::new().with_text("plan", LLAMA).unwrap();
        let settings = sets.split_whitespace().map(str::to_string);
        let settings = settings.chain(change.settings.iter().cloned());
        let layers = settings.fold(layers, |layers, set| layers.with_set(&set).unwrap());
        let batch = format!("train.global_batch={}", planned.batch.samples);
        let layers = layers.with_layout(&layout.to_string()).unwrap();
        let again = plan(layers.with_set(&batch).unwrap().load().unwrap(), Gpu::H100);
        assert!(again.fits, "{}: {again}", change.flags());
        assert_eq!(again.gpus, planned.gpus);
        assert_eq!(again.fullest().total_bytes, change.total_bytes);
        assert_eq!(again.time.step_ms, change.step_ms);
    }
    let times: Vec<_> = planned
        .changes
        .iter()
        .map(|change| change.step_ms)
        .collect();
    assert!(times.is_sorted(), "{times:?}");
}
