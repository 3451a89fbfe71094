//! Region functions on CubeCL tensors: through NCCL on a CUDA device, through the host elsewhere.

use burn::backend::{Cube, tensor::FloatTensor};
use burn_cubecl::CubeBackend;
use megaburn_cuda::{AsyncOp, tensor};

use crate::{
    call::Collective,
    device::is_on_gpu,
    error::CollectiveError,
    group::Group,
    lane::Lane,
    region::{
        moves::Move,
        on_device::{self, RowCollectives},
        op::{Region, RegionOps, on_host, unwrap_collective},
    },
};

impl RegionOps for Cube {
    fn region(x: FloatTensor<Self>, region: Region) -> FloatTensor<Self> {
        if region.forward == Move::Identity {
            return x;
        }
        // With Burn's kernel fusion, this runs every queued operation first, so that the collective
        // is enqueued after the kernels that compute its input.
        let x = tensor::from_backend(x);
        if !is_on_gpu(&x) {
            return on_host::<Self>(tensor::into_backend(x), &region);
        }
        let x = on_device::run::<CubeBackend>(x, region.forward, &Nccl(&region.group));
        tensor::into_backend(unwrap_collective(x))
    }
}

/// A group's collectives through NCCL, enqueued in order with CubeCL's kernels.
struct Nccl<'a>(&'a Group);

impl RowCollectives<CubeBackend> for Nccl<'_> {
    fn group(&self) -> &Group {
        self.0
    }

    fn run(
        &self,
        op: Collective,
        x: FloatTensor<CubeBackend>,
    ) -> Result<FloatTensor<CubeBackend>, CollectiveError> {
        self.0.start_on_gpu(op, x, Lane::InOrder).map(AsyncOp::wait)
    }
}
