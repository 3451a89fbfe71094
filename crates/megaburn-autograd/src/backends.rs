/// Implements a trait of backends for every backend that is built in: those of
/// [`on_composed_backends`](crate::on_composed_backends) and, with the feature `cuda`, NVIDIA's GPUs. The
/// features are those of the crate that uses the macro.
#[macro_export]
macro_rules! on_every_backend {
    (impl $op:ident { $($body:tt)* }) => {
        $crate::on_composed_backends! { impl $op { $($body)* } }
        #[cfg(feature = "cuda")]
        impl $op for burn::backend::Cube { $($body)* }
    };
}

/// Implements a trait of backends for those that have no kernels of their own, whose operations are
/// composed of Burn's: Flex, and those of [`on_optional_backends`](crate::on_optional_backends). The
/// features are those of the crate that uses the macro.
#[macro_export]
macro_rules! on_composed_backends {
    (impl $op:ident { $($body:tt)* }) => {
        impl $op for burn::backend::Flex { $($body)* }
        $crate::on_optional_backends! { impl $op { $($body)* } }
    };
}

/// Implements a trait of backends for those without kernels of their own that a feature adds: NdArray
/// with the feature `ndarray`, and CubeCL's other devices with the feature `wgpu`. The features are those
/// of the crate that uses the macro.
#[macro_export]
macro_rules! on_optional_backends {
    (impl $op:ident { $($body:tt)* }) => {
        #[cfg(feature = "ndarray")]
        impl $op for burn::backend::NdArray { $($body)* }
        #[cfg(all(feature = "wgpu", not(feature = "cuda")))]
        impl $op for burn::backend::Cube { $($body)* }
    };
}
