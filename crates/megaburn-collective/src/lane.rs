/// Where a collective runs on a GPU. On the host, a collective is complete when it returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lane {
    /// On the stream of the kernels, between those before it and those after it.
    InOrder,
    /// On the group's own stream: after the kernels before it, and concurrently with those after it
    /// until it is waited for.
    Overlapped,
}

#[cfg(feature = "cuda")]
impl From<Lane> for megaburn_cuda::nccl::Lane {
    fn from(lane: Lane) -> Self {
        match lane {
            Lane::InOrder => Self::InOrder,
            Lane::Overlapped => Self::Overlapped,
        }
    }
}
