//! Every layout on GPUs trains like one rank.

use std::{collections::BTreeMap, path::Path, sync::Arc};

use burn::tensor::TensorData;
use megaburn::{
    collective::{Group, ProcessGroups},
    mesh::Layout,
    report::metrics::{ExpertMetrics, StepMetrics},
    train::{RunData, TrainConfig, TrainError, Trainer},
};

use crate::{GroupTest, ranks::this_gpu};
use megaburn_kernel_tests::part;
use megaburn_test_support::{
    gather::{FullParams, LocalParams, gather, local_params, relative_distance},
    layout_grid::{Matrix, Row},
    text::{fresh_seed, write_random_text},
};

pub(crate) const GROUP_TESTS: &[GroupTest] = &[("the_matrix_trains_as_one_gpu_does", matrix)];

/// Relative tolerance of losses, gradient norms and each parameter.
const TOLERANCE: f64 = 1e-5;

/// Loss, gradient norm and expert metrics of each step, and the final parameters.
pub(crate) type Trained = (Vec<Vec<f64>>, LocalParams);

/// The results of one rank, with full parameters.
pub(crate) type Expected = (Vec<Vec<f64>>, FullParams);

/// Runs all steps of a configuration.
pub(crate) fn train(
    config: TrainConfig,
    world: &Group,
    layout: Layout,
) -> Result<Trained, TrainError> {
    let data = Arc::new(RunData::load(&config)?);
    let groups = ProcessGroups::new(world, layout)?;
    let num_steps = config.train.steps;
    let device = this_gpu().autodiff();
    let mut trainer = Trainer::new(Arc::new(config), groups, device, data)?;
    let steps = (0..num_steps).map(|_| Ok(numbers(&trainer.step()?)));
    let steps = steps.collect::<Result<_, TrainError>>()?;
    Ok((steps, local_params(&trainer)?))
}

fn numbers(step: &StepMetrics) -> Vec<f64> {
    let of_experts = |all: &ExpertMetrics| {
        let losses = [
            all.aux_loss,
            all.seq_aux_loss,
            all.global_aux_loss,
            all.z_loss,
            all.dropped,
        ];
        [&losses[..], &all.busiest, &all.idlest].concat()
    };
    let of_experts = step.experts.as_ref().map(of_experts).unwrap_or_default();
    [vec![step.loss, step.grad_norm], of_experts].concat()
}

fn matrix(world: &Group) -> Result<(), String> {
    let Matrix { rows, models } = Matrix::read();
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let folder = std::env::temp_dir().join(format!("megaburn-gpu-{}", std::process::id()));
    std::fs::create_dir_all(&folder).map_err(|error| text(&error))?;
    let seed = TensorData::from([fresh_seed() as i64]);
    let seed = world.broadcast(seed, 0).map_err(|error| text(&error))?;
    let seed = seed.try_to_vec::<i64>().expect("the tensor is i64")[0] as u64;
    let mut alone: BTreeMap<(String, usize), Expected> = BTreeMap::new();
    let of_world = rows
        .iter()
        .filter(|row| row.layout.world_size() == world.size());
    let of_world: Vec<&Row> = of_world.collect();
    if of_world.len() < 5 {
        return Err(format!("only {} rows", of_world.len()));
    }
    for row in of_world.into_iter().filter(|_| part::is_mine()) {
        let Row {
            model: name,
            layout,
            global_batch,
            ..
        } = row;
        let model = &models[name];
        let path = folder.join(format!("{name}.txt"));
        write_random_text(&path, 200 * model.seq_len, seed);
        let data = path.to_str().expect("the folder's name is text");
        let key = (name.clone(), *global_batch);
        if !alone.contains_key(&key) {
            let config = model.config(data, *global_batch, *global_batch);
            let one = Group::single(world.seed());
            let (steps, params) =
                train(config, &one, Layout::SINGLE).map_err(|error| text(&error))?;
            alone.insert(key.clone(), (steps, gather(&[params])));
        }
        let named = |error: String| format!("{}: {error}", row.name());
        let found = train(row.config(model, data), world, *layout);
        let found = found.map_err(|error| named(error.to_string()))?;
        compare(&found, &alone[&key]).map_err(named)?;
    }
    remove(&folder);
    Ok(())
}

fn remove(folder: &Path) {
    // Temporary files may stay if they cannot be removed.
    let _ = std::fs::remove_dir_all(folder);
}

pub(crate) fn compare(found: &Trained, expected: &Expected) -> Result<(), String> {
    for (step, (found, expected)) in found.0.iter().zip(&expected.0).enumerate() {
        let is_near = |(a, b): (&f64, &f64)| (a - b).abs() <= TOLERANCE * b.abs();
        let near = found
            .iter()
            .zip(expected)
            .filter(|pair| is_near(*pair))
            .count();
        if found.len() != expected.len() || near != expected.len() {
            return Err(format!(
                "loss, gradient norm and experts of step {step}: {found:?}, on one GPU {expected:?}"
            ));
        }
    }
    for (path, local, spec) in &found.1 {
        let whole = &expected.1[path];
        let mut same_part = vec![0.0; local.len()];
        for piece in &spec.pieces {
            spec.for_each_run(piece, |from, to, len| {
                same_part[from..from + len].copy_from_slice(&whole[to..to + len]);
            });
        }
        let relative = relative_distance(local, &same_part);
        if relative.is_nan() || relative > TOLERANCE {
            return Err(format!("{path} differs by {relative:e}"));
        }
    }
    Ok(())
}
