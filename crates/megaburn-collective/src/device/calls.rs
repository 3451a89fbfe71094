//! A group's collectives on GPU tensors: they are counted, compared, recorded and handed to NCCL.

use std::ops::Range;

use burn_cubecl::{CubeBackend, CubeDevice, tensor::CubeTensor};
use megaburn_cuda::{
    AsyncOp, CudaError,
    nccl::{self, Communicator, Label, Reduction},
};

use super::{nan_max::nan_propagating_max, nccl_group::NcclGroup};
use crate::{
    call::{Call, Collective, ReduceOp},
    error::CollectiveError,
    group::Group,
    lane::Lane,
};

/// Whether NCCL can access a tensor.
pub(crate) fn is_on_gpu(tensor: &CubeTensor) -> bool {
    matches!(tensor.device, CubeDevice::Cuda(_))
}

fn reduction(op: ReduceOp) -> Reduction {
    match op {
        ReduceOp::Sum => Reduction::Sum,
        ReduceOp::Max => Reduction::Max,
        ReduceOp::Mean => Reduction::Mean,
    }
}

impl Group {
    /// As [`Group::run_on_host`]. An all-reduce propagates NaN in a maximum; **a reduce-scatter
    /// drops it**.
    pub(crate) fn start_on_gpu(
        &self,
        op: Collective,
        x: CubeTensor,
        lane: Lane,
    ) -> Result<AsyncOp, CollectiveError> {
        let start = |x| {
            let lane = lane.into();
            self.gpu_call(op, x, |nccl, label, x| match op {
                Collective::AllReduce(op) => nccl.all_reduce(label, x, reduction(op), lane),
                Collective::AllGather => nccl.all_gather(label, x, lane),
                Collective::ReduceScatter(op) => nccl.reduce_scatter(label, x, reduction(op), lane),
                Collective::AllToAll => {
                    let rows = self.equal_rows(x.meta.shape()[0]);
                    nccl.all_to_all(label, x, &rows, &rows, lane)
                }
                Collective::Broadcast { root } => nccl.broadcast(label, x, root, lane),
                Collective::Shift { by } => nccl.pass_on(label, x, self.at(by), self.at(-by), lane),
                Collective::Send | Collective::Barrier => {
                    Err(CudaError::Refused("it returns no value".into()))
                }
            })
        };
        if op != Collective::AllReduce(ReduceOp::Max) || !x.dtype.is_float() {
            return start(x);
        }
        // The maximum is followed by a kernel that restores NaN, so wait for the collective here.
        nan_propagating_max::<CubeBackend, _>(x, |x| start(x).map(AsyncOp::wait)).map(AsyncOp::done)
    }

    /// An all-gather into `out`, which is written even if other tensors share its memory. `x` may
    /// be this member's shard of it.
    pub(crate) fn gpu_all_gather_into(
        &self,
        x: CubeTensor,
        out: CubeTensor,
        lane: Lane,
    ) -> Result<AsyncOp, CollectiveError> {
        self.gpu_call(Collective::AllGather, x, |nccl, label, x| {
            nccl.all_gather_into(label, x, out, lane.into())
        })
    }

    /// As [`Group::all_to_all_rows`].
    pub(crate) fn gpu_all_to_all(
        &self,
        x: CubeTensor,
        send: &[Vec<Range<usize>>],
        recv: &[Vec<Range<usize>>],
        lane: Lane,
    ) -> Result<AsyncOp, CollectiveError> {
        let checked = self.check_ranges([send, recv], x.meta.shape()[0]);
        self.gpu_call(Collective::AllToAll, x, |nccl, label, x| {
            checked.map_err(CudaError::Refused)?;
            nccl.all_to_all(label, x, send, recv, lane.into())
        })
    }

    /// As [`Group::send`].
    pub(crate) fn gpu_send(
        &self,
        x: CubeTensor,
        to: usize,
        lane: Lane,
    ) -> Result<AsyncOp, CollectiveError> {
        self.gpu_pair(x, to, 0, |nccl, label, x| {
            nccl.send(label, x, to, lane.into())
        })
    }

    /// As [`Group::recv`], into `out`, which must have no other owner.
    pub(crate) fn gpu_recv(
        &self,
        out: CubeTensor,
        from: usize,
        lane: Lane,
    ) -> Result<AsyncOp, CollectiveError> {
        self.gpu_pair(out, from, 1, |nccl, label, out| {
            nccl.recv(label, out, from, lane.into())
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
        op: Collective,
        x: CubeTensor,
        make: impl FnOnce(&Communicator, Label, CubeTensor) -> Result<T, CudaError>,
    ) -> Result<T, CollectiveError> {
        self.check_usable()?;
        let side = self.device_side(&x)?;
        let control = &side.watching.control;
        let call = control.next_call(op, x.dtype, x.meta.shape());
        // Check this before the members compare: the others may have made such a call before, and
        // then they do not ask.
        let is_mean = matches!(
            op,
            Collective::AllReduce(ReduceOp::Mean) | Collective::ReduceScatter(ReduceOp::Mean)
        );
        if (is_mean && !x.dtype.is_float()) || !nccl::takes(x.dtype) {
            let why = format!("{:?} does not support this reduction", x.dtype);
            return control.refuse(&call, why);
        }
        // The lock must not be held while the members compare: they may ask meanwhile.
        let is_new = side.watching.watched.log().push(&call);
        if is_new {
            control.run(&call, |link, deadline| control.meet(link, &call, deadline))?;
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
        let call = control.pair_call(member, direction, x.dtype, x.meta.shape());
        if member >= control.size() || member == control.rank() {
            let why = format!("member {member} is not a peer of member {}", control.rank());
            return control.refuse(&call, why);
        }
        side.enqueue_call(&call, |label| make(&side.communicator, label, x))
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
        let id = link.recorder.start_on_gpu(control.name(), call);
        let label = Label::new(id, format!("group {}: {call}", control.name()));
        make(label).map_err(|error| {
            let error = control.cuda_error(call, &error);
            control.record_failure(link, &error);
            error
        })
    }
}
