use thiserror::Error;

/// Why CUDA work failed.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "the message of each variant says what its fields are"
)]
pub enum CudaError {
    #[error(
        "{library} is not on this machine: looked for {} in the loader's path (LD_LIBRARY_PATH, ldconfig){}; {install}",
        names.join(", "),
        if folders.is_empty() { String::new() } else { format!(" and in {}", folders.join(", ")) }
    )]
    MissingLibrary {
        library: &'static str,
        names: Vec<String>,
        folders: Vec<String>,
        install: &'static str,
    },
    #[error("{library} lacks the function {function}: version {wanted} or newer is needed")]
    MissingFunction {
        library: &'static str,
        function: &'static str,
        wanted: &'static str,
    },
    #[error("{call} failed: {why}")]
    Call { call: &'static str, why: String },
    #[error("{bytes} bytes of pinned host memory are not to be had ({why})")]
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
}
