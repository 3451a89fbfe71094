//! Calls that all members make. Non-contiguous inputs are copied first; results go to new
//! contiguous memory unless the caller provides some.

use burn_cubecl::tensor::CubeTensor;
use cudarc::nccl::sys::ncclRedOp_t;

use super::{
    call::{Call, Label, elements, refused},
    communicator::Communicator,
    lane::Lane,
};
use crate::{
    async_op::AsyncOp,
    error::CudaError,
    tensor::{contiguous, empty},
};

/// The reduction over the members' values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// The sum.
    Sum,
    /// The maximum. **NCCL drops NaN**: an element is NaN only if it is NaN on every member.
    Max,
    /// The sum divided by the number of members; each value is divided before it is added.
    Mean,
}

impl Communicator {
    /// Reduces the members' values; every member gets the result.
    ///
    /// # Shapes
    /// Any, but equal on all members.
    /// # Errors
    /// The tensor is on another device, or of a type that [`takes`](super::takes) does not allow.
    /// Later failures surface at the next read of the result and in the watchdog's observer.
    pub fn all_reduce(
        &self,
        label: Label,
        x: CubeTensor,
        how: Reduction,
        lane: Lane,
    ) -> Result<AsyncOp, CudaError> {
        let dtype = self.data_type(&x, &label)?;
        let how = reduction(how);
        let count = elements(&x);
        let x = contiguous(x);
        let out = empty(&x, x.meta.shape().clone(), x.dtype);
        let call: Call = Box::new(move |api, comm, x, out, stream| {
            // SAFETY: see `Communicator::call`.
            unsafe { (api.all_reduce)(x, out, count, dtype, how, comm, stream) }
        });
        self.call(label, lane, x, out, call)
    }

    /// Concatenates the members' tensors; every member gets the result.
    ///
    /// # Shapes
    /// `[d, ..]`, equal on all members; the result is `[size * d, ..]`.
    /// # Errors
    /// See [`Communicator::all_reduce`].
    pub fn all_gather(
        &self,
        label: Label,
        x: CubeTensor,
        lane: Lane,
    ) -> Result<AsyncOp, CudaError> {
        let out = self.rows(&x, x.meta.shape()[0] * self.members.size);
        self.all_gather_into(label, x, out, lane)
    }

    /// Like [`all_gather`](Self::all_gather), but into `out`, contiguous memory that is overwritten
    /// even if it is shared. If `x` is this member's slice of `out`, the operation is in place:
    /// NCCL recognizes the address and does not copy the slice.
    ///
    /// # Errors
    /// See [`Communicator::all_reduce`]; also if `out` has another size or type.
    pub fn all_gather_into(
        &self,
        label: Label,
        x: CubeTensor,
        out: CubeTensor,
        lane: Lane,
    ) -> Result<AsyncOp, CudaError> {
        let dtype = self.data_type(&x, &label)?;
        let count = elements(&x);
        let room = elements(&out);
        if room != count * self.members.size || out.dtype != x.dtype {
            let why = format!(
                "an output of {room} {:?} elements cannot hold {count} of each \
                              member",
                out.dtype
            );
            return Err(refused(&label, &why));
        }
        let call: Call = Box::new(move |api, comm, x, out, stream| {
            // SAFETY: see `Communicator::call`.
            unsafe { (api.all_gather)(x, out, count, dtype, comm, stream) }
        });
        self.call(label, lane, contiguous(x), out, call)
    }

    /// Reduces the members' values; each member gets its slice of the first dimension.
    ///
    /// # Shapes
    /// `[size * d, ..]`, equal on all members; the result is `[d, ..]`.
    /// # Errors
    /// See [`Communicator::all_reduce`]; also if the first dimension is not divisible by the number
    /// of members.
    pub fn reduce_scatter(
        &self,
        label: Label,
        x: CubeTensor,
        how: Reduction,
        lane: Lane,
    ) -> Result<AsyncOp, CudaError> {
        let dtype = self.data_type(&x, &label)?;
        let how = reduction(how);
        let rows = x.meta.shape()[0];
        if !rows.is_multiple_of(self.members.size) {
            let why = format!(
                "{rows} rows are not divisible by {} members",
                self.members.size
            );
            return Err(refused(&label, &why));
        }
        let x = contiguous(x);
        let out = self.rows(&x, rows / self.members.size);
        let count = elements(&out);
        let call: Call = Box::new(move |api, comm, x, out, stream| {
            // SAFETY: see `Communicator::call`.
            unsafe { (api.reduce_scatter)(x, out, count, dtype, how, comm, stream) }
        });
        self.call(label, lane, x, out, call)
    }

    /// Sends the tensor of member `root` to every member.
    ///
    /// # Shapes
    /// Any, but equal on all members.
    /// # Errors
    /// See [`Communicator::all_reduce`].
    pub fn broadcast(
        &self,
        label: Label,
        x: CubeTensor,
        root: usize,
        lane: Lane,
    ) -> Result<AsyncOp, CudaError> {
        let dtype = self.data_type(&x, &label)?;
        let root = self.peer(root, &label)?;
        let count = elements(&x);
        let x = contiguous(x);
        let out = empty(&x, x.meta.shape().clone(), x.dtype);
        let call: Call = Box::new(move |api, comm, x, out, stream| {
            // SAFETY: see `Communicator::call`.
            unsafe { (api.broadcast)(x, out, count, dtype, root, comm, stream) }
        });
        self.call(label, lane, x, out, call)
    }
}

fn reduction(how: Reduction) -> ncclRedOp_t {
    match how {
        Reduction::Sum => ncclRedOp_t::ncclSum,
        Reduction::Max => ncclRedOp_t::ncclMax,
        Reduction::Mean => ncclRedOp_t::ncclAvg,
    }
}
