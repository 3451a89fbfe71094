//! Calls that all members make: from contiguous copies of what is not contiguous into new contiguous
//! memory, unless they are given some.

use burn_cubecl::tensor::CubeTensor;
use cudarc::nccl::sys::ncclRedOp_t;

use super::{
    Communicator,
    call::{Call, Label, elements, refused},
    lane::Lane,
};
use crate::{
    AsyncOp, CudaError,
    tensor::{contiguous, empty},
};

/// How members' values are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// The sum.
    Sum,
    /// The largest. **NCCL drops NaN**: it is NaN only where every member has it.
    Max,
    /// The sum divided by the number of members: each value is divided before it is added.
    Mean,
}

impl Communicator {
    /// The members' values combined, on every member.
    ///
    /// # Shapes
    /// Any, the same on all members.
    /// # Errors
    /// The tensor is on another device or of another type than [`takes`](super::takes) allows. What fails later is
    /// found by the next read of the result and by the watchdog's observer.
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

    /// The members' tensors one behind the other, on every member.
    ///
    /// # Shapes
    /// `[d, ..]`, the same on all members; the result is `[size * d, ..]`.
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn all_gather(
        &self,
        label: Label,
        x: CubeTensor,
        lane: Lane,
    ) -> Result<AsyncOp, CudaError> {
        let out = self.rows(&x, x.meta.shape()[0] * self.members.size);
        self.all_gather_into(label, x, out, lane)
    }

    /// The same into `out`, contiguous memory that is written whoever holds it. In place where `x` is this
    /// member's stretch of it: NCCL sees that by the address, and leaves it as it is.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`]; `out` of another size or type.
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
            let why = format!("{room} {:?} take no {count} of each member", out.dtype);
            return Err(refused(&label, &why));
        }
        let call: Call = Box::new(move |api, comm, x, out, stream| {
            // SAFETY: see `Communicator::call`.
            unsafe { (api.all_gather)(x, out, count, dtype, comm, stream) }
        });
        self.call(label, lane, contiguous(x), out, call)
    }

    /// The members' values combined, each member's share of the first dimension on it.
    ///
    /// # Shapes
    /// `[size * d, ..]`, the same on all members; the result is `[d, ..]`.
    /// # Errors
    /// As [`Communicator::all_reduce`]; a first dimension that the members do not divide.
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
                "{rows} rows do not divide into {} shares",
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

    /// The tensor of member `root`, on every member.
    ///
    /// # Shapes
    /// Any, the same on all members.
    /// # Errors
    /// As [`Communicator::all_reduce`].
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
