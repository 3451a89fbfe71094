use cudarc::nccl::sys::ncclUniqueId;

use super::api::{Api, Code};
use crate::error::CudaError;

/// Identifies a communicator to be created; its first member generates the id and sends it to the
/// others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UniqueId(pub [u8; Self::BYTES]);

impl UniqueId {
    /// Length in bytes.
    pub const BYTES: usize = 128;

    /// Generates a new id.
    ///
    /// # Errors
    /// NCCL is missing, too old, or has no network to listen on.
    pub fn new() -> Result<Self, CudaError> {
        let api = Api::get()?;
        let mut id = ncclUniqueId {
            internal: [0; Self::BYTES],
        };
        // SAFETY: NCCL writes the id through the pointer.
        let code = unsafe { (api.get_unique_id)(&mut id) };
        if code != Code::SUCCESS {
            return Err(api.error("ncclGetUniqueId", code, None));
        }
        Ok(Self(id.internal.map(|byte| byte as u8)))
    }
}

/// The number of members of a communicator, and the rank of this process among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Membership {
    /// The rank of this process, from 0.
    pub rank: usize,
    /// The number of members.
    pub size: usize,
}
