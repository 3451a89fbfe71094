//! What a CUDA run needs on the machine, looked for before it starts.

use std::path::PathBuf;

use crate::CudaError;

/// The number of GPUs that this process may use; none without a driver.
pub fn num_gpus() -> usize {
    // SAFETY: loading the driver runs its initialisers, as the first CUDA call would.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        return 0;
    }
    let count = || {
        cudarc::driver::result::init().ok()?;
        cudarc::driver::result::device::get_count().ok()
    };
    count().map_or(0, |count| usize::try_from(count).unwrap_or(0))
}

/// The name of a GPU, as `NVIDIA H200`.
pub fn gpu_name(index: usize) -> Option<String> {
    let device = cudarc::driver::result::device::get(i32::try_from(index).ok()?).ok()?;
    cudarc::driver::result::device::get_name(device).ok()
}

/// Refuses a machine that lacks something a CUDA run needs.
///
/// # Errors
/// The first thing that is missing, where it was looked for and how to install it.
pub fn check() -> Result<(), CudaError> {
    let missing = |library, name: &str, install| {
        let names = cudarc::get_lib_name_candidates(name);
        CudaError::MissingLibrary { library, names, folders: Vec::new(), install }
    };
    // SAFETY: loading these libraries runs their initialisers, as the first use would.
    let [driver, nvrtc, cublaslt] = unsafe {
        [
            cudarc::driver::sys::is_culib_present(),
            cudarc::nvrtc::sys::is_culib_present(),
            cudarc::cublaslt::sys::is_culib_present(),
        ]
    };
    if !driver {
        return Err(missing(
            "the NVIDIA driver",
            "cuda",
            "install the driver (`nvidia-smi` must work)",
        ));
    }
    if num_gpus() == 0 {
        let visible = std::env::var("CUDA_VISIBLE_DEVICES");
        let visible = visible.map_or("not set".into(), |gpus| format!("{gpus:?}"));
        return Err(CudaError::Refused(format!(
            "the NVIDIA driver shows no GPU (CUDA_VISIBLE_DEVICES is {visible}): see `nvidia-smi`"
        )));
    }
    if !nvrtc {
        return Err(missing("NVRTC, which compiles kernels,", "nvrtc", TOOLKIT));
    }
    if !cublaslt {
        return Err(missing("cuBLASLt", "cublasLt", TOOLKIT));
    }
    check_headers()
}

const TOOLKIT: &str = "install the CUDA toolkit 13 or its parts (packages cuda-nvrtc-13-0, \
    libcublas-13-0 and cuda-cudart-dev-13-0, or the wheels nvidia-cuda-nvrtc, nvidia-cublas and \
    nvidia-cuda-runtime with LD_LIBRARY_PATH and CUDA_PATH set)";

/// NVRTC needs CUDA's headers; without them CubeCL fails at its first kernel, in a log line only.
fn check_headers() -> Result<(), CudaError> {
    let folders: Vec<PathBuf> = match std::env::var_os("CUDA_PATH") {
        Some(path) => vec![PathBuf::from(path).join("include")],
        None => ["/usr/local/cuda/include", "/opt/cuda/include", "/usr/include"]
            .map(PathBuf::from)
            .to_vec(),
    };
    if folders.iter().any(|folder| folder.join("cuda_fp16.h").is_file()) {
        return Ok(());
    }
    Err(CudaError::MissingLibrary {
        library: "CUDA's header folder, which NVRTC compiles against,",
        names: vec!["cuda_fp16.h".into()],
        folders: folders.iter().map(|folder| folder.display().to_string()).collect(),
        install: TOOLKIT,
    })
}
