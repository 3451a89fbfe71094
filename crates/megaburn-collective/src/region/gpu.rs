//! Region functions on CubeCL tensors: through NCCL on a CUDA device, through the host elsewhere.

use std::iter;

use burn::backend::{Cube, tensor::FloatTensor};
use burn_cubecl::CubeBackend;
use megaburn_cuda::{AsyncOp, nccl::Lane, tensor};

use crate::{
    CollectiveError, Group, ReduceOp,
    device::{is_on_gpu, nan_propagating_max},
    region::{
        on_device::{self, RowCollectives},
        op::{Move, Region, RegionOps, on_host, unwrap_collective},
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

type Result<T> = std::result::Result<T, CollectiveError>;

impl RowCollectives<CubeBackend> for Nccl<'_> {
    fn group(&self) -> &Group {
        self.0
    }

    fn all_reduce(&self, x: FloatTensor<CubeBackend>) -> Result<FloatTensor<CubeBackend>> {
        self.0
            .gpu_all_reduce(x, ReduceOp::Sum, Lane::InOrder)
            .map(AsyncOp::wait)
    }

    fn max(&self, x: FloatTensor<CubeBackend>) -> Result<FloatTensor<CubeBackend>> {
        nan_propagating_max::<CubeBackend, _>(x, |x| {
            self.0
                .gpu_all_reduce(x, ReduceOp::Max, Lane::InOrder)
                .map(AsyncOp::wait)
        })
    }

    fn all_gather(&self, x: FloatTensor<CubeBackend>) -> Result<FloatTensor<CubeBackend>> {
        self.0.gpu_all_gather(x, Lane::InOrder).map(AsyncOp::wait)
    }

    fn reduce_scatter(&self, x: FloatTensor<CubeBackend>) -> Result<FloatTensor<CubeBackend>> {
        self.0
            .gpu_reduce_scatter(x, ReduceOp::Sum, Lane::InOrder)
            .map(AsyncOp::wait)
    }

    fn all_to_all(&self, x: FloatTensor<CubeBackend>) -> Result<FloatTensor<CubeBackend>> {
        let one = |row| iter::once(row..row + 1).collect();
        let rows: Vec<_> = (0..self.0.size()).map(one).collect();
        self.0
            .gpu_all_to_all(x, &rows, &rows, Lane::InOrder)
            .map(AsyncOp::wait)
    }

    fn shift(&self, x: FloatTensor<CubeBackend>, by: isize) -> Result<FloatTensor<CubeBackend>> {
        self.0.gpu_shift(x, by, Lane::InOrder).map(AsyncOp::wait)
    }
}
