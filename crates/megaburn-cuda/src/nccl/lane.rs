/// The stream that a call is put on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lane {
    /// On CubeCL's stream, between the kernels before and after it.
    InOrder,
    /// On the communicator's own stream: after the preceding kernels and concurrently with later
    /// ones, until the result is waited for.
    Overlapped,
}
