//! Every layout trains as one rank does.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use burn::prelude::Device;
use megaburn::{
    collective::{GroupOptions, ProcessGroups, objects, run_threads},
    mesh::Layout,
    optim::Moment,
    report::metrics::StepMetrics,
    train::{RunData, TrainConfig, TrainError, Trainer},
};
use rstest::rstest;

use megaburn_test_support::{
    gather::{FullParams, LocalParams, gather, local_params, relative_distance},
    layout_grid::{Matrix, Row},
    text::{fresh_seed, write_random_text},
};

/// The largest relative difference of losses, gradient norms, gradients and parameters.
const TOLERANCE: f64 = 1e-5;
/// The gradient of a bias is a sum over tokens that may cancel by chance, but the rounding of its terms
/// remains. So differences are relative to this part of the gradient of all parameters at least.
const LEAST_PART: f64 = 0.01;

pub(crate) struct Trained {
    pub(crate) steps: Vec<StepMetrics>,
    /// The parameters after the last step.
    params: FullParams,
    /// The gradients of the first step, all times the same number.
    pub(crate) grads: FullParams,
}

/// The first moment of every local parameter of a rank. After the first step it is the gradient of
/// the update times a constant. Ranks that shard it exchange their parts.
fn local_moments(trainer: &Trainer, groups: &ProcessGroups) -> Result<LocalParams, TrainError> {
    // This waits for parameters that are in flight.
    trainer.model();
    let shard = |path: &str| trainer.plan().get(path).unwrap().shard.clone();
    let len = |path: &str| shard(path).local_shape().iter().product();
    let mut held = Vec::new();
    let no_remainder = |path: &str| unreachable!("{path} has a whole master");
    let held_state = trainer.optimizer().held_state(len, no_remainder);
    for ((moment, path), state) in held_state.moments {
        if moment == Moment::ExpAvg {
            let range = state.range.clone();
            let values: Vec<f32> = state.read(range.clone())?.try_to_vec().unwrap();
            held.push((path, range.start, values));
        }
    }
    let mut local = Vec::new();
    for is_expert in [false, true] {
        let group = if is_expert {
            &groups.edp
        } else {
            &groups.dp_cp
        };
        let own = held
            .iter()
            .filter(|(path, ..)| shard(path).is_expert() == is_expert);
        let own: Vec<_> = own.cloned().collect();
        let all: Vec<Vec<(String, usize, Vec<f32>)>> =
            objects::broadcast(group, &objects::gather(group, &own)?)?;
        let paths: BTreeSet<_> = all
            .iter()
            .flatten()
            .map(|(path, ..)| path.clone())
            .collect();
        for path in paths {
            let mut values = vec![f32::NAN; len(&path)];
            for (_, start, part) in all.iter().flatten().filter(|(other, ..)| *other == path) {
                values[*start..start + part.len()].copy_from_slice(part);
            }
            let shard = shard(&path);
            local.push((path, values, shard));
        }
    }
    local.sort_by(|(a, ..), (b, ..)| a.cmp(b));
    Ok(local)
}

pub(crate) fn train(config: TrainConfig, layout: Layout) -> Trained {
    train_in(config, layout, |_| {})
}

/// As [`train`], in groups that `change` changes.
pub(crate) fn train_in(
    config: TrainConfig,
    layout: Layout,
    change: impl Fn(&mut ProcessGroups) + Sync,
) -> Trained {
    let data = Arc::new(RunData::load(&config).unwrap());
    let config = Arc::new(config);
    let num_steps = config.train.steps;
    let options = GroupOptions {
        seed: config.run.seed,
        ..Default::default()
    };
    let ranks = run_threads(layout.world_size(), options, |world| {
        let mut groups = ProcessGroups::new(&world, layout)?;
        change(&mut groups);
        let device = Device::flex().autodiff();
        let mut trainer = Trainer::new(config.clone(), groups.clone(), device, data.clone())?;
        let mut steps = vec![trainer.step()?];
        let grads = local_moments(&trainer, &groups)?;
        for _ in 1..num_steps {
            steps.push(trainer.step()?);
        }
        Ok::<_, TrainError>((steps, (local_params(&trainer)?, grads)))
    });
    let ranks: Vec<_> = ranks.into_iter().map(Result::unwrap).collect();
    let (steps, local): (Vec<_>, Vec<_>) = ranks.into_iter().unzip();
    let (params, grads): (Vec<_>, Vec<_>) = local.into_iter().unzip();
    for rank in &steps {
        let numbers = |steps: &[StepMetrics]| -> Vec<(f64, f64)> {
            steps
                .iter()
                .map(|step| (step.loss, step.grad_norm))
                .collect()
        };
        assert_eq!(
            numbers(rank),
            numbers(&steps[0]),
            "ranks report different numbers"
        );
    }
    let [params, grads] = [params, grads].map(|local| gather(&local));
    // The routers' expert biases have no gradient.
    let trained = params.keys().filter(|path| !path.ends_with(".router.bias"));
    assert!(grads.keys().eq(trained), "a parameter has no gradient");
    Trained {
        steps: steps.into_iter().next().unwrap(),
        params,
        grads,
    }
}

#[rstest]
fn every_layout_trains_as_one_rank_does(
    #[values("untied", "grouped", "one-group", "threes", "fives-and-sevens")] name: &str,
) {
    let Matrix { rows, models } = Matrix::read();
    let model = &models[name];
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("text.txt");
    write_random_text(&path, 200 * model.seq_len, fresh_seed());
    let data = path.to_str().unwrap();

    let mut one_rank: BTreeMap<usize, Trained> = BTreeMap::new();
    for row in rows.iter().filter(|row| row.model == name) {
        let batch = row.global_batch;
        let expected = one_rank
            .entry(batch)
            .or_insert_with(|| train(model.config(data, batch, batch), Layout::SINGLE));
        compare(
            &train(row.config(model, data), row.layout),
            expected,
            &row.name(),
        );
    }
    assert!(
        one_rank
            .values()
            .all(|run| run.steps[2].loss != run.steps[0].loss)
    );
}

#[rstest]
fn a_loss_without_all_logits_trains_as_one_with_them_under_every_layout(
    #[values("untied", "grouped")] name: &str,
    #[values("tp1", "tp2", "tp2-sp", "tp4-sp", "tp8-sp", "dp2", "tp2-dp2-sp")] layout: &str,
) {
    let model = &Matrix::read().models[name];
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("text.txt");
    write_random_text(&path, 200 * model.seq_len, fresh_seed());
    let config = |micro_batch, fused| {
        let mut config = model.config(path.to_str().unwrap(), 6, micro_batch);
        config.train.fused_linear_cross_entropy = fused;
        config
    };
    let expected = train(config(6, false), Layout::SINGLE);
    let found = train(config(1, true), layout.parse().unwrap());
    compare(&found, &expected, &format!("{name}, {layout}"));
}

pub(crate) fn compare(found: &Trained, expected: &Trained, row: &str) {
    compare_within(found, expected, row, TOLERANCE);
}

/// [`compare`] with another tolerance.
pub(crate) fn compare_within(found: &Trained, expected: &Trained, row: &str, tolerance: f64) {
    for (found, expected) in found.steps.iter().zip(&expected.steps) {
        let numbers = [
            ("loss", found.loss, expected.loss),
            ("gradient norm", found.grad_norm, expected.grad_norm),
        ];
        assert_eq!(found.mtp_losses.len(), expected.mtp_losses.len(), "{row}");
        let further = found.mtp_losses.iter().zip(&expected.mtp_losses);
        let further = further.map(|(found, expected)| ("loss of a depth", *found, *expected));
        for (what, found, expected) in numbers.into_iter().chain(further) {
            let relative = (found - expected).abs() / expected;
            assert!(
                relative <= tolerance,
                "{row}: {what} {found}, on one rank {expected}"
            );
        }
    }
    for (found, expected) in found.steps.iter().zip(&expected.steps) {
        compare_experts(found, expected, row, tolerance);
    }
    assert!(
        found.params.keys().eq(expected.params.keys()),
        "{row}: other parameters"
    );
    let norm = |values: &[f32]| -> f64 {
        let squares = values.iter().map(|value| f64::from(*value).powi(2));
        squares.sum::<f64>().sqrt()
    };
    let of_all = expected.grads.values().map(|grad| norm(grad).powi(2));
    let least = LEAST_PART * of_all.sum::<f64>().sqrt();
    for (path, params) in &found.params {
        let relative = relative_distance(params, &expected.params[path]);
        assert!(
            relative <= tolerance,
            "{row}: {path} differs by {relative:e}"
        );
        let Some(expected) = expected.grads.get(path) else {
            continue;
        };
        let found = &found.grads[path];
        let is_zero = |values: &[f32]| values.iter().all(|value| *value == 0.0);
        // An expert may have no tokens.
        if path.contains(".experts.") && is_zero(expected) {
            assert!(is_zero(found), "{row}: the gradient of {path} is not zero");
            continue;
        }
        assert!(!is_zero(expected), "the gradient of {path} is zero");
        let own = norm(expected);
        let relative = relative_distance(found, expected) * own / own.max(least);
        assert!(
            relative <= tolerance,
            "{row}: the gradient of {path} differs by {relative:e}"
        );
    }
}

/// Compares the expert metrics of a step.
fn compare_experts(found: &StepMetrics, expected: &StepMetrics, row: &str, tolerance: f64) {
    let (Some(found), Some(expected)) = (&found.experts, &expected.experts) else {
        assert!(found.experts.is_none() && expected.experts.is_none());
        return;
    };
    assert_eq!(
        (&found.busiest, &found.idlest),
        (&expected.busiest, &expected.idlest),
        "{row}"
    );
    for (what, found, expected) in [
        ("aux loss", found.aux_loss, expected.aux_loss),
        (
            "sequence aux loss",
            found.seq_aux_loss,
            expected.seq_aux_loss,
        ),
        (
            "global aux loss",
            found.global_aux_loss,
            expected.global_aux_loss,
        ),
        ("z loss", found.z_loss, expected.z_loss),
        ("dropped", found.dropped, expected.dropped),
    ] {
        let off = (found - expected).abs();
        assert!(
            off <= tolerance * expected,
            "{row}: {what} {found}, on one rank {expected}"
        );
    }
}

/// Asserts that a list contains every pair of values of two columns that `all` contains, and that
/// there are more than `least` of them.
pub(crate) fn assert_every_pair<const N: usize>(
    list: impl IntoIterator<Item = [String; N]>,
    all: impl IntoIterator<Item = [String; N]>,
    least: usize,
) {
    let found = pairs(list);
    let expected = pairs(all);
    let missing: Vec<_> = expected.difference(&found).collect();
    assert!(expected.len() > least && missing.is_empty(), "{missing:?}");
}

/// All pairs of values of two columns, in rows that contain each column's value.
fn pairs<const N: usize>(
    rows: impl IntoIterator<Item = [String; N]>,
) -> BTreeSet<(String, String)> {
    let mut pairs = BTreeSet::new();
    for row in rows {
        for (index, a) in row.iter().enumerate() {
            pairs.extend(row[index + 1..].iter().map(|b| (a.clone(), b.clone())));
        }
    }
    pairs
}

#[test]
fn the_matrix_covers_what_it_should() {
    let Matrix { rows, models } = Matrix::read();
    let all = |value: fn(&Row) -> usize| rows.iter().map(value).collect::<BTreeSet<_>>();
    assert!((1..=8).all(|tp| all(|row| row.layout.tp).contains(&tp)));
    assert!((1..=8).all(|dp| all(|row| row.layout.dp).contains(&dp)));
    assert!(rows.iter().all(|row| row.layout.world_size() <= 8));
    assert!(
        rows.iter()
            .filter(|row| row.layout.sp)
            .any(|row| row.layout.world_size() == 8)
    );
    assert!((0..=3).all(|zero| all(|row| row.zero.into()).contains(&zero)));
    assert!(
        rows.iter()
            .any(|row| row.zero_ranks.is_some_and(|ranks| ranks < row.layout.dp))
    );
    let micro_batches = all(|row| row.global_batch / row.micro_batch / row.layout.dp);
    assert!(
        [1, 3, 5, 7].iter().all(|odd| micro_batches.contains(odd)),
        "{micro_batches:?}"
    );
    let run: BTreeSet<_> = rows.iter().map(|row| &row.model).collect();
    assert!(
        models.keys().eq(run),
        "a model without rows, or the other way round"
    );
    let tied = models
        .values()
        .map(|model| model.sizes["tied"].as_bool().unwrap());
    assert_eq!(tied.collect::<BTreeSet<_>>().len(), 2);
}
