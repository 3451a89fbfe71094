//! The versions of NVIDIA's libraries that this process uses, and where they were found.

use std::path::PathBuf;

use crate::{cudnn, error::CudaError, gemm, libraries, nccl};

/// A library, as this process uses it.
#[derive(Clone, Debug, PartialEq)]
pub struct LibraryVersion {
    /// Its name.
    pub name: &'static str,
    /// Its version, and the file that is loaded; or why it cannot be used.
    pub found: Result<(String, Option<PathBuf>), CudaError>,
    /// What this version cannot do.
    pub lacks: Option<String>,
    /// Other copies on the machine, with their versions where they say them.
    pub others: Vec<String>,
}

/// The oldest cuBLASLt with FP8 products whose scales belong to blocks, as `cublasLtGetVersion` has
/// it: 12.9.
const BLOCK_SCALES: usize = 120_900;

/// The driver, NVRTC, cuBLASLt, NCCL and cuDNN. Loads those that are not loaded yet.
pub fn versions() -> Vec<LibraryVersion> {
    // This also loads NVRTC and cuBLASLt from where they are, if the loader does not find them.
    let ready = libraries::check();
    // SAFETY: loading the driver runs its initializers, as its first call would.
    let has_driver = unsafe { cudarc::driver::sys::is_culib_present() };
    // SAFETY: as above.
    let has_nvrtc = unsafe { cudarc::nvrtc::sys::is_culib_present() };
    // SAFETY: as above.
    let has_cublaslt = unsafe { cudarc::cublaslt::sys::is_culib_present() };
    let missing = || match &ready {
        Err(error) => error.clone(),
        Ok(()) => CudaError::Refused("it cannot be loaded".into()),
    };
    let found = |is_there: bool, version: &dyn Fn() -> Option<String>, file: &str| match is_there {
        true => {
            let version = version().unwrap_or_else(|| "of an unknown version".into());
            Ok((version, libraries::loaded(file)))
        }
        false => Err(missing()),
    };
    let plain = |name, found| LibraryVersion {
        name,
        found,
        lacks: None,
        others: Vec::new(),
    };
    let mut all = vec![
        plain("CUDA driver", found(has_driver, &driver, "libcuda.so")),
        plain("NVRTC", found(has_nvrtc, &nvrtc, "libnvrtc.so")),
    ];
    let lt = || Some(dotted(gemm::version()));
    let is_old = has_cublaslt && gemm::version() < BLOCK_SCALES;
    all.push(LibraryVersion {
        lacks: is_old.then(|| {
            "has no FP8 products with scales of blocks (precision.recipe = \"blockwise\"), which \
             12.9 has"
                .into()
        }),
        ..plain("cuBLASLt", found(has_cublaslt, &lt, "libcublasLt.so"))
    });
    let file = || libraries::loaded("libnccl.so");
    all.push(plain(
        "NCCL",
        nccl::version().map(|version| (version, file())),
    ));
    let cudnn = cudnn::found().map(|found| (found.version(), Some(found.file().to_path_buf())));
    all.push(LibraryVersion {
        others: cudnn::others(),
        ..plain("cuDNN", cudnn)
    });
    if let Err(error) = ready
        && [has_driver, has_nvrtc, has_cublaslt].iter().all(|is| *is)
    {
        // The headers, or no GPU.
        all.push(plain("CUDA", Err(error)));
    }
    all
}

/// The newest CUDA that the driver supports.
fn driver() -> Option<String> {
    let mut version = 0;
    // SAFETY: the driver writes the number through the pointer.
    let status = unsafe { cudarc::driver::sys::cuDriverGetVersion(&mut version) };
    status.result().ok()?;
    Some(format!(
        "for CUDA {}.{}",
        version / 1000,
        version % 1000 / 10
    ))
}

fn nvrtc() -> Option<String> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library writes the numbers through the pointers.
    let status = unsafe { cudarc::nvrtc::sys::nvrtcVersion(&mut major, &mut minor) };
    status.result().ok()?;
    Some(format!("{major}.{minor}"))
}

/// `cublasLtGetVersion` as text.
fn dotted(version: usize) -> String {
    format!(
        "{}.{}.{}",
        version / 10_000,
        version / 100 % 100,
        version % 100
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_library_has_a_version_or_a_reason() {
        let names = ["CUDA driver", "NVRTC", "cuBLASLt", "NCCL", "cuDNN"];
        let found = versions();
        for (library, name) in found.iter().zip(names) {
            assert_eq!(library.name, name);
            if let Err(error) = &library.found {
                assert!(!error.to_string().is_empty());
            }
        }
        assert_eq!(dotted(130_103), "13.1.3");
    }
}
