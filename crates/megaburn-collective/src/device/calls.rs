//! A group's collectives on GPU tensors: they are counted, compared, recorded and handed to NCCL.

use std::ops::Range;

use burn_cubecl::{CubeDevice, tensor::CubeTensor};
use megaburn_cuda::{
    AsyncOp, CudaError,
    nccl::{self, Communicator, Label, Lane, Reduction},
};

use super::nccl_group::NcclGroup;
use crate::{
    CollectiveError, Group, ReduceOp,
    message::{Call, OpKind, Payload},
};

/// Whether NCCL can access a tensor.
pub(crate) fn is_on_gpu(tensor: &CubeTensor) -> bool {
    matches!(tensor.device, CubeDevice::Cuda(_))
}

impl Group {
    /// As [`Group::all_reduce`]. **NCCL drops NaN** in a maximum; see
    /// [`super::nan_propagating_max`].
    pub(crate) fn gpu_all_reduce(
        &self,
        x: CubeTensor,
        op: ReduceOp,
        lane: Lane,
    ) -> Result<AsyncOp, CollectiveError> {
        let (kind, how) = match op {
            ReduceOp::Sum => (OpKind::AllReduceSum, Reduction::Sum),
            ReduceOp::Max => (OpKind::AllReduceMax, Reduction::Max),
            ReduceOp::Mean => (OpKind::AllReduceMean, Reduction::Mean),
        };
        self.gpu_call(kind, x, op == ReduceOp::Mean, |nccl, label, x| {
            nccl.all_reduce(label, x, how, lane)
        })
    }

    /// As [`Group::all_gather`].
    pub(crate) fn gpu_all_gather(
        &self,
        x: CubeTensor,
        lane: Lane,
    ) -> Result<AsyncOp, CollectiveError> {
        self.gpu_call(OpKind::AllGather, x, false, |nccl, label, x| {
            nccl.all_gather(label, x, lane)
        })
    }

    /// As [`Self::gpu_all_gather`], into `out`. `out` is written even if other tensors share its
    /// memory, and `x` may be this member's shard of it.
    pub(crate) fn gpu_all_gather_into(
        &self,
        x: CubeTensor,
        out: CubeTensor,
        lane: Lane,
    ) -> Result<AsyncOp, CollectiveError> {
        self.gpu_call(OpKind::AllGather, x, false, |nccl, label, x| {
            nccl.all_gather_into(label, x, out, lane)
        })
    }

    /// As [`Group::reduce_scatter`], without maximum.
    pub(crate) fn gpu_reduce_scatter(
        &self,
        x: CubeTensor,
        op: ReduceOp,
        lane: Lane,
    ) -> Result<AsyncOp, CollectiveError> {
        let (kind, how) = match op {
            ReduceOp::Sum => (OpKind::ReduceScatterSum, Reduction::Sum),
            ReduceOp::Max => (OpKind::ReduceScatterMax, Reduction::Max),
            ReduceOp::Mean => (OpKind::ReduceScatterMean, Reduction::Mean),
        };
        self.gpu_call(kind, x, op == ReduceOp::Mean, |nccl, label, x| {
            nccl.reduce_scatter(label, x, how, lane)
        })
    }

    /// As [`Group::broadcast`].
    pub(crate) fn gpu_broadcast(
        &self,
        x: CubeTensor,
        root: usize,
        lane: Lane,
    ) -> Result<AsyncOp, CollectiveError> {
        self.gpu_call(OpKind::Broadcast { root }, x, false, |nccl, label, x| {
            nccl.broadcast(label, x, root, lane)
        })
    }

    /// As [`Group::all_to_all`], on ranges of rows: `send[i]` go to member `i`, `recv[i]` come from
    /// it.
    pub(crate) fn gpu_all_to_all(
        &self,
        x: CubeTensor,
        send: &[Vec<Range<usize>>],
        recv: &[Vec<Range<usize>>],
        lane: Lane,
    ) -> Result<AsyncOp, CollectiveError> {
        let checked = self.check_ranges([send, recv], x.meta.shape()[0]);
        self.gpu_call(OpKind::AllToAll, x, false, |nccl, label, x| {
            checked.map_err(CudaError::Refused)?;
            nccl.all_to_all(label, x, send, recv, lane)
        })
    }

    /// Sends the tensor to the member `by` places further in the ring of members and returns the
    /// one received.
    pub(crate) fn gpu_shift(
        &self,
        x: CubeTensor,
        by: isize,
        lane: Lane,
    ) -> Result<AsyncOp, CollectiveError> {
        let [to, from] = [self.at(by), self.at(-by)];
        self.gpu_call(OpKind::Shift { by }, x, false, |nccl, label, x| {
            nccl.pass_on(label, x, to, from, lane)
        })
    }

    /// As [`Group::send`].
    pub(crate) fn gpu_send(
        &self,
        x: CubeTensor,
        to: usize,
        lane: Lane,
    ) -> Result<AsyncOp, CollectiveError> {
        self.gpu_pair(x, to, 0, |nccl, label, x| nccl.send(label, x, to, lane))
    }

    /// As [`Group::recv`], into `out`, which must have no other owner.
    pub(crate) fn gpu_recv(
        &self,
        out: CubeTensor,
        from: usize,
        lane: Lane,
    ) -> Result<AsyncOp, CollectiveError> {
        self.gpu_pair(out, from, 1, |nccl, label, out| {
            nccl.recv(label, out, from, lane)
        })
    }

    /// Creates the communicator for the device of `x`, unless it exists.
    pub(crate) fn gpu_rendezvous(&self, x: &CubeTensor) -> Result<(), CollectiveError> {
        self.check_usable()?;
        self.device_side(x).map(drop)
    }

    /// Makes a call that all members make.
    fn gpu_call<T>(
        &self,
        op: OpKind,
        x: CubeTensor,
        is_mean: bool,
        make: impl FnOnce(&Communicator, Label, CubeTensor) -> Result<T, CudaError>,
    ) -> Result<T, CollectiveError> {
        self.check_usable()?;
        let side = self.device_side(&x)?;
        let control = &side.watching.control;
        let call = control.next_gpu_call(op, &x);
        // Check this before the members compare: the others may have made such a call before, and
        // then they do not ask.
        if (is_mean && !x.dtype.is_float()) || !nccl::takes(x.dtype) {
            let why = format!("{:?} does not support this reduction", x.dtype);
            return control.run(&call, |_, _| Err(control.bad_argument(&call, why)));
        }
        // The lock must not be held while the members compare: they may ask meanwhile.
        let is_new = side.watching.watched.log().push(&call);
        if is_new {
            control.run(&call, |link, deadline| {
                control
                    .exchange(link, &call, deadline, |_| Payload::empty())
                    .map(drop)
            })?;
        }
        side.enqueue_call(&call, |label| make(&side.communicator, label, x))
    }

    /// Makes a call between this rank and one other.
    fn gpu_pair<T>(
        &self,
        x: CubeTensor,
        member: usize,
        direction: usize,
        make: impl FnOnce(&Communicator, Label, CubeTensor) -> Result<T, CudaError>,
    ) -> Result<T, CollectiveError> {
        self.check_usable()?;
        let side = self.device_side(&x)?;
        let control = &side.watching.control;
        let mut call = Call {
            op: OpKind::Send,
            seq: 0,
            dtype: x.dtype,
            shape: shape(&x),
        };
        if member >= control.size() || member == control.rank() {
            let why = format!("member {member} is not a peer of member {}", control.rank());
            return control.run(&call, |_, _| Err(control.bad_argument(&call, why)));
        }
        call.seq = control.next_pair(member, direction);
        side.enqueue_call(&call, |label| make(&side.communicator, label, x))
    }

    /// Returns the error of this rank's first failure, if there was one.
    pub(crate) fn check_usable(&self) -> Result<(), CollectiveError> {
        let Some(first) = self.failure() else {
            return Ok(());
        };
        let rank = self.global_rank();
        let group = self.name().to_string();
        Err(CollectiveError::Unusable {
            rank,
            group,
            first: Box::new(first),
        })
    }

    fn next_gpu_call(&self, op: OpKind, x: &CubeTensor) -> Call {
        Call {
            op,
            seq: self.next_seq(),
            dtype: x.dtype,
            shape: shape(x),
        }
    }
}

impl NcclGroup {
    /// Records a call and hands it to NCCL. If NCCL refuses it, it fails on every rank.
    fn enqueue_call<T>(
        &self,
        call: &Call,
        make: impl FnOnce(Label) -> Result<T, CudaError>,
    ) -> Result<T, CollectiveError> {
        let control = &self.watching.control;
        let Some(link) = &control.0.link else {
            return Err(control.bad_argument(call, "a group of one has no peers"));
        };
        let id = link.recorder.start(control.name(), call);
        let label = Label::new(id, format!("group {}: {call}", control.name()));
        make(label).map_err(|error| {
            let error = control.cuda_error(call, &error);
            control.record_failure(link, &error);
            error
        })
    }
}

fn shape(x: &CubeTensor) -> Vec<usize> {
    x.meta.shape().as_slice().to_vec()
}
