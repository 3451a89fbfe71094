/// Implements a trait of backends for every backend that is built in: CPUs (Flex) and, with the
/// feature `cuda`, CubeCL's GPUs. The feature is that of the crate that uses the macro.
#[macro_export]
macro_rules! on_every_backend {
    (impl $op:ident { $($body:tt)* }) => {
        impl $op for burn::backend::Flex { $($body)* }
        #[cfg(feature = "cuda")]
        impl $op for burn::backend::Cube { $($body)* }
    };
}
