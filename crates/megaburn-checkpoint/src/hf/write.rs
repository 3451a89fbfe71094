use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap},
    path::Path,
};

use burn::tensor::DType;
use safetensors::Dtype;
use serde_json::json;

use super::{
    CONFIG, INDEX, SINGLE, SMALL_FILES,
    quantized::{Encoder, HfQuantization},
};
use crate::{
    cast, dtype,
    error::CheckpointError,
    paths::sync_dir,
    single::write_extra,
    source::{TensorHeader, TensorSource},
    target::Target,
    write::{DataFile, Header},
};

/// Bytes of a tensor that are read at once. A transposed block is in memory twice, and a third time
/// if it is cast.
const BLOCK: usize = 16 << 20;

/// Options of [`write_hf`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HfWriteOptions {
    /// The type to which floats are cast; with `None`, each tensor keeps its own.
    pub dtype: Option<DType>,
    /// Tensors that are written in f32 even if `dtype` is set.
    pub f32_tensors: BTreeSet<String>,
    /// The form in which the `quantized_tensors` are written in FP8; with `None`, they are written
    /// as all others. They are first rounded to `dtype`.
    pub quantization: Option<HfQuantization>,
    /// The weights of linear layers, of two dimensions.
    pub quantized_tensors: BTreeSet<String>,
    /// Maximum bytes of tensors per file; a larger tensor gets its own file. The default is
    /// 5 GB, as in `transformers`.
    pub max_shard_bytes: u64,
    /// Whether to replace a published model or an empty folder at the target.
    pub force: bool,
}

impl Default for HfWriteOptions {
    fn default() -> Self {
        let f32_tensors = BTreeSet::new();
        Self {
            dtype: None,
            f32_tensors,
            quantization: None,
            quantized_tensors: BTreeSet::new(),
            max_shard_bytes: 5_000_000_000,
            force: false,
        }
    }
}

/// What [`write_hf`] wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HfWritten {
    /// The names of the safetensors files.
    pub files: Vec<String>,
    /// Number of tensors.
    pub num_tensors: usize,
    /// Bytes of all tensors.
    pub num_bytes: u64,
}

/// A tensor of a file, and the tensor of the source that it is made from.
struct Planned {
    header: TensorHeader,
    /// The name in the file.
    name: String,
    shape: Vec<usize>,
    content: Content,
    file_dtype: Dtype,
    num_bytes: u64,
}

/// What a tensor of a file holds.
#[derive(Clone, Copy)]
enum Content {
    /// The values, cast to this type.
    Values(DType),
    /// The FP8 codes of the values in this form.
    Codes(HfQuantization),
    /// The scales of these codes.
    Scales(HfQuantization),
}

impl Planned {
    fn new(
        header: &TensorHeader,
        (name, shape): (String, Vec<usize>),
        content: Content,
        file_dtype: Dtype,
    ) -> Self {
        let num_bytes = (shape.iter().product::<usize>() * dtype::size(file_dtype)) as u64;
        Self {
            header: header.clone(),
            name,
            shape,
            content,
            file_dtype,
            num_bytes,
        }
    }
}

/// Whether `name` may be a file in a published model's folder.
fn is_part(name: &str) -> bool {
    let is_weights = name.starts_with("model-") && name.ends_with(".safetensors");
    is_weights || name == SINGLE || name == INDEX || SMALL_FILES.contains(&name)
}

/// Writes tensors as a published model that `transformers` can read. The folder contains:
///
/// - `model.safetensors`, or, above `options.max_shard_bytes`, several files and
///   `model.safetensors.index.json`
/// - `extra_files` (relative path, bytes), which should include `config.json`
///
/// The model is written to a temporary folder next to `target` (`target.tmp-…`), synced and
/// renamed. Only a kill leaves the temporary folder behind; the next write to the same target
/// removes it. Blocks of rows of about 16 MiB (or a single row, if that is larger) pass through
/// memory, with at most three copies.
///
/// # Errors
/// `target` exists and is not to be replaced, an element type cannot be written, the source fails,
/// or the disk is full. Then nothing new remains and what was there is unchanged.
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
    let mut encoder = Encoder::new(source, options.dtype.unwrap_or(DType::F32), BLOCK);
    let staging = target.stage()?;
    let mut files = Vec::new();
    let mut weight_map = BTreeMap::new();
    for (number, shard) in shards.iter().enumerate() {
        let name = match shards.len() {
            1 => SINGLE.to_string(),
            count => format!("model-{:05}-of-{count:05}.safetensors", number + 1),
        };
        write_file(&staging.path.join(&name), source, &mut encoder, shard)?;
        weight_map.extend(shard.iter().map(|t| (t.name.clone(), name.clone())));
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
        quantization,
        quantized_tensors,
        ..
    } = options;
    if let Some(dtype) = wanted.filter(|dtype| cast::copy(DType::F32, *dtype).is_none()) {
        return Err(CheckpointError::NoFloat {
            dtype: format!("{dtype:?}"),
        });
    }
    let trained = wanted.unwrap_or(DType::F32);
    let mut plan = Vec::new();
    for header in source.headers() {
        let is_float = |dtype: &DType| cast::copy(header.dtype, *dtype).is_some();
        let whole = (header.name.clone(), header.shape.clone());
        let is_quantized = quantized_tensors.contains(&header.name) && is_float(&DType::F32);
        if let Some(form) = quantization.filter(|_| is_quantized) {
            let Some(scale_dtype) = dtype::to_hf(form.scale_dtype(trained)) else {
                let dtype = format!("{trained:?}");
                return Err(CheckpointError::NoFloat { dtype });
            };
            let scales = form.scales_name(&header.name);
            let scales = (scales, form.scales_shape(&header.shape));
            plan.push(Planned::new(
                &header,
                whole,
                Content::Codes(form),
                Dtype::F8_E4M3,
            ));
            plan.push(Planned::new(
                &header,
                scales,
                Content::Scales(form),
                scale_dtype,
            ));
            continue;
        }
        let is_wide = f32_tensors.contains(&header.name);
        let wanted = wanted.map(|dtype| if is_wide { DType::F32 } else { dtype });
        let dtype = wanted.filter(is_float).unwrap_or(header.dtype);
        let Some(file_dtype) = dtype::to_hf(dtype) else {
            let name = header.name;
            let dtype = format!("{dtype:?}");
            return Err(CheckpointError::UnsupportedDtype { name, dtype });
        };
        plan.push(Planned::new(
            &header,
            whole,
            Content::Values(dtype),
            file_dtype,
        ));
    }
    Ok(plan)
}

/// Distributes tensors over files in name order, filling each file as far as possible.
fn shards(plan: Vec<Planned>, max_bytes: u64) -> Vec<Vec<Planned>> {
    let mut shards = vec![Vec::new()];
    let mut filled = 0;
    for tensor in plan {
        let last = shards
            .last_mut()
            .expect("there is always at least one shard");
        filled += tensor.num_bytes;
        if filled > max_bytes && !last.is_empty() {
            filled = tensor.num_bytes;
            shards.push(vec![tensor]);
        } else {
            last.push(tensor);
        }
    }
    for shard in &mut shards {
        // Same order as the safetensors library: wide types first, which keeps all tensors aligned.
        shard.sort_by_cached_key(|t| (Reverse(t.file_dtype), t.name.clone()));
    }
    shards
}

fn write_file(
    path: &Path,
    source: &dyn TensorSource,
    encoder: &mut Encoder<'_>,
    tensors: &[Planned],
) -> Result<(), CheckpointError> {
    let mut header = Header::default();
    for tensor in tensors {
        header.push(tensor.name.clone(), tensor.file_dtype, tensor.shape.clone());
    }
    // `transformers` refuses files without this entry.
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    let header = header.into_bytes(path, Some(metadata))?;
    let mut file = DataFile::create(path, &header)?;
    for Planned {
        header, content, ..
    } in tensors
    {
        match *content {
            Content::Values(dtype) => write_values(&mut file, source, header, dtype)?,
            Content::Codes(form) => encoder.codes(header, form, |codes| file.write(codes))?,
            Content::Scales(form) => file.write(&encoder.scale_bytes(header, form)?)?,
        }
    }
    file.finish()?;
    Ok(())
}

fn write_values(
    file: &mut DataFile,
    source: &dyn TensorSource,
    header: &TensorHeader,
    dtype: DType,
) -> Result<(), CheckpointError> {
    let copy = cast::copy(header.dtype, dtype).expect("the plan has checked the conversion");
    for rows in header.blocks(BLOCK) {
        let data = source.read_rows(&header.name, rows)?;
        if header.dtype == dtype {
            file.write(data.as_bytes())?;
        } else {
            let mut bytes = vec![0; data.num_elements() * dtype.size()];
            copy(data.as_bytes(), &mut bytes);
            file.write(&bytes)?;
        }
    }
    Ok(())
}
