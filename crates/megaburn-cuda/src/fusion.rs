//! Conversion of tensors of Burn's kernel fusion, which queues operations and may reorder
//! independent ones.
//!
//! The conversions preserve program order: taking a tensor out drains its queue, and a tensor that
//! is put in is complete already.

use burn::backend::{Cube, TensorMetadata, tensor::FloatTensor};
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use burn_fusion::{
    NoOp,
    custom::{OperationIr, OperationOutput, StreamId},
    get_client,
};
use burn_ir::InitOperationIr;

/// Converts Burn's tensor on a CubeCL device into CubeCL's own. Everything that it depends on, and
/// everything that was queued before, is launched first.
pub fn from_backend(tensor: FloatTensor<Cube>) -> CubeTensor {
    let client = tensor.client.clone();
    client.resolve_tensor_float::<CubeBackend>(tensor)
}

/// Converts CubeCL's tensor into Burn's; the inverse of [`from_backend`].
pub fn into_backend(tensor: CubeTensor) -> FloatTensor<Cube> {
    let client = get_client::<CubeBackend>(&tensor.device);
    let shape = tensor.shape();
    let dtype = tensor.dtype;
    let made = InitOperationIr::create(shape, dtype, || {
        client.register_tensor_handle(tensor.into())
    });
    let nothing = NoOp::<CubeBackend>::new();
    client
        .register(StreamId::current(), OperationIr::Init(made), nothing)
        .output()
}
