//! Optimizer steps of a trainer whose host does not wait for the gradient norm.

use std::sync::Arc;

use burn::{
    prelude::{Device, Int},
    tensor::{Tensor, TensorData},
};
use megaburn::{
    collective::{Group, ProcessGroups},
    mesh::Layout,
    models::Family,
    optim::{DeviceScalar, GradientAccumulator, Sharding},
    parallel::{main_grads, read_params, shard_plan, vector_grads},
    train::{
        RunData, TrainConfig, TrainError, Trainer,
        config::{Dtype, OptimizerName, RecomputeConfig, RecomputeMethod, RecomputeModule},
    },
};

use crate::Test;
use megaburn_kernel_tests::part;
use megaburn_test_support::{
    layout_grid::Matrix,
    text::{fresh_seed, write_random_text},
};

pub(crate) const TESTS: &[Test] = &[
    ("clipped_steps_are_those_of_the_cpu", clipped),
    ("every_optimizer_steps_as_on_the_cpu", optimizers),
    (
        "a_loss_without_all_logits_is_that_of_the_cpu_with_them",
        fused_loss,
    ),
    ("what_is_computed_again_changes_no_bit", recompute),
    ("a_step_that_is_not_finite_changes_nothing", not_finite),
    ("samples_cut_out_of_a_batch_are_those_of_the_cpu", cut_out),
    ("a_sum_is_its_numbers", sums),
];

/// Runs `test` with a model of the matrix and a text for it.
pub(crate) fn with_config(
    test: impl FnOnce(TrainConfig) -> Result<(), String>,
) -> Result<(), String> {
    let folder = std::env::temp_dir().join(format!("megaburn-steps-{}", std::process::id()));
    std::fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
    let path = folder.join("text.txt");
    let model = &Matrix::read().models["untied"];
    write_random_text(&path, 200 * model.seq_len, fresh_seed());
    let found = test(model.config(path.to_str().expect("the folder's name is text"), 4, 2));
    // Temporary files may stay if they cannot be removed.
    let _ = std::fs::remove_dir_all(&folder);
    found
}

pub(crate) fn trainer(config: &TrainConfig, device: Device) -> Result<Trainer, TrainError> {
    let groups = ProcessGroups::new(&Group::single(config.run.seed), Layout::SINGLE)?;
    let data = Arc::new(RunData::load(config)?);
    Trainer::new(Arc::new(config.clone()), groups, device.autodiff(), data)
}

/// Losses and gradient norms of three steps.
fn numbers(config: &TrainConfig, device: Device) -> Result<Vec<f64>, String> {
    let told = |error: TrainError| error.to_string();
    let mut trainer = trainer(config, device).map_err(told)?;
    let mut numbers = Vec::new();
    for _ in 0..3 {
        let step = trainer.step().map_err(told)?;
        numbers.extend([step.loss, step.grad_norm]);
    }
    Ok(numbers)
}

fn compare(found: &[f64], expected: &[f64]) -> Result<(), String> {
    for (found, expected) in found.iter().zip(expected) {
        let relative = (found - expected).abs() / expected;
        // If both are 0, the relative difference is NaN, so compare for equality first.
        if found != expected && (relative.is_nan() || relative > 1e-5) {
            return Err(format!("{found}, on the CPU {expected}"));
        }
    }
    Ok(())
}

/// Clipping thresholds that every step exceeds, that no step exceeds, and 0 (no clipping).
fn clipped() -> Result<(), String> {
    with_config(|mut config| {
        for clip_grad in [0.05, 1e3, 0.0] {
            config.optimizer.clip_grad = clip_grad;
            let expected = numbers(&config, Device::flex())?;
            compare(&numbers(&config, Device::cuda(0))?, &expected)
                .map_err(|why| format!("clip_grad {clip_grad}: {why}"))?;
        }
        Ok(())
    })
}

pub(crate) const OPTIMIZERS: [OptimizerName; 4] = [
    OptimizerName::AdamW,
    OptimizerName::Sgd,
    OptimizerName::Lion,
    OptimizerName::Muon,
];

/// With a learning rate so low that updates whose sign rounding flips do not show.
fn optimizers() -> Result<(), String> {
    with_config(|mut config| {
        config.optimizer.lr = 1e-4;
        config.optimizer.clip_grad = 0.05;
        for name in OPTIMIZERS {
            config.optimizer.name = name;
            let expected = numbers(&config, Device::flex())?;
            compare(&numbers(&config, Device::cuda(0))?, &expected)
                .map_err(|why| format!("{name}: {why}"))?;
        }
        Ok(())
    })
}

/// The loss of one sample and the gradients of all parameters; the sample is a view of the batch,
/// as on a data-parallel rank.
fn of_sample(config: &TrainConfig, device: Device, sample: usize) -> Result<Vec<f64>, String> {
    let trainer = trainer(config, device.clone()).map_err(|error| error.to_string())?;
    let model = trainer.model();
    let samples = 3;
    let s = config.data.seq_len;
    let vocab = 50;
    let numbers = |step: usize| {
        let ids = (0..samples * s).map(|i| (i * step + i / 5) % vocab);
        let ids = TensorData::new(ids.map(|id| id as i64).collect(), [samples, s]);
        let all = Tensor::<2, Int>::from_data(ids, &device);
        all.narrow(0, sample, 1).swap_dims(0, 1)
    };
    let plan = shard_plan(model).map_err(|error| error.to_string())?;
    let grads = GradientAccumulator::new(model, &plan, &Sharding::none())
        .map_err(|error| error.to_string())?;
    let grads = grads.with_main_grads(main_grads(model));
    let mut grads = grads.with_vector_grads(vector_grads(model));
    grads.reset();
    let loss = model.loss(numbers(7), numbers(11));
    let mut found: Vec<f64> = loss.clone().into_data().iter().collect();
    grads.accumulate(model, &mut loss.backward());
    grads.reduce().map_err(|error| error.to_string())?;
    for (path, _) in plan.iter() {
        let grad = grads
            .get(path)
            .ok_or_else(|| format!("no gradient of {path}"))?;
        found.push(grad.powf_scalar(2.0).sum().into_data().iter::<f64>().sum());
    }
    if found.iter().any(|number| *number <= 0.0) {
        return Err(format!("a parameter without a gradient: {found:?}"));
    }
    Ok(found)
}

fn cut_out() -> Result<(), String> {
    with_config(|config| {
        for sample in 0..3 {
            let expected = of_sample(&config, Device::flex(), sample)?;
            compare(&of_sample(&config, Device::cuda(0), sample)?, &expected)
                .map_err(|why| format!("sample {sample}: {why}"))?;
        }
        Ok(())
    })
}

fn fused_loss() -> Result<(), String> {
    with_config(|mut config| {
        let expected = numbers(&config, Device::flex())?;
        config.train.fused_linear_cross_entropy = true;
        compare(&numbers(&config, Device::cuda(0))?, &expected)
    })
}

/// The recomputed norm has no fused addition before it: another kernel must give the same numbers.
fn recompute() -> Result<(), String> {
    with_config(|mut config| {
        use RecomputeModule::{Activation, CoreAttention, Mlp, Norm};
        let modules = |modules: &[RecomputeModule]| RecomputeConfig {
            modules: modules.to_vec(),
            ..RecomputeConfig::default()
        };
        let layers = |method, offload| RecomputeConfig {
            method,
            offload,
            ..RecomputeConfig::default()
        };
        let ways = [
            modules(&[Norm]),
            modules(&[Activation]),
            modules(&[Norm, Activation]),
            modules(&[Norm, CoreAttention, Mlp]),
            layers(RecomputeMethod::Uniform, false),
            layers(RecomputeMethod::Uniform, true),
            RecomputeConfig {
                modules: vec![Norm],
                ..layers(RecomputeMethod::Block, true)
            },
        ];
        let kept = [false, true].map(|offload| RecomputeConfig {
            keep_attention: true,
            ..layers(RecomputeMethod::Uniform, offload)
        });
        // The initial f16 loss scale is low enough that no step is skipped.
        config.optimizer.initial_loss_scale = 1024.0;
        for (family, dtype) in [Family::LLAMA, Family::GPT2]
            .into_iter()
            .flat_map(|family| [Dtype::F32, Dtype::Bf16, Dtype::F16].map(|dtype| (family, dtype)))
            .filter(|_| part::is_mine())
        {
            config.model.family = family;
            config.train.dtype = dtype;
            let drops = family == Family::GPT2;
            config.model.head_dim = (family == Family::LLAMA).then_some(16);
            config.train.hidden_dropout = if drops { 0.2 } else { 0.0 };
            config.train.attention_dropout = if drops { 0.1 } else { 0.0 };
            config.recompute = RecomputeConfig::default();
            let expected = numbers(&config, Device::cuda(0))?;
            if expected.iter().any(|number| !number.is_finite()) {
                return Err(format!("{family}, {dtype}: {expected:?}"));
            }
            // In f32, and for other head sizes, attention does not use a fused kernel, and
            // selective save keeps nothing.
            let is_fused = family == Family::LLAMA && dtype != Dtype::F32;
            let kept = kept.iter().filter(|_| is_fused);
            for way in ways.iter().chain(kept) {
                config.recompute = way.clone();
                let found = numbers(&config, Device::cuda(0))?;
                if found != expected {
                    return Err(format!(
                        "{family}, {dtype}, {:?}: {found:?}, not {expected:?}",
                        config.recompute
                    ));
                }
            }
        }
        Ok(())
    })
}

fn not_finite() -> Result<(), String> {
    with_config(|mut config| {
        config.optimizer.lr = 1e30;
        config.optimizer.clip_grad = 1.0;
        let dtypes = [Dtype::F32, Dtype::Bf16];
        let each = OPTIMIZERS
            .into_iter()
            .flat_map(|n| dtypes.map(|dtype| (n, dtype)));
        for (name, dtype) in each.filter(|_| part::is_mine()) {
            config.optimizer.name = name;
            config.train.dtype = dtype;
            let told = |error: TrainError| error.to_string();
            let mut trainer = trainer(&config, Device::cuda(0)).map_err(told)?;
            trainer.step().map_err(told)?;
            let params = read_params(trainer.model());
            let progress = trainer.progress();
            for _ in 0..2 {
                match trainer.step() {
                    Err(TrainError::NonFinite { step: 2, .. }) => {}
                    other => return Err(format!("{name}, {dtype}: {other:?}")),
                }
                if read_params(trainer.model()) != params || trainer.progress() != progress {
                    return Err(format!("{name}, {dtype}: something has changed"));
                }
            }
        }
        Ok(())
    })
}

fn sums() -> Result<(), String> {
    let group = Group::single(0);
    for (numbers, expected) in [
        (vec![1.5f32, -4.0, 0.25], -2.25),
        (vec![f32::INFINITY], f64::INFINITY),
    ] {
        let numbers = Tensor::<1>::from_floats(numbers.as_slice(), &Device::cuda(0));
        let found = DeviceScalar::of(numbers, &group).and_then(|sum| sum.read());
        if found != Ok(expected) {
            return Err(format!("{found:?}, not {expected}"));
        }
    }
    Ok(())
}
