use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use crate::dcp::dir::METADATA;
use crate::dcp::record::{DcpRecord, TensorRecord};
use crate::dcp::write::{create_error, write_error};
use crate::dtype::DType;
use crate::error::TorchError;
use crate::pickle::{PickleError, PickleWriter, Tree};
use crate::region::overlapping;
use crate::strided::num_elements;

/// The version that torch 2.4 to 2.11 write.
const VERSION: &str = "1.0.0";

const MODULE: &str = "torch.distributed.checkpoint.metadata";

/// Writes `.metadata`, with which a folder becomes a checkpoint: it gets its name at the end, by
/// one rename.
///
/// # Errors
/// Two ranks wrote the same elements of a tensor or the same object, no rank wrote some elements,
/// or the ranks disagree on the type or shape of a tensor. There is a `.metadata` already, or it
/// cannot be written.
pub fn write_metadata(folder: impl AsRef<Path>, records: &[DcpRecord]) -> Result<(), TorchError> {
    let folder = folder.as_ref();
    let path = folder.join(METADATA);
    let tensors = merged(&path, records)?;
    let pickle = pickle(&tensors, records).map_err(|error| TorchError::Write {
        path: path.clone(),
        name: String::new(),
        why: error.to_string(),
    })?;
    if path.exists() {
        return Err(TorchError::Exists { path });
    }
    let unfinished = folder.join(format!("{METADATA}.tmp"));
    let file = File::create_new(&unfinished);
    let mut file = file.map_err(|source| create_error(&unfinished, source))?;
    let written = file.write_all(&pickle).and_then(|()| file.sync_all());
    let renamed = written.and_then(|()| fs::rename(&unfinished, &path));
    let synced = renamed.and_then(|()| File::open(folder)?.sync_all());
    synced.map_err(|source| write_error(&path, source))
}

/// A tensor with the boxes of all ranks, and the files that these are in.
struct Merged<'a> {
    dtype: DType,
    shape: &'a [usize],
    chunks: Vec<(&'a str, &'a TensorRecord)>,
}

/// Puts together what all ranks wrote, and checks that it is everything, once.
fn merged<'a>(
    path: &Path,
    records: &'a [DcpRecord],
) -> Result<BTreeMap<&'a str, Merged<'a>>, TorchError> {
    let error = |name: &str, why: String| TorchError::Write {
        path: path.into(),
        name: name.into(),
        why,
    };
    let mut tensors: BTreeMap<&str, Merged> = BTreeMap::new();
    let mut objects = BTreeSet::new();
    for record in records {
        for part in &record.tensors {
            let tensor = tensors.entry(&part.name).or_insert_with(|| Merged {
                dtype: part.dtype,
                shape: &part.shape,
                chunks: Vec::new(),
            });
            if (tensor.dtype, tensor.shape) != (part.dtype, &part.shape[..]) {
                return Err(error(
                    &part.name,
                    format!(
                        "`{}` has it in {} with the shape {:?}, and another rank in {} with {:?}",
                        record.file, part.dtype, part.shape, tensor.dtype, tensor.shape
                    ),
                ));
            }
            // Empty boxes of several ranks are at one place, which names an entry.
            let is_first_of_none = tensor.shape.contains(&0) && tensor.chunks.is_empty();
            if !part.sizes.contains(&0) || is_first_of_none {
                tensor.chunks.push((&record.file, part));
            }
        }
        for object in &record.objects {
            if !objects.insert(&*object.name) {
                return Err(error(&object.name, "two ranks wrote this object".into()));
            }
        }
    }
    for (name, tensor) in &tensors {
        if objects.contains(name) {
            return Err(error(name, "it is a tensor and an object".into()));
        }
        let boxes: Vec<_> = tensor
            .chunks
            .iter()
            .map(|(_, part)| (part.offsets.clone(), part.sizes.clone()))
            .filter(|(_, sizes)| !sizes.contains(&0))
            .collect();
        if let Some((one, other)) = overlapping(&boxes) {
            let [one, other] = [&tensor.chunks[one], &tensor.chunks[other]];
            return Err(error(
                name,
                format!(
                    "`{}` and `{}` have boxes at {:?} and {:?} that overlap",
                    one.0, other.0, one.1.offsets, other.1.offsets
                ),
            ));
        }
        let covered: usize = boxes
            .iter()
            .filter_map(|(_, sizes)| num_elements(sizes))
            .sum();
        let count = num_elements(tensor.shape);
        if count != Some(covered) {
            return Err(error(
                name,
                format!(
                    "the ranks wrote {covered} elements of a tensor of the shape {:?}",
                    tensor.shape
                ),
            ));
        }
    }
    Ok(tensors)
}

fn class(name: &str) -> Tree {
    Tree::global(MODULE, name)
}

/// A `torch.Size`.
fn size(sizes: &[usize]) -> Tree {
    let sizes = sizes.iter().map(|size| Tree::Int(*size as i64));
    Tree::call(
        Tree::global("torch", "Size"),
        vec![Tree::Tuple(sizes.collect())],
    )
}

/// The state of `TensorProperties`: type, layout, gradient, memory format, pinned memory.
fn properties(dtype: DType) -> Tree {
    let layout = Tree::global("torch.serialization", "_get_layout");
    let format = class("_MEM_FORMAT_ENCODING");
    Tree::Object {
        class: Box::new(class("TensorProperties")),
        state: Some(Box::new(Tree::Tuple(vec![
            Tree::global("torch", dtype.name()),
            Tree::call(layout, vec!["torch.strided".into()]),
            false.into(),
            Tree::call(format, vec![0.into()]),
            false.into(),
        ]))),
    }
}

/// The pickle, of which each chunk is written on its own: there may be millions.
fn pickle(tensors: &BTreeMap<&str, Merged>, records: &[DcpRecord]) -> Result<Vec<u8>, PickleError> {
    let mut out = PickleWriter::new();
    let objects: Vec<_> = records
        .iter()
        .flat_map(|record| record.objects.iter().map(|object| (&record.file, object)))
        .collect();
    out.begin_object(&class("Metadata"));
    out.begin_dict();
    out.tree(&"state_dict_metadata".into());
    out.begin_dict();
    for (name, tensor) in tensors {
        out.tree(&(*name).into());
        out.begin_object(&class("TensorStorageMetadata"));
        out.begin_dict();
        out.tree(&"properties".into());
        out.tree(&properties(tensor.dtype));
        out.tree(&"size".into());
        out.tree(&size(tensor.shape));
        out.tree(&"chunks".into());
        out.begin_list();
        for (_, part) in &tensor.chunks {
            let attributes = [
                ("offsets", size(&part.offsets)),
                ("sizes", size(&part.sizes)),
            ];
            out.tree(&Tree::object(class("ChunkStorageMetadata"), attributes));
        }
        out.end_list();
        out.end_dict();
        out.end_object();
    }
    for (_, object) in &objects {
        out.tree(&object.name.as_str().into());
        out.begin_object(&class("BytesStorageMetadata"));
        out.begin_dict();
        out.end_dict();
        out.end_object();
    }
    out.end_dict();
    // The path of each entry in a nested state dict: here, its name.
    out.tree(&"planner_data".into());
    out.begin_dict();
    let names = tensors.keys().copied();
    for name in names.chain(objects.iter().map(|(_, object)| object.name.as_str())) {
        out.tree(&name.into());
        out.tree(&Tree::Tuple(vec![name.into()]));
    }
    out.end_dict();
    out.tree(&"storage_data".into());
    out.begin_dict();
    for (name, tensor) in tensors {
        for (index, (file, part)) in tensor.chunks.iter().enumerate() {
            let attributes = [
                ("fqn", (*name).into()),
                ("offset", size(&part.offsets)),
                ("index", Tree::Int(index as i64)),
            ];
            out.tree(&Tree::object(class("MetadataIndex"), attributes));
            out.tree(&storage_info(file, part.place));
        }
    }
    for (file, object) in &objects {
        let attributes = [("fqn", object.name.as_str().into()), ("index", Tree::None)];
        out.tree(&Tree::object(class("MetadataIndex"), attributes));
        out.tree(&storage_info(file, object.place));
    }
    out.end_dict();
    out.tree(&"storage_meta".into());
    out.tree(&Tree::None);
    out.tree(&"version".into());
    out.tree(&VERSION.into());
    out.end_dict();
    out.end_object();
    out.finish()
}

fn storage_info(file: &str, [offset, len]: [u64; 2]) -> Tree {
    let attributes = [
        ("relative_path", file.into()),
        ("offset", Tree::Int(offset as i64)),
        ("length", Tree::Int(len as i64)),
    ];
    let class = Tree::global("torch.distributed.checkpoint.filesystem", "_StorageInfo");
    Tree::object(class, attributes)
}
