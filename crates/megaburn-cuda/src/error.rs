use thiserror::Error;

/// Why CUDA work failed.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "the error message of each variant describes its fields"
)]
pub enum CudaError {
    #[error(
        "{library} was not found: looked for {} in the loader's path (LD_LIBRARY_PATH, \
        ldconfig){}; {install}",
        names.join(", "),
        if folders.is_empty() { String::new() } else { format!(" and in {}", folders.join(", ")) }
    )]
    MissingLibrary {
        library: &'static str,
        names: Vec<String>,
        folders: Vec<String>,
        install: &'static str,
    },
    #[error("{library} has no function {function}: version {wanted} or newer is required")]
    MissingFunction {
        library: &'static str,
        function: &'static str,
        wanted: &'static str,
    },
    #[error("{call} failed: {why}")]
    Call { call: &'static str, why: String },
    #[error("cannot allocate {bytes} bytes of pinned host memory: {why}")]
    HostMemory { bytes: usize, why: String },
    #[error("{0}")]
    Refused(String),
}

impl CudaError {
    /// Wraps a failed call of the CUDA driver.
    pub(crate) fn driver(call: &'static str) -> impl FnOnce(cudarc::driver::DriverError) -> Self {
        move |error| Self::Call {
            call,
            why: error.to_string(),
        }
    }

    /// Wraps a failed call of cuBLASLt.
    pub(crate) fn cublas(
        call: &'static str,
    ) -> impl FnOnce(cudarc::cublaslt::result::CublasError) -> Self {
        move |error| Self::Call {
            call,
            why: format!("{:?}", error.0),
        }
    }
}
