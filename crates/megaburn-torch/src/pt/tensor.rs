use crate::dtype::DType;
use crate::pickle::{Global, Kind, Value};
use crate::strided::{Layout, row_major};

/// Parameters may wrap parameters.
const DEEPEST: usize = 8;

/// A tensor of a file: where its elements are in one of the file's storages.
///
/// Several tensors may have one storage, and a tensor may be a view that is not contiguous.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StoredTensor {
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    pub(super) strides: Vec<usize>,
    pub(super) offset: usize,
    pub(super) key: String,
}

impl StoredTensor {
    /// The type of its elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The sizes of its dims.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// For each dim, the elements of the storage from one index to the next.
    pub fn strides(&self) -> &[usize] {
        &self.strides
    }

    /// The number of its first element in the storage.
    pub fn storage_offset(&self) -> usize {
        self.offset
    }

    /// The name of its storage in the file.
    pub fn storage_key(&self) -> &str {
        &self.key
    }

    /// Whether its elements follow each other in row-major order.
    pub fn is_contiguous(&self) -> bool {
        let Some(strides) = row_major(&self.shape) else {
            return false;
        };
        let dims = self.shape.iter().zip(self.strides.iter().zip(&strides));
        self.shape.contains(&0)
            || dims
                .into_iter()
                .all(|(size, (one, other))| *size == 1 || one == other)
    }

    pub(super) fn layout(&self) -> Layout<'_> {
        Layout {
            item: self.dtype.num_bytes(),
            shape: &self.shape,
            strides: &self.strides,
            offset: self.offset,
        }
    }
}

/// The tensor that a value is. `None` if it is something else; an error, as text, if it is a tensor
/// of a kind that cannot be read.
pub(super) fn tensor_of(value: Value) -> Option<Result<StoredTensor, String>> {
    let object = value.as_object()?;
    let args: Vec<Value> = object.args.iter().collect();
    rebuilt(object.callable.as_global()?, &args, DEEPEST)
}

/// The tensor that a function of PyTorch would make.
fn rebuilt(function: Global, args: &[Value], depth: usize) -> Option<Result<StoredTensor, String>> {
    let Some(depth) = depth.checked_sub(1) else {
        return Some(Err("it is wrapped too deeply".into()));
    };
    let is_torch = matches!(function.module, "torch._utils" | "torch._tensor");
    if !is_torch || !function.name.starts_with("_rebuild_") {
        return None;
    }
    let bad = || {
        Some(Err(format!(
            "the arguments of `{function}` are not those of a tensor"
        )))
    };
    match function.name {
        "_rebuild_tensor" | "_rebuild_tensor_v2" => Some(plain(args, None, args.get(6))),
        "_rebuild_tensor_v3" => match args.get(6) {
            Some(dtype) => Some(plain(args, Some(*dtype), args.get(7))),
            None => bad(),
        },
        "_rebuild_parameter" | "_rebuild_parameter_with_state" => {
            let inner = args.first().and_then(|inner| inner.as_object());
            let inner = inner.and_then(|inner| {
                let args: Vec<Value> = inner.args.iter().collect();
                rebuilt(inner.callable.as_global()?, &args, depth)
            });
            inner.or_else(bad)
        }
        "_rebuild_from_type_v2" => {
            let inner = args.first().and_then(|function| function.as_global());
            let values = args.get(2).and_then(|values| values.sequence());
            let (Some(inner), Some(values)) = (inner, values) else {
                return bad();
            };
            let args: Vec<Value> = values.iter().collect();
            rebuilt(inner, &args, depth).or_else(|| Some(Err(unknown(inner))))
        }
        _ => Some(Err(unknown(function))),
    }
}

fn unknown(function: Global) -> String {
    format!("it is made by `{function}`, which is not called; save it as a plain, dense tensor")
}

/// A tensor from its storage, offset, shape and strides.
fn plain(
    args: &[Value],
    dtype: Option<Value>,
    metadata: Option<&Value>,
) -> Result<StoredTensor, String> {
    let [storage, offset, shape, strides, ..] = args else {
        return Err("it has too few arguments".into());
    };
    // A lazy conjugate or negative is marked, and its storage holds something else.
    let marks = metadata.and_then(|metadata| metadata.entries());
    let is_marked = |mark: &str| marks.and_then(|marks| marks.get(mark)?.as_bool()) == Some(true);
    if is_marked("conj") || is_marked("neg") {
        return Err(
            "it is a lazy conjugate or negative; save what `resolve_conj` or \
            `resolve_neg` returns"
                .into(),
        );
    }
    let storage = Storage::of(*storage)?;
    let dtype = match dtype {
        Some(dtype) => dtype_of(dtype)?,
        None => storage
            .dtype
            .ok_or("its storage has no type, and neither has it")?,
    };
    let sizes = |value: &Value, what: &str| -> Result<Vec<usize>, String> {
        let values = value.sequence().map(|values| values.iter());
        let sizes = values.and_then(|mut values| {
            values.try_fold(Vec::new(), |mut sizes, value| {
                sizes.push(value.as_usize()?);
                Some(sizes)
            })
        });
        sizes.ok_or_else(|| format!("its {what} are {value}"))
    };
    let shape = sizes(shape, "sizes")?;
    let strides = sizes(strides, "strides")?;
    if shape.len() != strides.len() {
        return Err(format!(
            "it has the sizes {shape:?} and the strides {strides:?}"
        ));
    }
    let offset = offset.as_usize();
    let offset = offset.ok_or_else(|| format!("its offset is {}", args[1]))?;
    Ok(StoredTensor {
        dtype,
        shape,
        strides,
        offset,
        key: storage.key.into(),
    })
}

/// The type that a value such as `torch.bfloat16` is.
pub(crate) fn dtype_of(value: Value) -> Result<DType, String> {
    let global = value.as_global().filter(|global| global.module == "torch");
    let dtype = global.and_then(|global| DType::from_name(global.name));
    dtype.ok_or_else(|| format!("its type is {value}, whose elements cannot be read"))
}

/// A reference to a storage.
#[derive(Debug)]
pub(super) struct Storage<'a> {
    pub(super) key: &'a str,
    /// Without it, the storage is counted in bytes.
    pub(super) dtype: Option<DType>,
}

impl<'a> Storage<'a> {
    pub(super) fn of(value: Value<'a>) -> Result<Self, String> {
        let bad = || format!("its storage is {value}");
        let Kind::Persistent(id) = value.kind() else {
            return Err(bad());
        };
        let parts = id.sequence().ok_or_else(bad)?;
        let kind = parts.get(0).and_then(|kind| kind.as_str());
        let class = parts.get(1).and_then(|class| class.as_global());
        let key = parts.get(2).and_then(|key| key.as_str());
        let (Some("storage"), Some(class), Some(key)) = (kind, class, key) else {
            return Err(bad());
        };
        // Files of before 2019 may have storages that are views of others.
        if parts.get(5).is_some_and(|view| !view.is_none()) {
            return Err(
                "its storage is a view of another; load it with torch.load and save it \
                again"
                    .into(),
            );
        }
        let dtype = match (class.module, class.name) {
            (_, "UntypedStorage") => None,
            ("torch" | "torch.cuda", name) => {
                let dtype = DType::from_storage_class(name);
                Some(dtype.ok_or_else(|| {
                    format!("its storage is a `{class}`, whose elements cannot be read")
                })?)
            }
            _ => return Err(bad()),
        };
        Ok(Self { key, dtype })
    }
}
