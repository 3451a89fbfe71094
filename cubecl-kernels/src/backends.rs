//! The backends that operations run on.

/// Implements an operation that is composed of primitives for every backend that is built in: CPUs
/// (Flex) and, with the feature `cuda`, CubeCL's GPUs.
macro_rules! on_every_backend {
    (impl $op:ident { $($body:tt)* }) => {
        #[cfg(feature = "flex")]
        impl $op for burn::backend::Flex { $($body)* }
        #[cfg(feature = "cuda")]
        impl $op for burn::backend::Cube { $($body)* }
    };
}
pub(crate) use on_every_backend;
