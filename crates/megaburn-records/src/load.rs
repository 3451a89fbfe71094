//! Full tensors read into the shards of a module.

use std::collections::{BTreeMap, HashMap};

use burn::{
    module::{Module, ModuleMapper, Param, ParamId},
    store::ModuleRecord,
    tensor::{Bool, DType, Int, Tensor, TensorData, kind::Basic},
};
use burn_store::{BurnpackStore, ModuleStore, burn_pack};
use megaburn_mesh::ShardSpec;
use megaburn_parallel::{Sharded, shard_plan};

use crate::{
    error::RecordsError,
    layout::{Layout, Place},
    part::{part, transposed, transposed_spec},
    targets::{Target, targets},
};

/// Reads the tensors of a full module from a store of `burn-store` into this rank's shards. Names
/// are those after the store's key remapping; its filters and adapters do not apply, because
/// `layout` says how its tensors are stored. In PyTorch's, the `num_batches_tracked` of batch norms
/// is ignored. Parameters take the element type and, if the store
/// has them, the identities (`ParamId`) of its tensors, as Burn's own `load_from` does.
///
/// One tensor is held in full at a time, and less where a part is one range of a file.
///
/// # Errors
/// A tensor is missing, is not one of the module's, or has another shape or kind; nothing is read
/// then. Also see [`shard_plan`].
/// # Collective
/// Nothing is sent. Every rank reads the store.
pub fn load_from<M: Module + Sharded, S: ModuleStore>(
    module: M,
    store: &mut S,
    layout: Layout,
) -> Result<M, RecordsError> {
    load_from_ignoring(module, store, layout, &[])
}

/// As [`load_from`], from a store that also has tensors which are not the module's: those whose names
/// end with one of `ignored`, such as `position_ids` of older files of BERT.
///
/// # Errors
/// See [`load_from`].
/// # Collective
/// Nothing is sent. Every rank reads the store.
pub fn load_from_ignoring<M: Module + Sharded, S: ModuleStore>(
    module: M,
    store: &mut S,
    layout: Layout,
    ignored: &[&str],
) -> Result<M, RecordsError> {
    let plan = shard_plan(&module)?;
    let read = |error: S::Error| RecordsError::File {
        action: "read",
        what: "the store".into(),
        why: error.to_string(),
    };
    let tensors = store.get_all_tensors().map_err(read)?.clone();
    let targets = targets(&module, &plan, layout);
    check(&targets, &tensors, (layout, ignored))?;
    let mut loader = Loader {
        place: Place::default(),
        targets: targets
            .into_iter()
            .map(|target| (target.path.clone(), target))
            .collect(),
        tensors,
        error: None,
    };
    let module = module.map(&mut loader);
    match loader.error {
        Some(error) => Err(error),
        None => Ok(module),
    }
}

/// Reads a record of the full module into this rank's shards.
///
/// # Errors
/// See [`load_from`].
/// # Collective
/// Nothing is sent. Every rank needs the record.
pub fn load_record<M: Module + Sharded>(
    module: M,
    record: ModuleRecord,
) -> Result<M, RecordsError> {
    let mut store = BurnpackStore::from_bytes(Some(record.into_bytes()?));
    load_from(module, &mut store, Layout::Burn)
}

/// Refuses a source that is not the full module.
fn check(
    targets: &[Target],
    tensors: &BTreeMap<String, burn_pack::Tensor>,
    (layout, ignored): (Layout, &[&str]),
) -> Result<(), RecordsError> {
    let missing: Vec<_> = targets
        .iter()
        .filter(|target| !tensors.contains_key(&target.name))
        .collect();
    let layout_name = layout.name();
    if let Some(first) = missing.first() {
        return Err(RecordsError::Missing {
            name: first.name.clone(),
            shape: first.shape.clone(),
            others: missing.len() - 1,
            layout: layout_name,
        });
    }
    let names: HashMap<_, _> = targets.iter().map(|target| (&target.name, ())).collect();
    let unexpected: Vec<_> = tensors
        .values()
        .filter(|tensor| !names.contains_key(&tensor.name))
        .filter(|tensor| !layout.ignores(&tensor.name) && !ends_with(&tensor.name, ignored))
        .collect();
    if let Some(first) = unexpected.first() {
        return Err(RecordsError::Unexpected {
            name: first.name.clone(),
            shape: first.shape.to_vec(),
            others: unexpected.len() - 1,
            layout: layout_name,
        });
    }
    for target in targets {
        let tensor = &tensors[&target.name];
        let found = tensor.shape.to_vec();
        if matches!(tensor.dtype, DType::QFloat(_)) {
            return Err(RecordsError::Quantised {
                name: target.name.clone(),
            });
        }
        if !target.kind.accepts(tensor.dtype) {
            return Err(RecordsError::Kind {
                name: target.name.clone(),
                found: format!("{:?}", tensor.dtype),
                expected: target.kind.name(),
            });
        }
        if found != target.shape {
            return Err(RecordsError::Shape {
                name: target.name.clone(),
                hint: hint(&found, target),
                found,
                expected: target.shape.clone(),
                layout: layout_name,
            });
        }
    }
    Ok(())
}

/// Whether the last parts of a name are one of `ends`.
fn ends_with(name: &str, ends: &[&str]) -> bool {
    let before = |end| name.strip_suffix(end);
    let mut before = ends.iter().filter_map(before);
    before.any(|before| before.is_empty() || before.ends_with('.'))
}

/// A guess at what a tensor of the wrong shape is.
fn hint(found: &[usize], target: &Target) -> String {
    let reversed: Vec<_> = target.shape.iter().rev().copied().collect();
    let local = target.spec.as_ref().map(ShardSpec::local_shape);
    if local.as_deref() == Some(found) {
        return ", of which it may be one rank's shard".into();
    }
    if found.len() == 2 && found == reversed {
        return ", and it may be in the other layout".into();
    }
    String::new()
}

struct Loader {
    place: Place,
    targets: HashMap<String, Target>,
    tensors: BTreeMap<String, burn_pack::Tensor>,
    error: Option<RecordsError>,
}

impl Loader {
    /// This rank's part of the tensor for the current parameter, and its identity.
    fn take(&mut self) -> Option<(TensorData, Option<ParamId>)> {
        if self.error.is_some() {
            return None;
        }
        let target = self.targets.get(&self.place.path())?;
        // Two parameters of one name in PyTorch's layout read the same tensor.
        let tensor = self.tensors.get(&target.name)?.clone();
        let id = tensor.param_id.map(ParamId::from);
        match read(tensor, target) {
            Ok(data) => Some((data, id)),
            Err(error) => {
                self.error = Some(error);
                None
            }
        }
    }
}

fn read(tensor: burn_pack::Tensor, target: &Target) -> Result<TensorData, RecordsError> {
    let dtype = tensor.dtype;
    let shape = tensor.shape.clone();
    let bytes = tensor.into_bytes()?;
    let data = match (&target.spec, target.is_transposed) {
        (Some(spec), false) => return Ok(part(bytes, dtype, spec)),
        (Some(spec), true) => part(bytes, dtype, &transposed_spec(spec)),
        (None, _) => TensorData::from_bytes(bytes, shape, dtype),
    };
    Ok(if target.is_transposed {
        transposed(data)
    } else {
        data
    })
}

/// The tensor of `data` as Burn's stores build it.
fn on_device<const D: usize, K: Basic>(
    data: TensorData,
    device: &burn::prelude::Device,
) -> Tensor<D, K> {
    let dtype = data.dtype();
    Tensor::from_data(data, (device, dtype))
}

/// Writes one method of the mapper for each kind of tensor.
macro_rules! map_kind {
    ($method:ident, $kind:ty) => {
        fn $method<const D: usize>(
            &mut self,
            param: Param<Tensor<D, $kind>>,
        ) -> Param<Tensor<D, $kind>> {
            let Some((data, id)) = self.take() else {
                return param;
            };
            let value = on_device(data, &param.lazy_device());
            let id = id.unwrap_or(param.id);
            param.transform_for_load(value, id)
        }
    };
}

impl ModuleMapper for Loader {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.place.enter(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.place.exit();
    }

    map_kind!(map_float, burn::tensor::Float);
    map_kind!(map_int, Int);
    map_kind!(map_bool, Bool);
}
