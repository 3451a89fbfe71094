use burn::{Tensor, tensor::DType};

use super::host::OffloadedTensor;
use crate::moment::Moment;

/// The key of a state tensor.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) path: String,
    pub(crate) what: What,
}

/// Which state tensor of its parameter it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum What {
    Master,
    Moment(Moment),
}

impl Key {
    pub(crate) fn master(path: &str) -> Self {
        Self {
            path: path.to_string(),
            what: What::Master,
        }
    }

    pub(crate) fn moment(path: &str, moment: Moment) -> Self {
        Self {
            path: path.to_string(),
            what: What::Moment(moment),
        }
    }
}

/// A state tensor, on its device or in host memory.
#[derive(Clone, Debug)]
pub(crate) enum HostSlot {
    Here(Tensor<1>),
    OffloadedTensor(OffloadedTensor),
}

impl HostSlot {
    /// The tensor on its device.
    pub(crate) fn tensor(&self) -> Tensor<1> {
        match self {
            Self::Here(tensor) => tensor.clone(),
            Self::OffloadedTensor(host) => host.fetch().wait(),
        }
    }

    pub(crate) fn dtype(&self) -> DType {
        match self {
            Self::Here(tensor) => tensor.dtype(),
            Self::OffloadedTensor(host) => host.dtype(),
        }
    }
}
