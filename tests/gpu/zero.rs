//! Neither ZeRO nor overlapped communication on GPUs changes the results.

use std::sync::Arc;

use burn::tensor::TensorData;
use megaburn::{
    collective::{Group, ProcessGroups},
    train::{ConfigLayers, RunData, TrainConfig, TrainError, Trainer, config::OptimizerName},
};

use crate::{GroupTest, ranks::this_gpu};
use megaburn_test_support::{
    gather::{LocalParams, relative_distance},
    text::write_random_text,
};

pub(crate) const GROUP_TESTS: &[GroupTest] =
    &[("every_stage_trains_as_none_that_sends_at_the_end", stages)];

/// Large enough that a GPU computes during communication, with several buckets, parameters that are
/// split across ranks, and nothing nondeterministic: sequences are too short for cuDNN's attention.
const CONFIG: &str = "
[model]
hidden = 1024
ffn = 2816
layers = 4
heads = 16
kv_heads = 4
vocab = 4000
tied = false
[data]
seq_len = 512
[parallel]
bucket_size = 4000000
[train]
dtype = 'bf16'
micro_batch = 2
[optimizer]
lr = 1e-3
warmup_steps = 0
clip_grad = 0.0
";

const STEPS: usize = 12;

fn train(
    config: TrainConfig,
    data: &Arc<RunData>,
    world: &Group,
) -> Result<(Vec<f64>, LocalParams), TrainError> {
    let groups = ProcessGroups::new(world, format!("dp{}", world.size()).parse()?)?;
    let device = this_gpu().autodiff();
    let mut trainer = Trainer::new(Arc::new(config), groups, device, data.clone())?;
    let losses = (0..STEPS)
        .map(|_| Ok(trainer.step()?.loss))
        .collect::<Result<_, TrainError>>()?;
    let widened = |data: TensorData| data.convert::<f32>().try_to_vec().expect("it is f32 now");
    let params = megaburn::parallel::read_params(&trainer.full_model()?).into_iter();
    let spec = |path: &str| {
        trainer
            .plan()
            .get(path)
            .expect("it is planned")
            .shard
            .clone()
    };
    let params = params.map(|(path, data)| (path.clone(), widened(data), spec(&path)));
    Ok((losses, params.collect()))
}

fn stages(world: &Group) -> Result<(), String> {
    let folder = std::env::temp_dir().join(format!("megaburn-zero-{}", std::process::id()));
    std::fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
    let path = folder.join("text.txt");
    write_random_text(&path, 200_000, 1234);
    let config =
        |zero: u8, overlap: bool, micro_batches: usize| -> Result<TrainConfig, TrainError> {
            let layers = ConfigLayers::new().with_text("zero.rs", CONFIG)?;
            let mut config = layers
                .with_data(path.to_str().expect("it is text"))?
                .load()?;
            config.train.global_batch = 2 * micro_batches * world.size();
            config.parallel.zero = zero;
            config.parallel.overlap = overlap;
            Ok(config)
        };
    let run = || -> Result<(), String> {
        let text = |error: TrainError| error.to_string();
        let data = Arc::new(RunData::load(&config(0, false, 1).map_err(text)?).map_err(text)?);
        let train = |zero, overlap, micro_batches| {
            config(zero, overlap, micro_batches).and_then(|config| train(config, &data, world))
        };
        for micro_batches in [1, 3] {
            let (losses, params) = train(0, false, micro_batches).map_err(text)?;
            let stages = (0..=3).flat_map(|zero| [(zero, false), (zero, true)]);
            for (zero, overlap) in stages.chain([(1, true)]) {
                // From stage 2 on, gradients are summed over ranks before micro-batches, else
                // after; rounding differs.
                if zero >= 2 && micro_batches > 1 {
                    continue;
                }
                let found = train(zero, overlap, micro_batches).map_err(text)?;
                compare(&found, &losses, &params, world.size()).map_err(|why| {
                    format!("zero {zero}, overlap {overlap}, {micro_batches} micro-batches: {why}")
                })?;
            }
        }
        let muon = |zero| {
            config(zero, true, 1).and_then(|mut config| {
                config.optimizer.name = OptimizerName::Muon;
                self::train(config, &data, world)
            })
        };
        let (losses, params) = muon(0).map_err(text)?;
        for zero in 1..=3 {
            compare(&muon(zero).map_err(text)?, &losses, &params, world.size())
                .map_err(|why| format!("muon, zero {zero}: {why}"))?;
        }
        Ok(())
    };
    let result = run();
    // Temporary files may stay if they cannot be removed.
    let _ = std::fs::remove_dir_all(&folder);
    result
}

/// The sum of two numbers does not depend on their order; with more ranks the collective chooses
/// the order.
fn compare(
    (found, found_params): &(Vec<f64>, LocalParams),
    losses: &[f64],
    params: &LocalParams,
    ranks: usize,
) -> Result<(), String> {
    let (loss_bound, param_bound) = if ranks == 2 { (0.0, 0.0) } else { (1e-3, 1e-2) };
    for (step, (found, expected)) in found.iter().zip(losses).enumerate() {
        let relative = (found - expected).abs() / expected;
        if relative.is_nan() || relative > loss_bound {
            return Err(format!(
                "step {}: loss {found}, without {expected}",
                step + 1
            ));
        }
    }
    for ((path, found, _), (_, expected, _)) in found_params.iter().zip(params) {
        let relative = relative_distance(found, expected);
        if relative.is_nan() || relative > param_bound {
            return Err(format!("{path} differs by {relative:e}"));
        }
    }
    Ok(())
}
