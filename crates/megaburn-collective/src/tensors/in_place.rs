use burn::tensor::Tensor;

use crate::{
    call::Collective,
    error::CollectiveError,
    group::Group,
    lane::Lane,
    tensors::{all_gather, kinds::CollectiveElement, work::Work},
};

/// All-gathers into `whole`, in which this member's shard is already in place: shard `i` of `size`
/// equal shards belongs to member `i`.
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
/// All members. It matches an [`all_gather`] of the shard on another member.
pub fn all_gather_in_place<K: CollectiveElement>(
    whole: Tensor<1, K>,
    group: &Group,
    lane: Lane,
) -> Result<Work<Tensor<1, K>>, CollectiveError> {
    let [len] = whole.dims();
    let size = group.size();
    if size == 1 {
        return Ok(Work::done(whole));
    }
    if !len.is_multiple_of(size) {
        let call = group.next_call(Collective::AllGather, whole.dtype(), &[len]);
        let why = format!("{len} elements are not divisible by {size} members");
        return group.refuse(&call, why);
    }
    let share = len / size;
    let start = group.rank() * share;
    #[cfg(feature = "cuda")]
    if let Some(whole) = K::to_gpu(&whole).map(megaburn_cuda::tensor::contiguous)
        && let Some(own) = megaburn_cuda::tensor::slice_of(&whole, start, [share])
    {
        let started = group.gpu_all_gather_into(own, whole, lane)?;
        return Ok(Work::started(started, K::from_gpu));
    }
    let own = match share {
        0 => whole,
        _ => whole.narrow(0, start, share),
    };
    all_gather(own, group, lane)
}
