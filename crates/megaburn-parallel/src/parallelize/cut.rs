use burn::{module::Param, tensor::Tensor};
use megaburn_collective::{Group, shard_of};
use megaburn_mesh::ShardSpec;

use crate::unsaved_shard::unsaved_shard;

/// The place of a parameter in a module, and the group that splits it.
pub(crate) struct Cut<'a> {
    pub(crate) layer: &'a str,
    pub(crate) field: &'a str,
    pub(crate) group: &'a Group,
}

/// This rank's part of a full parameter, with the same identity. Mappings of records and files, e.g.
/// of Burn's `LinearLayout::Col`, do not apply to it.
pub(crate) fn cut<const D: usize>(
    full: &Param<Tensor<D>>,
    spec: &ShardSpec,
    place: Cut<'_>,
) -> Param<Tensor<D>> {
    let value = full.val();
    let is_trained = value.is_require_grad();
    let part = if value.is_autodiff() {
        Tensor::from_inner(shard_of(value.inner(), spec)).set_require_grad(is_trained)
    } else {
        shard_of(value, spec)
    };
    let param = Param::initialized(full.id, part);
    let path = format!("{}.{}", place.layer, place.field);
    unsaved_shard(param, path, spec, place.group)
}
