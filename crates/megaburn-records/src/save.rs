//! Full tensors written from the shards of a module.

use std::{
    borrow::Cow,
    collections::HashMap,
    fs,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use burn::{module::Module, store::ModuleRecord, tensor::DType};
use burn_store::{
    BurnpackStore, bridge,
    burn_pack::{self, AtomicFile, Writer},
};
use megaburn_collective::{CollectiveError, Group, GroupShards};
use megaburn_parallel::{Sharded, shard_plan};
use safetensors::{Dtype, View, serialize_to_file};

use crate::{
    error::RecordsError,
    full::{FullTensor, FullTensors},
    layout::Layout,
};

/// Gathers the shards of a module into a record of the full module, on rank 0; the others get
/// `None`. Rank 0 holds the full module in host memory: [`RecordFile::save`](crate::RecordFile::save)
/// holds one tensor at a time.
///
/// # Errors
/// `group` is not the group that splits the module. Also see [`shard_plan`] and
/// [`CollectiveError`].
/// # Collective
/// All members of `group`.
pub fn full_record<M: Module + Sharded>(
    module: &M,
    group: &Group,
) -> Result<Option<ModuleRecord>, RecordsError> {
    full_tensors(module, Layout::Burn, group)?.written(|tensors| {
        let bytes = Writer::new(deferred(&tensors)).into_bytes()?;
        Ok(ModuleRecord::from_bytes(bytes)?)
    })
}

pub(crate) fn full_tensors<M: Module + Sharded>(
    module: &M,
    layout: Layout,
    group: &Group,
) -> Result<Arc<FullTensors>, RecordsError> {
    let shards = GroupShards::new(&shard_plan(module)?, group)?;
    let tensors = FullTensors::of(module, &shards, layout, group);
    let is_cut = |tensor: &&FullTensor| tensor.is_split && matches!(tensor.dtype, DType::QFloat(_));
    match tensors.tensors.iter().find(is_cut) {
        Some(tensor) => Err(RecordsError::Quantised {
            name: tensor.name.clone(),
        }),
        None => Ok(tensors),
    }
}

/// The tensors as `burn-pack` draws them while it writes.
fn deferred(tensors: &Arc<FullTensors>) -> Vec<burn_pack::Tensor> {
    let mut found = Vec::new();
    for (index, tensor) in tensors.tensors.iter().enumerate() {
        let all = tensors.clone();
        let draw = move || {
            let data = all.draw(index);
            data.map_err(|error| burn_pack::Error::IoError(error.to_string()))
        };
        let shape = tensor.shape.clone().into();
        let name = tensor.name.clone();
        found.push(bridge::deferred(
            name,
            tensor.dtype,
            shape,
            Some(tensor.id),
            draw,
        ));
    }
    found
}

/// Refuses to replace a file.
fn check_new(path: &Path, overwrite: bool) -> Result<(), RecordsError> {
    if !overwrite && fs::symlink_metadata(path).is_ok() {
        return Err(RecordsError::Exists { path: path.into() });
    }
    Ok(())
}

/// Writes a burnpack file, on rank 0.
pub(crate) fn write_burnpack(
    tensors: Arc<FullTensors>,
    path: &Path,
    overwrite: bool,
) -> Result<(), RecordsError> {
    check_new(path, overwrite)?;
    let mut writer = Writer::new(deferred(&tensors));
    for (key, value) in BurnpackStore::default_metadata() {
        writer = writer.with_metadata(&key, &value);
    }
    let writer = writer.auto_extension(false).overwrite(overwrite);
    Ok(writer.write_to_file(path)?)
}

/// Writes a safetensors file, on rank 0: under another name first, so that a failure leaves what
/// is at `path`.
pub(crate) fn write_safetensors(
    tensors: Arc<FullTensors>,
    path: &Path,
    (layout, overwrite): (Layout, bool),
) -> Result<(), RecordsError> {
    check_new(path, overwrite)?;
    let failure = Mutex::new(None);
    let mut views = Vec::new();
    for (index, tensor) in tensors.tensors.iter().enumerate() {
        let view = Drawn {
            tensors: &tensors,
            index,
            dtype: dtype(tensor.dtype).ok_or_else(|| RecordsError::Quantised {
                name: tensor.name.clone(),
            })?,
            failure: &failure,
        };
        views.push((tensor.name.as_str(), view));
    }
    let format = match layout {
        Layout::Burn => "burn",
        Layout::Torch => "pt",
    };
    let metadata = HashMap::from([("format".to_string(), format.to_string())]);
    let (scratch, file) = AtomicFile::create(path)?;
    // It is opened by its name.
    drop(file);
    let written = serialize_to_file(views, Some(metadata), scratch.path());
    if let Some(error) = failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(RecordsError::Collective(error));
    }
    written.map_err(|error| RecordsError::File {
        action: "write",
        what: path.display().to_string(),
        why: error.to_string(),
    })?;
    if overwrite {
        scratch.commit()?;
    } else {
        scratch.commit_new()?;
    }
    Ok(())
}

/// A tensor that is gathered when its bytes are written.
struct Drawn<'a> {
    tensors: &'a FullTensors,
    index: usize,
    dtype: Dtype,
    /// The first error: a view cannot return one.
    failure: &'a Mutex<Option<CollectiveError>>,
}

impl View for Drawn<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.tensors.tensors[self.index].shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        if failure.is_none() {
            match self.tensors.draw(self.index) {
                Ok(data) => return Cow::Owned(data.as_bytes().to_vec()),
                Err(error) => *failure = Some(error),
            }
        }
        // The file is not kept.
        Cow::Owned(vec![0; self.data_len()])
    }

    fn data_len(&self) -> usize {
        let tensor = &self.tensors.tensors[self.index];
        tensor.shape.iter().product::<usize>() * tensor.dtype.size()
    }
}

/// The type's name in safetensors, if it has one.
fn dtype(dtype: DType) -> Option<Dtype> {
    Some(match dtype {
        DType::F64 => Dtype::F64,
        DType::F32 | DType::Flex32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::I64 => Dtype::I64,
        DType::I32 => Dtype::I32,
        DType::I16 => Dtype::I16,
        DType::I8 => Dtype::I8,
        DType::U64 => Dtype::U64,
        DType::U32 => Dtype::U32,
        DType::U16 => Dtype::U16,
        DType::U8 => Dtype::U8,
        DType::Bool(store) if DType::Bool(store).size() == 1 => Dtype::BOOL,
        _ => return None,
    })
}
