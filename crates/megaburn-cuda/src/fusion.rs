//! Tensors of Burn's kernel fusion, which queues operations and may reorder independent ones.
//!
//! What goes through here is in the program's order: taking a tensor out drains its queue, and what
//! is put in is there already.

use burn::backend::{Cube, TensorMetadata, tensor::FloatTensor};
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use burn_fusion::{
    NoOp,
    custom::{OperationIr, OperationOutput, StreamId},
    get_client,
};
use burn_ir::InitOperationIr;

/// Burn's tensor of a CubeCL device as CubeCL's own: everything that it is computed from, and all
/// that was asked for before, is launched first.
pub fn from_backend(tensor: FloatTensor<Cube>) -> CubeTensor {
    let client = tensor.client.clone();
    client.resolve_tensor_float::<CubeBackend>(tensor)
}

/// The inverse of [`from_backend`].
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
