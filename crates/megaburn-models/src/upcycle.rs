//! Upcycling: initialises a mixture of experts from a dense model.

use std::path::Path;

use burn::tensor::{DType, TensorData};
use megaburn_checkpoint::{CheckpointError, NamedTensor, Snapshot, save_single};
use megaburn_mesh::{PositionRng, Purpose};
use serde_json::{Value, json};

use crate::{
    assets::Assets,
    convert::check_target,
    decoder::{DecoderConfig, Experts},
    error::ModelError,
    families::Family,
    source::{ModelSource, PREFIX},
};

/// The options of upcycling, per MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpcycleOptions {
    /// Number of copies of the MLP.
    pub num: usize,
    /// Number of copies that a token uses.
    pub top_k: usize,
    /// Number of experts into which each copy is cut. Initially, a token uses all experts of a copy
    /// or none.
    pub granularity: usize,
    /// The seed with which the routers are initialised.
    pub seed: u64,
}

/// The standard deviation with which routers are initialised, as for other matrices.
const ROUTER_STD: f32 = 0.02;

/// Converts the model in `from`, a dense Llama, Mistral or Qwen3, into a Mixtral or Qwen3-MoE, and
/// writes it as a checkpoint at step 0 to exactly `to`. Each MLP becomes several experts that are
/// copies of it. Because the weights of a token's experts sum to one, the new model computes the
/// same as the dense one until training makes the copies differ.
///
/// Source: Komatsuzaki et al. (2022), <https://arxiv.org/abs/2212.05055>; He et al. (2024),
/// <https://arxiv.org/abs/2410.07524>, for copies that are cut; Megatron-LM `--moe-use-upcycling`,
/// `--moe-upcycling-granularity`.
///
/// One parameter is in memory at a time. An existing `to` is replaced only with `force`.
///
/// # Errors
/// See [`ModelSource::open`]; also if the model is of another family or has biases, the options do
/// not fit its sizes, `to` exists and may not be replaced, or the disk is full. No new files remain
/// after an error.
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
            let whole = &dense
                .get(&origin)
                .expect("the dense model has the parameter")
                .shard;
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
    let assets = Assets::for_checkpoint(&source)?;
    save_single(to, force, &snapshot, "tp1", tensors, &assets)?;
    Ok(config)
}

/// The configuration of the mixture of experts that a dense model becomes.
fn upcycled(dense: &DecoderConfig, options: UpcycleOptions) -> Result<DecoderConfig, ModelError> {
    let refuse = |why: String| Err(ModelError::Config(why));
    let counterparts = [
        (Family::LLAMA, Family::MIXTRAL),
        (Family::MISTRAL, Family::MIXTRAL),
        (Family::QWEN3, Family::QWEN3_MOE),
    ];
    let found = counterparts.iter().find(|(of, _)| *of == dense.family);
    let Some(&(_, family)) = found else {
        return refuse(format!(
            "{} has no MoE counterpart; llama, mistral and qwen3 have one",
            dense.family
        ));
    };
    let UpcycleOptions {
        num,
        top_k,
        granularity,
        ..
    } = options;
    if dense.mlp_bias {
        return refuse(
            "mixtral and qwen3_moe experts have no biases, but the model's MLPs do".into(),
        );
    }
    if granularity == 0 || !dense.ffn.is_multiple_of(granularity) {
        return refuse(format!(
            "an MLP of width {} is not divisible by granularity {granularity}",
            dense.ffn
        ));
    }
    let ffn = dense.ffn / granularity;
    let experts = Some(Experts::new(num * granularity, top_k * granularity, ffn));
    // Mixtral's `config.json` has one width, that of its experts.
    let ffn = if family == Family::MIXTRAL {
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

/// The dense parameter from which the parameter at `path` is made, and the number of the cut for an
/// expert. The former is `None` for a router.
fn origin(path: &str, options: UpcycleOptions) -> (Option<String>, Option<usize>) {
    let Some((block, rest)) = path.split_once(".moe.") else {
        return (Some(path.to_string()), None);
    };
    let Some(expert) = rest.strip_prefix("experts.") else {
        return (None, None);
    };
    let (number, matrix) = expert
        .split_once('.')
        .expect("an expert's name has a matrix");
    let number: usize = number.parse().expect("an expert's name has its number");
    (
        Some(format!("{block}.mlp.{matrix}")),
        Some(number % options.granularity),
    )
}

/// Initialises a router. The columns of the experts of one copy are equal, so a token uses all of
/// them or none.
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

/// Cut `part` of a matrix. For an up matrix, it is a range of columns of the gate and of the rest.
/// For a down matrix, it is a range of rows multiplied by `granularity`, because each cut gets only
/// that fraction of the routing weight.
fn cut(data: TensorData, shape: &[usize], part: usize, granularity: usize) -> TensorData {
    if granularity == 1 {
        return data;
    }
    let [rows, columns] = [data.shape()[0], data.shape()[1]];
    let dtype = data.dtype();
    let values: Vec<f32> = data.convert::<f32>().try_to_vec().expect(
        "the data was converted to \
        f32",
    );
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
