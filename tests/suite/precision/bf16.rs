//! Runs in bf16 match f32 runs, up to the rounding of parameters and activations.
//!
//! A bf16 number has 8 bits, so rounding changes it by at most 1/512 of itself. Losses are means
//! over many tokens and gradients are sums, in which rounding errors mostly cancel. The bounds
//! below are a few times 1/512, and each test would fail by far if an f32 part were in bf16, or if
//! the weights were different.

use std::sync::Arc;

use burn::{
    prelude::Device,
    tensor::{DType, bf16},
};
use megaburn::{
    checkpoint::newest,
    collective::{GroupOptions, ProcessGroups, run_threads},
    mesh::{Axis, ShardSpec},
    parallel::read_params,
    report::metrics::StepMetrics,
    train::{RunData, TrainConfig, TrainError, Trainer, config::Dtype},
};
use rstest::rstest;

use megaburn_test_support::{
    gather::{FullParams, relative_distance},
    run::{Run, STEPS},
    text::{fresh_seed, write_random_words},
};

pub(crate) fn config(run: &Run, layout: &str, dtype: Dtype) -> TrainConfig {
    let mut config = run.config(layout, STEPS);
    config.train.dtype = dtype;
    config
}

/// With this large an epsilon AdamW is plain descent: its update is proportional to the gradient.
/// Otherwise an update has the same size for every gradient, and rounding may decide its direction.
pub(crate) fn plain_descent(run: &Run, layout: &str, dtype: Dtype) -> TrainConfig {
    let mut config = config(run, layout, dtype);
    config.optimizer.eps = 1e3;
    config.optimizer.lr = 1e3;
    config.optimizer.warmup_steps = 0;
    config.optimizer.weight_decay = 0.0;
    config
}

/// Plain descent in steps so short that ten of them do not double the rounding error of the first.
fn gentle_descent(run: &Run, dtype: Dtype) -> TrainConfig {
    let mut config = plain_descent(run, "tp1", dtype);
    config.optimizer.lr = 1e2;
    config.optimizer.min_lr = 1e2;
    config
}

/// Resumes the run in `run.dir`, trains to step `until`, and saves.
pub(crate) fn train(config: TrainConfig, until: u64) -> Vec<StepMetrics> {
    let layout = config.layout(None).unwrap();
    let data = Arc::new(RunData::load(&config).unwrap());
    let options = GroupOptions {
        seed: config.run.seed,
        ..Default::default()
    };
    let config = Arc::new(config);
    let mut ranks = run_threads(layout.world_size(), options, |world| {
        let groups = ProcessGroups::new(&world, layout)?;
        let device = Device::flex().autodiff();
        let mut trainer = Trainer::new(config.clone(), groups, device, data.clone())?;
        trainer.resume()?;
        let mut steps = Vec::new();
        while trainer.progress().step < until {
            steps.push(trainer.step()?);
        }
        trainer.save()?;
        let dtype = match config.train.dtype {
            Dtype::F32 => DType::F32,
            Dtype::Bf16 => DType::BF16,
            Dtype::F16 => DType::F16,
        };
        assert!(
            read_params(trainer.model())
                .iter()
                .all(|(_, data)| data.dtype() == dtype)
        );
        Ok::<_, TrainError>(steps)
    });
    ranks.remove(0).unwrap()
}

/// Every full tensor of the newest checkpoint: parameters and moments, all of them f32.
pub(crate) fn saved(run: &Run) -> FullParams {
    saved_in(run, DType::F32)
}

/// Like [`saved`], for a checkpoint whose tensors all have type `dtype`; widens them to f32.
pub(crate) fn saved_in(run: &Run, dtype: DType) -> FullParams {
    let checkpoint = newest(&run.checkpoints()).unwrap().checkpoint.unwrap();
    let read = |(name, info): (&String, &megaburn::checkpoint::TensorInfo)| {
        let whole = ShardSpec::whole(&info.global_shape, Axis::Tp, 0, 1);
        assert_eq!(checkpoint.dtype(name).unwrap(), dtype, "{name}");
        let data = checkpoint.read(name, &whole, DType::F32).unwrap();
        (name.clone(), data.try_to_vec().unwrap())
    };
    checkpoint.manifest().tensors.iter().map(read).collect()
}

pub(crate) fn bits(params: &FullParams) -> Vec<(&str, Vec<u32>)> {
    let bits = |values: &Vec<f32>| values.iter().map(|value| value.to_bits()).collect();
    params
        .iter()
        .map(|(name, values)| (name.as_str(), bits(values)))
        .collect()
}

/// The change of each parameter in the first step.
pub(crate) fn first_update(config: impl Fn(&Run) -> TrainConfig) -> (StepMetrics, FullParams) {
    let run = Run::new();
    train(config(&run), 0);
    let before = saved(&run);
    let step = train(config(&run), 1).remove(0);
    let params = saved(&run)
        .into_iter()
        .filter(|(name, _)| name.starts_with("model."));
    let difference = |(name, after): (String, Vec<f32>)| {
        let moved = after
            .iter()
            .zip(&before[&name])
            .map(|(after, before)| after - before);
        (name.clone(), moved.collect())
    };
    (step, params.map(difference).collect())
}

pub(crate) fn assert_updates_close(
    found: &FullParams,
    expected: &FullParams,
    tolerance: f64,
    what: &str,
) {
    assert!(found.keys().eq(expected.keys()));
    for (name, found) in found {
        let relative = relative_distance(found, &expected[name]);
        assert!(
            relative <= tolerance,
            "{what}: the update of {name} differs by {relative:e}"
        );
    }
}

pub(crate) fn relative(found: f64, expected: f64) -> f64 {
    (found - expected).abs() / expected
}

#[test]
fn a_run_starts_from_exactly_the_numbers_of_an_f32_run() {
    let [narrow, wide] = [Dtype::Bf16, Dtype::F32].map(|dtype| {
        let run = Run::new();
        train(config(&run, "tp2", dtype), 0);
        saved(&run)
    });
    assert_eq!(bits(&narrow), bits(&wide));
    let exact = |value: &f32| bf16::from_f32(*value).to_f32() == *value;
    assert!(
        !narrow.values().flatten().all(exact),
        "they are not roundings"
    );
}

#[test]
fn one_step_and_ten_steps_are_those_of_an_f32_run_up_to_rounding() {
    let (found, update) = first_update(|run| plain_descent(run, "tp1", Dtype::Bf16));
    let (expected, of_f32) = first_update(|run| plain_descent(run, "tp1", Dtype::F32));
    assert!(
        relative(found.loss, expected.loss) < 1e-3,
        "{found:?} {expected:?}"
    );
    assert!(
        relative(found.grad_norm, expected.grad_norm) < 1e-2,
        "{found:?} {expected:?}"
    );
    assert_ne!(found.loss, expected.loss, "it is no bf16 run");
    assert_updates_close(&update, &of_f32, 3e-2, "bf16");

    let steps = |dtype| train(gentle_descent(&Run::new(), dtype), 10);
    for (found, expected) in steps(Dtype::Bf16).iter().zip(steps(Dtype::F32)) {
        assert!(
            relative(found.loss, expected.loss) < 1e-3,
            "{found:?} {expected:?}"
        );
        assert!(
            relative(found.grad_norm, expected.grad_norm) < 1e-2,
            "{found:?} {expected:?}"
        );
    }
    // AdamW's updates have the same size even where rounding decides their direction. Ten steps
    // later the gradients may differ by a third, but the losses do not.
    let losses = |dtype| train(config(&Run::new(), "tp1", dtype), 10);
    for (found, expected) in losses(Dtype::Bf16).iter().zip(losses(Dtype::F32)) {
        assert!(
            relative(found.loss, expected.loss) < 4e-3,
            "{found:?} {expected:?}"
        );
    }
}

#[rstest]
// Each sample is computed as on one rank, and the gradients are summed in f32, so bf16 rounds the
// same way. (An update of a norm's weight is small relative to the weight, whose rounding shows.) In bf16
// the sums of eight gradients would differ by 1/512.
#[case("dp2", 1e-6, 1e-4)]
#[case("dp4", 1e-6, 1e-4)]
// Partial products are rounded before they are summed.
#[case("tp2", 1e-3, 3e-2)]
#[case("tp2-sp", 1e-3, 3e-2)]
#[case("tp4-sp", 1e-3, 3e-2)]
#[case("tp2-dp2-sp", 1e-3, 3e-2)]
fn every_layout_trains_as_one_rank_does_up_to_rounding(
    #[case] layout: &str,
    #[case] tolerance: f64,
    #[case] tolerance_of_updates: f64,
) {
    let (found, update) = first_update(|run| plain_descent(run, layout, Dtype::Bf16));
    let (expected, of_one) = first_update(|run| plain_descent(run, "tp1", Dtype::Bf16));
    assert!(
        relative(found.loss, expected.loss) <= tolerance,
        "{found:?} {expected:?}"
    );
    let norms = relative(found.grad_norm, expected.grad_norm);
    assert!(norms <= 10.0 * tolerance, "{found:?} {expected:?}");
    assert_updates_close(&update, &of_one, tolerance_of_updates, layout);
    let steps = |layout| train(config(&Run::new(), layout, Dtype::Bf16), 5);
    for (found, expected) in steps(layout).iter().zip(steps("tp1")) {
        assert!(
            relative(found.loss, expected.loss) < 4e-3,
            "{found:?} {expected:?}"
        );
    }
}

#[rstest]
fn a_checkpoint_holds_the_masters_for_any_layout_and_either_type(
    #[values(Dtype::Bf16, Dtype::F32)] written: Dtype,
) {
    let run = Run::new();
    train(config(&run, "tp2-dp2-sp", written), 2);
    let expected = saved(&run);
    for (layout, dtype) in [
        ("tp1", Dtype::Bf16),
        ("tp4-sp", Dtype::Bf16),
        ("dp2", Dtype::F32),
        ("tp2", Dtype::Bf16),
    ] {
        // Load the run and save it at the same step.
        train(config(&run, layout, dtype), 2);
        assert_eq!(bits(&saved(&run)), bits(&expected), "{layout}, {dtype}");
    }
    let next = |dtype| {
        let again = Run::new();
        train(config(&again, "tp2-dp2-sp", written), 2);
        train(config(&again, "tp1", dtype), 3).remove(0).loss
    };
    assert!(relative(next(Dtype::Bf16), next(Dtype::F32)) < 1e-3);
}

#[test]
fn a_learning_rate_below_bf16s_resolution_trains_all_the_same() {
    let run = Run::new();
    let slow = || {
        let mut config = config(&run, "tp2", Dtype::Bf16);
        config.optimizer.lr = 1e-6;
        config.optimizer.warmup_steps = 0;
        config.optimizer.min_lr = 1e-6;
        config.optimizer.weight_decay = 0.0;
        config
    };
    train(slow(), 0);
    let before = saved(&run);
    train(slow(), 5);
    let [mut moved, mut moved_rounding, mut all] = [0; 3];
    for (name, after) in saved(&run)
        .iter()
        .filter(|(name, _)| before.contains_key(*name))
    {
        for (after, before) in after.iter().zip(before[name].iter()) {
            let rounding = |value: f32| bf16::from_f32(value).to_bits();
            moved += usize::from(after != before);
            moved_rounding += usize::from(rounding(*after) != rounding(*before));
            all += 1;
        }
    }
    assert!(moved > all * 9 / 10, "{moved} of {all} masters have moved");
    assert!(
        moved_rounding < all / 4,
        "{moved_rounding} of {all} parameters have moved"
    );
}

#[test]
fn the_loss_curve_of_the_tiny_example_is_that_of_f32() {
    let dir = tempfile::tempdir().unwrap();
    let text = dir.path().join("words.txt");
    write_random_words(&text, 60_000, fresh_seed());
    let curve = |dtype| {
        let mut config = TrainConfig::default();
        config.data.path = Some(text.display().to_string());
        config.run.dir = dir.path().join(format!("{dtype}")).display().to_string();
        config.parallel.ranks = Some(1);
        config.parallel.tp = Some(1);
        config.train.dtype = dtype;
        // With the example's learning rate and half of its batch, even two f32 layouts would
        // diverge.
        config.train.global_batch = 4;
        config.optimizer.lr = 1e-3;
        let losses = train(config, 30).into_iter().map(|step| step.loss);
        losses.collect::<Vec<_>>()
    };
    let found = curve(Dtype::Bf16);
    let expected = curve(Dtype::F32);
    assert!(
        expected[29] < 0.7 * expected[0],
        "it does not learn: {expected:?}"
    );
    eprintln!(
        "XX {:?}",
        found
            .iter()
            .zip(&expected)
            .map(|(f, e)| (relative(*f, *e) * 1e5) as i32)
            .collect::<Vec<_>>()
    );
    for (found, expected) in found.iter().zip(&expected) {
        assert!(relative(*found, *expected) < 2e-3, "{found} {expected}");
    }
}
