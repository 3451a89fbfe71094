/// Where a call goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lane {
    /// On CubeCL's stream, between the kernels before and after it.
    InOrder,
    /// On the communicator's own stream, behind the kernels before it and beside those after it,
    /// until somebody waits for it.
    Overlapped,
}
