use burn::tensor::Tensor;
#[cfg(feature = "cuda")]
use megaburn_cuda::{nccl::Lane, tensor};

use super::{AsyncCollective, CollectiveElement, start_all_gather};
use crate::{CollectiveError, Group, message::OpKind};

/// As [`start_all_gather`] of this member's stretch of `whole`, the first of equal ones on member 0, into
/// the others. On GPUs no memory is taken: that of `whole` is written, whoever holds it, and is nobody's
/// until it was waited for. Elsewhere the result has its own.
///
/// # Shapes
/// `[size * d]`, the same on every member; the result has it.
/// # Errors
/// See [`CollectiveError`]; a length that the members do not divide is refused.
/// # Collective
/// All members. One that calls [`start_all_gather`] of its stretch makes the same call.
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
        let why = format!("{len} elements do not divide into {size} shares");
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
