use burn::tensor::Tensor;
#[cfg(feature = "cuda")]
use megaburn_cuda::{nccl::Lane, tensor};

use super::{AsyncCollective, CollectiveElement, start_all_gather};
use crate::{CollectiveError, Group, message::OpKind};

/// Starts an all-gather into `whole`, in which this member's shard is already in place: shard `i`
/// of `size` equal shards belongs to member `i`.
///
/// On GPUs no memory is allocated: `whole` is written in place, even if other tensors share its
/// memory, and must not be read until the collective was waited for. On the host the result has
/// memory of its own.
///
/// # Shapes
/// `[size * d]`, the same on every member; the result has the same shape.
/// # Errors
/// See [`CollectiveError`]; a length that the members do not divide is refused.
/// # Collective
/// All members. It matches a [`start_all_gather`] of the shard on another member.
pub fn start_all_gather_in_place<K: CollectiveElement>(
    whole: Tensor<1, K>,
    group: &Group,
) -> Result<AsyncCollective<1, K>, CollectiveError> {
    let [len] = whole.dims();
    let size = group.size();
    if size == 1 {
        return Ok(AsyncCollective::done(whole));
    }
    if !len.is_multiple_of(size) {
        let call = group.next_call(OpKind::AllGather, &whole.into_data());
        let why = format!("{len} elements are not divisible by {size} members");
        return group.run(&call, |_, _| Err(group.bad_argument(&call, why)));
    }
    let start = group.rank() * (len / size);
    let share = len / size;
    #[cfg(feature = "cuda")]
    if let Some(whole) = K::to_gpu(&whole).map(tensor::contiguous)
        && let Some(own) = tensor::slice_of(&whole, start, [share])
    {
        return group
            .gpu_all_gather_into(own, whole, Lane::Overlapped)
            .map(AsyncCollective::started);
    }
    let own = match share {
        0 => whole,
        _ => whole.narrow(0, start, share),
    };
    start_all_gather(own, group)
}
