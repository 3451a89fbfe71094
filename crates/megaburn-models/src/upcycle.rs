//! Dense models as the beginning of mixtures of experts.

use std::path::Path;

use burn::tensor::{DType, TensorData};
use megaburn_checkpoint::{CheckpointError, NamedTensor, Snapshot, save_single};
use megaburn_mesh::{PositionRng, Purpose};
use serde_json::{Value, json};

use crate::{
    DecoderConfig, Family, ModelError,
    assets::{ASSETS, Assets},
    convert::check_target,
    decoder::Experts,
    source::{ModelSource, PREFIX},
};

/// What becomes of each MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpcycleOptions {
    /// Copies of it.
    pub num: usize,
    /// How many of them a token goes to.
    pub top_k: usize,
    /// Into how many experts each copy is cut, of which a token goes to all or none at first.
    pub granularity: usize,
    /// What the routers are drawn from.
    pub seed: u64,
}

/// The deviation that routers start with, as all other matrices do.
const ROUTER_STD: f32 = 0.02;

/// Writes the model in `from`, a dense Llama, Mistral or Qwen3, as a checkpoint at step 0 of a Mixtral or a
/// Qwen3-MoE, to exactly `to`: each MLP becomes some experts that are copies of it. As a token's weights add up to
/// one, the new model computes what the old one does, until training makes the copies differ.
///
/// Source: Komatsuzaki et al. (2022), <https://arxiv.org/abs/2212.05055>; He et al. (2024),
/// <https://arxiv.org/abs/2410.07524>, for copies that are cut; Megatron-LM `--moe-use-upcycling`,
/// `--moe-upcycling-granularity`.
///
/// One parameter is in memory at a time. What stands at `to` is replaced only with `force`.
///
/// # Errors
/// See [`ModelSource::open`]; a model of another family or with biases, numbers that do not fit, something that is
/// not to be replaced, a full disk. Then nothing new stays behind.
pub fn upcycle(
    from: &Path,
    to: &Path,
    options: UpcycleOptions,
    force: bool,
) -> Result<DecoderConfig, ModelError> {
    let source = ModelSource::open_verified(from)?;
    let config = upcycled(source.config(), options)?;
    check_target(from, to)?;
    let dense = source.config().whole_plan()?;
    let plan = config.whole_plan()?;
    let snapshot = Snapshot {
        run_id: None,
        step: 0,
        model: json!(config),
        trainer: Value::Null,
    };
    let mut tensors = Vec::new();
    for (path, spec) in plan.iter() {
        let (origin, part) = origin(path, options);
        let stored = match &origin {
            Some(origin) => source.dtype(origin)?,
            None => DType::F32,
        };
        let name = format!("{PREFIX}{path}");
        let source = &source;
        let dense = &dense;
        let shape = spec.shard.global_shape.clone();
        let own = name.clone();
        let path = path.to_string();
        tensors.push(NamedTensor::lazy(name, &spec.shard, stored, move || {
            let Some(origin) = origin else {
                return Ok(router(&path, shape, options));
            };
            let whole = &dense.get(&origin).expect("the dense model has it").shard;
            let data = source
                .shard(&origin, whole, Some(stored))
                .map_err(|error| CheckpointError::Source {
                    name: own,
                    why: error.to_string(),
                })?;
            Ok(match part {
                Some(part) => cut(data, &shape, part, options.granularity),
                None => data,
            })
        }));
    }
    let assets = Assets::of(&source)?.kept().into_iter();
    let assets: Vec<_> = assets
        .map(|(name, file)| (format!("{ASSETS}/{name}"), file))
        .collect();
    save_single(to, force, &snapshot, "tp1", tensors, &assets)?;
    Ok(config)
}

/// The mixture of experts that a dense model becomes.
fn upcycled(dense: &DecoderConfig, options: UpcycleOptions) -> Result<DecoderConfig, ModelError> {
    let refuse = |why: String| Err(ModelError::Config(why));
    let family = match dense.family {
        Family::Llama | Family::Mistral => Family::Mixtral,
        Family::Qwen3 => Family::Qwen3Moe,
        other => {
            return refuse(format!(
                "a {other} has no family of experts like it; llama, mistral and qwen3 have"
            ));
        }
    };
    let UpcycleOptions {
        num,
        top_k,
        granularity,
        ..
    } = options;
    if dense.mlp_bias {
        return refuse("experts have no biases, and the model's MLPs have some".into());
    }
    if granularity == 0 || !dense.ffn.is_multiple_of(granularity) {
        return refuse(format!(
            "an MLP of width {} is not cut into {granularity}",
            dense.ffn
        ));
    }
    let ffn = dense.ffn / granularity;
    let experts = Some(Experts::new(num * granularity, top_k * granularity, ffn));
    // What all of a family's MLPs are as wide as, where it has no others.
    let ffn = if family == Family::Mixtral {
        ffn
    } else {
        dense.ffn
    };
    let config = DecoderConfig {
        family,
        ffn,
        experts,
        ..dense.clone()
    };
    config.validate()?;
    config.check_sayable()?;
    Ok(config)
}

/// The parameter that one is made of, and which cut of it an expert is; none: it is a router.
fn origin(path: &str, options: UpcycleOptions) -> (Option<String>, Option<usize>) {
    let Some((block, rest)) = path.split_once(".moe.") else {
        return (Some(path.to_string()), None);
    };
    let Some(expert) = rest.strip_prefix("experts.") else {
        return (None, None);
    };
    let (number, matrix) = expert.split_once('.').expect("an expert has matrices");
    let number: usize = number.parse().expect("experts are numbered");
    (
        Some(format!("{block}.mlp.{matrix}")),
        Some(number % options.granularity),
    )
}

/// A router, whose columns of the cuts of one copy are equal: a token goes to all of them or none.
fn router(path: &str, shape: Vec<usize>, options: UpcycleOptions) -> TensorData {
    let UpcycleOptions {
        num,
        granularity,
        seed,
        ..
    } = options;
    let mut drawn = vec![0.0; shape[0] * num];
    PositionRng::new(seed, Purpose::Init, path).fill_normal(0, &mut drawn);
    let columns = drawn
        .iter()
        .flat_map(|value| std::iter::repeat_n(value * ROUTER_STD, granularity));
    TensorData::new(columns.collect::<Vec<f32>>(), shape)
}

/// Cut `part` of a matrix: of an up matrix some columns of the gate and of the rest, of a down matrix some rows,
/// times as many as there are cuts, as each gets such a part of the weight.
fn cut(data: TensorData, shape: &[usize], part: usize, granularity: usize) -> TensorData {
    if granularity == 1 {
        return data;
    }
    let [rows, columns] = [data.shape()[0], data.shape()[1]];
    let dtype = data.dtype();
    let values: Vec<f32> = data.convert::<f32>().try_to_vec().expect("it is f32 now");
    let is_up = rows == shape[0];
    let cut: Vec<f32> = if is_up {
        let half = columns / 2;
        let width = columns / 2 / granularity;
        let of_row = |row: &[f32]| {
            let gate = row[part * width..][..width].iter();
            gate.chain(&row[half + part * width..][..width])
                .copied()
                .collect::<Vec<f32>>()
        };
        values.chunks(columns).flat_map(of_row).collect()
    } else {
        let len = rows / granularity * columns;
        values[part * len..][..len]
            .iter()
            .map(|value| value * granularity as f32)
            .collect()
    };
    TensorData::new(cut, shape.to_vec()).convert_dtype(dtype)
}
