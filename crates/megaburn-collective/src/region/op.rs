//! The operation that all region functions share, whose backward step runs the conjugate move.

use burn::{
    backend::{Backend, TensorMetadata, tensor::FloatTensor},
    tensor::Tensor,
};
use megaburn_autograd::{FusedOp, InputGrads, fused, on_composed_backends};

use crate::{
    error::CollectiveError,
    group::Group,
    region::moves::{self, Move},
};

/// Prefix of the panic message of a region whose collective failed; the error's text follows.
pub const FAILED_REGION: &str = "collective failed: ";

/// A region on a group.
#[derive(Clone, Debug)]
pub(crate) struct Region {
    pub(super) forward: Move,
    backward: Move,
    pub(super) group: Group,
}

impl Region {
    fn conjugate(self) -> Self {
        Self {
            forward: self.backward,
            backward: self.forward,
            group: self.group,
        }
    }
}

pub(crate) fn apply<const D: usize>(
    x: Tensor<D>,
    forward: Move,
    backward: Move,
    group: &Group,
) -> Tensor<D> {
    if group.size() == 1 {
        return x;
    }
    let region = Region {
        forward,
        backward,
        group: group.clone(),
    };
    fused(region, [x.into_dispatch()])
}

/// A move of data, by backend.
pub(crate) trait RegionOps: Backend {
    fn region(x: FloatTensor<Self>, region: Region) -> FloatTensor<Self>;
}

on_composed_backends! {
    impl RegionOps {
        fn region(x: FloatTensor<Self>, region: Region) -> FloatTensor<Self> {
            on_host::<Self>(x, &region)
        }
    }
}

/// Moves the data through host memory. This is correct for every backend, and fast where the device
/// is the host.
pub(super) fn on_host<B: Backend>(x: FloatTensor<B>, region: &Region) -> FloatTensor<B> {
    if region.forward == Move::Identity {
        return x;
    }
    let device = x.device();
    let data = burn::tensor::read_sync(B::float_into_data(x)).expect("cannot read the tensor");
    let data = unwrap_collective(moves::run(data, region.forward, &region.group));
    B::float_from_data(data, &device)
}

/// The result of a collective inside a differentiable operation, which cannot return an error.
///
/// # Panics
/// If the collective failed. The message starts with [`FAILED_REGION`], and the thread of the rank
/// turns it into an error.
#[expect(clippy::panic, reason = "Burn's operations cannot return errors")]
pub fn unwrap_collective<T>(result: Result<T, CollectiveError>) -> T {
    result.unwrap_or_else(|error| panic!("{FAILED_REGION}{error}"))
}

impl<B: RegionOps> FusedOp<B, 1> for Region {
    type Saved = Region;

    fn forward(self, [x]: [FloatTensor<B>; 1]) -> (FloatTensor<B>, Self::Saved) {
        (B::region(x, self.clone()), self)
    }

    fn backward(saved: Self::Saved, grad: FloatTensor<B>, mut grads: InputGrads<'_, B>) {
        // Run the collective even if this rank does not need the gradient: its peers may.
        let grad = B::region(grad, saved.conjugate());
        grads.register(0, grad);
    }
}
