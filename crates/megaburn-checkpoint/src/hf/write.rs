use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap},
    path::Path,
};

use burn::tensor::DType;
use safetensors::Dtype;
use serde_json::json;

use super::{CONFIG, INDEX, SINGLE, SMALL_FILES};
use crate::{
    CheckpointError, TensorHeader, TensorSource, cast, dtype,
    paths::sync_dir,
    single::write_extra,
    target::Target,
    write::{DataFile, Header},
};

/// Bytes of a tensor that are read at once; a transposed one is twice in memory, and once more
/// where it is cast.
const BLOCK: usize = 16 << 20;

/// How [`write_hf`] writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HfWriteOptions {
    /// The type that floats get; without one, each tensor keeps its own.
    pub dtype: Option<DType>,
    /// Tensors that are f32 even so, where `dtype` says anything.
    pub f32_tensors: BTreeSet<String>,
    /// Bytes of tensors in one file, at most; a larger tensor has a file of its own. 5 GB are
    /// `transformers`' own choice.
    pub max_shard_bytes: u64,
    /// Whether a published model or an empty folder that stands there is replaced.
    pub force: bool,
}

impl Default for HfWriteOptions {
    fn default() -> Self {
        let f32_tensors = BTreeSet::new();
        Self {
            dtype: None,
            f32_tensors,
            max_shard_bytes: 5_000_000_000,
            force: false,
        }
    }
}

/// What [`write_hf`] wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HfWritten {
    /// The safetensors files' names.
    pub files: Vec<String>,
    /// Tensors in them.
    pub num_tensors: usize,
    /// Bytes of these tensors.
    pub num_bytes: u64,
}

/// A tensor as it will be written.
struct Planned {
    header: TensorHeader,
    dtype: DType,
    file_dtype: Dtype,
    num_bytes: u64,
}

/// Whether a published model's folder may hold this name.
fn is_part(name: &str) -> bool {
    let is_weights = name.starts_with("model-") && name.ends_with(".safetensors");
    is_weights || name == SINGLE || name == INDEX || SMALL_FILES.contains(&name)
}

/// Writes tensors as a published model's folder that `transformers` reads: `model.safetensors`, or,
/// where they are more than `options.max_shard_bytes`, several files and
/// `model.safetensors.index.json`; and `extra_files` (relative path, bytes), of which `config.json`
/// should be one.
///
/// It is written to a folder beside `target` (`target.tmp-…`, which only a kill leaves behind, until the
/// next one to the same target), synced and renamed. Blocks of rows of about 16 MiB (one row, if that has
/// more) go through memory, three times at most.
///
/// # Errors
/// Something at `target` that is not to be replaced, an element type that cannot be written, the
/// source's own error, a full disk. Then nothing new stays, and what stood there is untouched.
pub fn write_hf(
    target: &Path,
    source: &dyn TensorSource,
    options: &HfWriteOptions,
    extra_files: &[(String, Vec<u8>)],
) -> Result<HfWritten, CheckpointError> {
    let target = Target {
        path: target,
        force: options.force,
        what: "published model",
        mark: CONFIG,
        is_part,
    };
    let plan = plan(source, options)?;
    let num_tensors = plan.len();
    let num_bytes = plan.iter().map(|t| t.num_bytes).sum();
    let shards = shards(plan, options.max_shard_bytes);
    let staging = target.stage()?;
    let mut files = Vec::new();
    let mut weight_map = BTreeMap::new();
    for (number, shard) in shards.iter().enumerate() {
        let name = match shards.len() {
            1 => SINGLE.to_string(),
            count => format!("model-{:05}-of-{count:05}.safetensors", number + 1),
        };
        write_file(&staging.path.join(&name), source, shard)?;
        weight_map.extend(shard.iter().map(|t| (t.header.name.clone(), name.clone())));
        files.push(name);
    }
    sync_dir(&staging.path)?;
    if files.len() > 1 {
        let index = json!({ "metadata": { "total_size": num_bytes }, "weight_map": weight_map });
        let text = format!("{index:#}\n");
        write_extra(&staging.path, &[(INDEX.to_string(), text.into_bytes())])?;
    }
    write_extra(&staging.path, extra_files)?;
    target.commit(staging)?;
    Ok(HfWritten {
        files,
        num_tensors,
        num_bytes,
    })
}

fn plan(
    source: &dyn TensorSource,
    options: &HfWriteOptions,
) -> Result<Vec<Planned>, CheckpointError> {
    let HfWriteOptions {
        dtype: wanted,
        f32_tensors,
        ..
    } = options;
    if let Some(dtype) = wanted.filter(|dtype| cast::copy(DType::F32, *dtype).is_none()) {
        return Err(CheckpointError::NoFloat {
            dtype: format!("{dtype:?}"),
        });
    }
    let planned = |header: TensorHeader| {
        let is_float = |dtype: &DType| cast::copy(header.dtype, *dtype).is_some();
        let is_wide = f32_tensors.contains(&header.name);
        let wanted = wanted.map(|dtype| if is_wide { DType::F32 } else { dtype });
        let dtype = wanted.filter(is_float).unwrap_or(header.dtype);
        let Some(file_dtype) = dtype::to_hf(dtype) else {
            let name = header.name;
            let dtype = format!("{dtype:?}");
            return Err(CheckpointError::UnsupportedDtype { name, dtype });
        };
        let num_bytes = (header.shape.iter().product::<usize>() * dtype.size()) as u64;
        Ok(Planned {
            header,
            dtype,
            file_dtype,
            num_bytes,
        })
    };
    source.headers().into_iter().map(planned).collect()
}

/// Which tensors stand in which file: in the order of their names, each file as full as may be.
fn shards(plan: Vec<Planned>, max_bytes: u64) -> Vec<Vec<Planned>> {
    let mut shards = vec![Vec::new()];
    let mut filled = 0;
    for tensor in plan {
        let last = shards.last_mut().expect("there is one from the start");
        filled += tensor.num_bytes;
        if filled > max_bytes && !last.is_empty() {
            filled = tensor.num_bytes;
            shards.push(vec![tensor]);
        } else {
            last.push(tensor);
        }
    }
    for shard in &mut shards {
        // As the safetensors library orders them: wide types first, which aligns all.
        shard.sort_by_cached_key(|t| (Reverse(t.file_dtype), t.header.name.clone()));
    }
    shards
}

fn write_file(
    path: &Path,
    source: &dyn TensorSource,
    tensors: &[Planned],
) -> Result<(), CheckpointError> {
    let mut header = Header::default();
    for Planned {
        header: TensorHeader { name, shape, .. },
        file_dtype,
        ..
    } in tensors
    {
        header.push(name.clone(), *file_dtype, shape.clone());
    }
    // Without it `transformers` refuses the file.
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    let mut file = DataFile::create(path, header, Some(metadata))?;
    for Planned { header, dtype, .. } in tensors {
        let copy = cast::copy(header.dtype, *dtype).expect("it was planned so");
        for rows in header.blocks(BLOCK) {
            let data = source.read_rows(&header.name, rows)?;
            if header.dtype == *dtype {
                file.write(data.as_bytes())?;
            } else {
                let mut bytes = vec![0; data.num_elements() * dtype.size()];
                copy(data.as_bytes(), &mut bytes);
                file.write(&bytes)?;
            }
        }
    }
    file.finish()?;
    Ok(())
}
