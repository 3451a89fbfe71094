/// Implements a trait for every backend that is built in: what
/// [`on_composed_backends`](crate::on_composed_backends) covers and, with the feature `cuda`, NVIDIA's
/// GPUs. The crate that uses the macro defines the features.
#[macro_export]
macro_rules! on_every_backend {
    (impl $op:ident { $($body:tt)* }) => {
        $crate::on_composed_backends! { impl $op { $($body)* } }
        #[cfg(feature = "cuda")]
        impl $op for burn::backend::Cube { $($body)* }
    };
}

/// Implements a trait for the backends without kernels of their own, where megaburn composes Burn's
/// operations: Flex, and what [`on_optional_backends`](crate::on_optional_backends) covers. The crate
/// that uses the macro defines the features.
#[macro_export]
macro_rules! on_composed_backends {
    (impl $op:ident { $($body:tt)* }) => {
        impl $op for burn::backend::Flex { $($body)* }
        $crate::on_optional_backends! { impl $op { $($body)* } }
    };
}

/// Implements a trait of backends for those without kernels of their own that a feature adds: NdArray
/// with the feature `ndarray`, and CubeCL's other devices with the feature `wgpu`. The crate that uses
/// the macro defines the features.
#[macro_export]
macro_rules! on_optional_backends {
    (impl $op:ident { $($body:tt)* }) => {
        #[cfg(feature = "ndarray")]
        impl $op for burn::backend::NdArray { $($body)* }
        #[cfg(all(feature = "wgpu", not(feature = "cuda")))]
        impl $op for burn::backend::Cube { $($body)* }
    };
}
