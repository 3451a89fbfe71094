//! A shard refuses to be saved as if it were the parameter.

use burn::{module::Param, tensor::Tensor};
use megaburn_collective::Group;
use megaburn_mesh::ShardSpec;

/// Makes Burn's records and the stores of `burn-store` refuse to save a rank's shard. Their
/// collectors return no errors, so the refusal is a panic.
///
/// # Panics
/// The parameter's `transform_for_save`, if the group has several ranks and this one holds a part.
#[expect(
    clippy::panic,
    reason = "documented: Burn's collectors cannot return errors"
)]
pub(crate) fn unsaved_shard<const D: usize>(
    param: Param<Tensor<D>>,
    path: String,
    spec: &ShardSpec,
    group: &Group,
) -> Param<Tensor<D>> {
    let local = spec.local_shape();
    if group.size() == 1 || local == spec.global_shape {
        return param;
    }
    let rank = group.rank();
    let global = spec.global_shape.clone();
    param.save_mapper(move |_| {
        panic!(
            "`{path}` is the shard {local:?} of {global:?} on rank {rank}, and cannot be saved as if it \
            were the parameter: call `megaburn::records::RecordFile::save` or \
            `megaburn::checkpoint::save` on every rank"
        )
    })
}
