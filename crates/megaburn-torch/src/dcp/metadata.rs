use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Component, Path};
use std::sync::Arc;

use crate::dtype::DType;
use crate::error::TorchError;
use crate::pickle::{Pickle, Value};
use crate::pt::dtype_of;
use crate::strided::{check_region, num_elements};

/// A tensor of a checkpoint.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DcpTensor {
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    pub(super) chunks: Vec<DcpChunk>,
}

/// A box of a tensor, as one rank wrote it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DcpChunk {
    pub(super) offsets: Vec<usize>,
    pub(super) sizes: Vec<usize>,
    pub(super) place: Place,
}

/// Where the bytes of an entry are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Place {
    pub(super) file: Arc<str>,
    pub(super) offset: u64,
    pub(super) len: u64,
}

impl DcpTensor {
    /// The type of its elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The sizes of its dims, of all ranks together.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The boxes that it was written as.
    pub fn chunks(&self) -> &[DcpChunk] {
        &self.chunks
    }
}

impl DcpChunk {
    /// Where it begins in the tensor, for each dim.
    pub fn offsets(&self) -> &[usize] {
        &self.offsets
    }

    /// The sizes of its dims.
    pub fn sizes(&self) -> &[usize] {
        &self.sizes
    }

    /// The file that it is in, relative to the folder.
    pub fn file(&self) -> &str {
        &self.place.file
    }
}

/// What `.metadata` says.
#[derive(Debug)]
pub(super) struct Metadata {
    pub(super) tensors: BTreeMap<String, DcpTensor>,
    pub(super) objects: BTreeMap<String, Place>,
    /// The tensors that Megatron-Core before 0.14 stored in another shape than their own.
    pub(super) reshaped: BTreeSet<String>,
}

/// The places of the entries of one name.
#[derive(Default)]
struct Places {
    object: Option<Place>,
    /// By offsets; each with the number of the chunk that was made of it.
    chunks: HashMap<Vec<usize>, (Place, Option<usize>)>,
}

impl Metadata {
    /// Reads the pickle of a checkpoint.
    ///
    /// # Errors
    /// It is of another kind, or an entry is in no file.
    pub(super) fn of(pickle: &Pickle, path: &Path) -> Result<Self, TorchError> {
        let damaged = |why: String| TorchError::Damaged {
            path: path.into(),
            why,
        };
        let root = pickle.root();
        let attribute = |name: &str| root.attribute(name).and_then(|value| value.entries());
        let entries = attribute("state_dict_metadata");
        let stored = attribute("storage_data");
        let (Some(entries), Some(stored)) = (entries, stored) else {
            return Err(TorchError::OtherKind {
                path: path.into(),
                why: "it is no metadata of torch.distributed.checkpoint with the places of its \
                    entries"
                    .into(),
            });
        };
        let mut files = HashMap::new();
        let mut places: HashMap<&str, Places> = HashMap::new();
        for (index, info) in stored.iter() {
            let (name, offsets, place) = place_of(index, info, &mut files).map_err(damaged)?;
            let of_name = places.entry(name).or_default();
            match offsets {
                Some(offsets) => _ = of_name.chunks.insert(offsets, (place, None)),
                None => of_name.object = Some(place),
            }
        }
        let mut found = Self {
            tensors: BTreeMap::new(),
            objects: BTreeMap::new(),
            reshaped: BTreeSet::new(),
        };
        for (name, about) in attribute("mcore_data").iter().flat_map(|all| all.iter()) {
            if about.get("nd_reformulated_orig_global_shape").is_some() {
                found.reshaped.extend(name.as_str().map(String::from));
            }
        }
        for (name, about) in entries.iter() {
            let bad = |why: String| damaged(format!("its entry {name}: {why}"));
            let name = name
                .as_str()
                .ok_or_else(|| bad("its name is no string".into()))?;
            let places = places.entry(name).or_default();
            match about.class().map(|class| class.name) {
                Some("TensorStorageMetadata") => {
                    let tensor = tensor_of(about, places).map_err(bad)?;
                    found.tensors.insert(name.into(), tensor);
                }
                Some("BytesStorageMetadata") => {
                    let place = places.object.take();
                    let place = place.ok_or_else(|| bad("it is in no file".into()))?;
                    found.objects.insert(name.into(), place);
                }
                _ => return Err(bad(format!("it is {about}"))),
            }
        }
        Ok(found)
    }
}

/// An attribute that has to be there.
fn required<'a>(value: Value<'a>, name: &str) -> Result<Value<'a>, String> {
    let found = value.attribute(name);
    found.ok_or_else(|| format!("{value} has no `{name}`"))
}

/// A `torch.Size`.
fn sizes(value: Value) -> Result<Vec<usize>, String> {
    let bad = || format!("{value} are no sizes");
    let values = value.sequence().ok_or_else(bad)?;
    let sizes: Option<Vec<usize>> = values.iter().map(|value| value.as_usize()).collect();
    sizes.ok_or_else(bad)
}

/// The name and offsets of an entry, and where it is. An object has no offsets.
fn place_of<'a>(
    index: Value<'a>,
    info: Value<'a>,
    files: &mut HashMap<&'a str, Arc<str>>,
) -> Result<(&'a str, Option<Vec<usize>>, Place), String> {
    let name = required(index, "fqn")?;
    let name = name.as_str().ok_or_else(|| format!("{name} is no name"))?;
    let offsets = index
        .attribute("offset")
        .filter(|offsets| !offsets.is_none());
    let offsets = offsets.map(sizes).transpose();
    let offsets = offsets.map_err(|why| format!("the entry `{name}`: {why}"))?;
    let file = required(info, "relative_path")?;
    let file = file.as_str().ok_or_else(|| format!("{file} is no path"))?;
    let is_inside = Path::new(file)
        .components()
        .all(|part| matches!(part, Component::Normal(_)));
    if !is_inside || file.is_empty() {
        return Err(format!(
            "the path {file:?} of `{name}` is not inside the folder"
        ));
    }
    let transforms = info.attribute("transform_descriptors");
    let transforms = transforms.and_then(|value| value.sequence());
    if transforms.is_some_and(|transforms| !transforms.is_empty()) {
        return Err(format!(
            "the entry `{name}` is transformed by {transforms:?}"
        ));
    }
    let number = |attribute: &str| -> Result<u64, String> {
        let value = required(info, attribute)?;
        let number = value.as_i64().and_then(|number| u64::try_from(number).ok());
        number.ok_or_else(|| format!("the {attribute} of `{name}` is {value}"))
    };
    let (offset, len) = (number("offset")?, number("length")?);
    if offset.checked_add(len).is_none() {
        return Err(format!("the entry `{name}` ends beyond 64 bits"));
    }
    let known = files.entry(file).or_insert_with(|| file.into());
    let place = Place {
        file: known.clone(),
        offset,
        len,
    };
    Ok((name, offsets, place))
}

fn tensor_of(about: Value, places: &mut Places) -> Result<DcpTensor, String> {
    let properties = required(about, "properties")?;
    // Their state is a tuple that begins with the type.
    let dtype = properties.attribute("dtype").or_else(|| {
        let state = properties.as_object()?.state?;
        state.sequence()?.get(0)
    });
    let dtype = dtype_of(dtype.ok_or_else(|| format!("{properties} have no type"))?)?;
    let shape = sizes(required(about, "size")?)?;
    let count = num_elements(&shape).and_then(|count| count.checked_mul(dtype.num_bytes()));
    if count.is_none() {
        return Err(format!("its shape {shape:?} is too large"));
    }
    let listed = required(about, "chunks")?;
    let listed = listed
        .sequence()
        .ok_or_else(|| format!("{listed} are no chunks"))?;
    let mut chunks: Vec<DcpChunk> = Vec::with_capacity(listed.len());
    for chunk in listed.iter() {
        let offsets = sizes(required(chunk, "offsets")?)?;
        let sizes = sizes(required(chunk, "sizes")?)?;
        check_region(&shape, &offsets, &sizes)?;
        // Ranks without a part of a tensor may list an empty one.
        if sizes.contains(&0) {
            continue;
        }
        let found = places.chunks.get_mut(&offsets);
        let (place, number) =
            found.ok_or_else(|| format!("its chunk at {offsets:?} is in no file"))?;
        // Those with the same part may list it each.
        if number.is_some_and(|number: usize| chunks[number].sizes == sizes) {
            continue;
        }
        *number = Some(chunks.len());
        let place = place.clone();
        let len = num_elements(&sizes).map_or(u64::MAX, |count| count as u64);
        if len
            .checked_mul(dtype.num_bytes() as u64)
            .is_none_or(|len| len > place.len)
        {
            return Err(format!(
                "its chunk of sizes {sizes:?} is larger than its {} bytes in `{}`",
                place.len, place.file
            ));
        }
        chunks.push(DcpChunk {
            offsets,
            sizes,
            place,
        });
    }
    Ok(DcpTensor {
        dtype,
        shape,
        chunks,
    })
}
