//! Checks that the libraries that a CUDA run needs are on the machine, before it starts.

use std::path::PathBuf;

use crate::{error::CudaError, search::Machine};

/// The number of GPUs that this process may use; 0 without a driver.
pub fn num_gpus() -> usize {
    // SAFETY: loading the driver runs its initializers, as the first CUDA call would.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        return 0;
    }
    let count = || {
        cudarc::driver::result::init().ok()?;
        cudarc::driver::result::device::get_count().ok()
    };
    count().map_or(0, |count| usize::try_from(count).unwrap_or(0))
}

/// The name of a GPU, e.g. `NVIDIA H200`.
pub fn gpu_name(index: usize) -> Option<String> {
    let device = cudarc::driver::result::device::get(i32::try_from(index).ok()?).ok()?;
    cudarc::driver::result::device::get_name(device).ok()
}

/// The memory of a GPU in bytes.
pub fn gpu_memory(index: usize) -> Option<u64> {
    let device = cudarc::driver::result::device::get(i32::try_from(index).ok()?).ok()?;
    // SAFETY: the driver returned the device.
    let bytes = unsafe { cudarc::driver::result::device::total_mem(device) }.ok()?;
    u64::try_from(bytes).ok()
}

/// The PCI address of a GPU, e.g. `0000:1B:00.0`, by which other programs know it.
pub fn gpu_pci_address(index: usize) -> Option<String> {
    let device = cudarc::driver::result::device::get(i32::try_from(index).ok()?).ok()?;
    let mut text = [0; 32];
    // SAFETY: the driver writes at most this number of characters, with a zero at the end.
    let status = unsafe {
        cudarc::driver::sys::cuDeviceGetPCIBusId(text.as_mut_ptr(), text.len() as i32, device)
    };
    status.result().ok()?;
    let address = text.iter().take_while(|letter| **letter != 0);
    Some(address.map(|letter| *letter as u8 as char).collect())
}

/// The file of a library that this process has loaded, found by the start of its name.
pub fn loaded(name: &str) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let files = maps
        .lines()
        .filter_map(|line| Some(PathBuf::from(&line[line.find('/')?..])));
    files.into_iter().find(|file| {
        file.file_name()
            .is_some_and(|file| file.to_string_lossy().starts_with(name))
    })
}

/// Refuses a machine that lacks something that a CUDA run needs.
///
/// # Errors
/// The first missing item, where it was searched for, and how to install it.
pub fn check() -> Result<(), CudaError> {
    // SAFETY: loading the driver runs its initializers, as the first use would.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        return Err(CudaError::MissingLibrary {
            library: "the NVIDIA driver",
            names: cudarc::get_lib_name_candidates("cuda"),
            folders: Vec::new(),
            install: "install the driver (`nvidia-smi` must work)",
        });
    }
    if num_gpus() == 0 {
        let visible = std::env::var("CUDA_VISIBLE_DEVICES");
        let visible = visible.map_or("not set".into(), |gpus| format!("{gpus:?}"));
        return Err(CudaError::Refused(format!(
            "the NVIDIA driver reports no GPU (CUDA_VISIBLE_DEVICES is {visible}): check \
            `nvidia-smi`"
        )));
    }
    // SAFETY: loading these libraries runs their initializers, as the first use would.
    let nvrtc = || unsafe { cudarc::nvrtc::sys::is_culib_present() };
    find(
        "NVRTC, which compiles kernels,",
        "nvrtc",
        &["cu13", "cuda_nvrtc"],
        nvrtc,
    )?;
    // SAFETY: as above.
    let cublaslt = || unsafe { cudarc::cublaslt::sys::is_culib_present() };
    find("cuBLASLt", "cublasLt", &["cu13", "cublas"], cublaslt)?;
    check_headers()
}

const TOOLKIT: &str = "install the CUDA toolkit 13 or its parts (packages cuda-nvrtc-13-0, \
    libcublas-13-0 and cuda-cudart-dev-13-0, or the wheels nvidia-cuda-nvrtc, nvidia-cublas and \
    nvidia-cuda-runtime)";

/// Makes sure that the loader finds a library by its name. If it does not, the library is loaded
/// from the toolkit or a Python wheel; the loader then resolves the name to the loaded library.
fn find(
    library: &'static str,
    name: &str,
    wheels: &[&str],
    is_there: impl Fn() -> bool,
) -> Result<(), CudaError> {
    if is_there() {
        return Ok(());
    }
    let machine = Machine::this();
    // The newest toolkit that this program supports comes first.
    let names = ["13", "12"].map(|major| format!("lib{name}.so.{major}"));
    for file in names.iter().flat_map(|name| machine.files(name, wheels)) {
        // SAFETY: loading a library runs its initializers, as linking to it would.
        if let Ok(library) = unsafe { libloading::Library::new(&file) } {
            tracing::info!("loaded {}", file.display());
            // Leak the handle: the library must stay loaded for the life of the process.
            std::mem::forget(library);
            if is_there() {
                return Ok(());
            }
        }
    }
    let folders = machine.folders(&names[0], wheels);
    Err(CudaError::MissingLibrary {
        library,
        names: cudarc::get_lib_name_candidates(name),
        folders: folders
            .iter()
            .map(|folder| folder.display().to_string())
            .collect(),
        install: TOOLKIT,
    })
}

/// Checks for CUDA's headers, which NVRTC needs. Without them, CubeCL fails at its first kernel and
/// says so only in a log line.
fn check_headers() -> Result<(), CudaError> {
    let folders: Vec<PathBuf> = match std::env::var_os("CUDA_PATH") {
        Some(path) => vec![PathBuf::from(path).join("include")],
        None => [
            "/usr/local/cuda/include",
            "/opt/cuda/include",
            "/usr/include",
        ]
        .map(PathBuf::from)
        .to_vec(),
    };
    if folders
        .iter()
        .any(|folder| folder.join("cuda_fp16.h").is_file())
    {
        return Ok(());
    }
    // CubeCL reads the variable itself, so only the user can set it.
    let wheels = Machine::this().wheels(&["cu13", "cuda_runtime"]);
    if let Some(wheel) = wheels
        .iter()
        .find(|wheel| wheel.join("include/cuda_fp16.h").is_file())
    {
        return Err(CudaError::Refused(format!(
            "CUDA's headers, which NVRTC compiles against, are in {0}/include, not in CUDA_PATH: \
            set CUDA_PATH={0}",
            wheel.display()
        )));
    }
    Err(CudaError::MissingLibrary {
        library: "CUDA's header folder, which NVRTC compiles against,",
        names: vec!["cuda_fp16.h".into()],
        folders: folders
            .iter()
            .map(|folder| folder.display().to_string())
            .collect(),
        install: TOOLKIT,
    })
}
