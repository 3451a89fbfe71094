//! cuDNN's functions, found at run time.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    path::PathBuf,
    sync::OnceLock,
};

use libloading::Library;

use super::names::{Handle, Raw};
use crate::{CudaError, wheels};

/// 9.15.1, as `cudnnGetVersion` counts: before it the backward is wrong where 128 does not divide the
/// number of keys.
const OLDEST: usize = 9_15_01;
const NAMES: [&str; 2] = ["libcudnn.so.9", "libcudnn.so"];
const INSTALL: &str = "install cuDNN 9.15.1 or newer (package libcudnn9-cuda-13, or the wheel \
    nvidia-cudnn-cu13 with LD_LIBRARY_PATH naming its folder nvidia/cudnn/lib)";

/// What a call returns: `cudnnStatus_t`, as a number because newer libraries have more of them.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Status(c_int);

macro_rules! functions {
    ($($name:ident: $symbol:literal ($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions that are used here.
        #[derive(Debug)]
        pub(super) struct Api {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Api {
            fn resolve(library: &Library) -> Result<Self, CudaError> {
                Ok(Self {
                    // SAFETY: the types are those of the public header of 9.0 and later.
                    $($name: *unsafe { library.get($symbol) }.map_err(|_| missing($symbol))?,)*
                })
            }
        }
    };
}

functions! {
    get_version: "cudnnGetVersion" () -> usize;
    get_cudart_version: "cudnnGetCudartVersion" () -> usize;
    get_error_string: "cudnnGetErrorString" (Status) -> *const c_char;
    get_last_error_string: "cudnnGetLastErrorString" (*mut c_char, usize);
    create: "cudnnCreate" (*mut Handle) -> Status;
    set_stream: "cudnnSetStream" (Handle, *mut c_void) -> Status;
    create_descriptor: "cudnnBackendCreateDescriptor" (c_int, *mut Raw) -> Status;
    destroy_descriptor: "cudnnBackendDestroyDescriptor" (Raw) -> Status;
    finalize: "cudnnBackendFinalize" (Raw) -> Status;
    set_attribute: "cudnnBackendSetAttribute" (Raw, c_int, c_int, i64, *const c_void) -> Status;
    get_attribute: "cudnnBackendGetAttribute"
        (Raw, c_int, c_int, i64, *mut i64, *mut c_void) -> Status;
    execute: "cudnnBackendExecute" (Handle, Raw, Raw) -> Status;
}

impl Api {
    /// The library of this process, loaded by the first call.
    ///
    /// # Errors
    /// It is missing or too old, or lacks a library that it would end the process without.
    pub(super) fn get() -> Result<&'static Self, CudaError> {
        static API: OnceLock<Result<Api, CudaError>> = OnceLock::new();
        API.get_or_init(Self::load).as_ref().map_err(Clone::clone)
    }

    fn load() -> Result<Self, CudaError> {
        let names = NAMES.map(String::from);
        let library = find("cuDNN", &names, wheels::folders(&["cudnn"]), INSTALL)?;
        let api = Self::resolve(&library)?;
        // It stays loaded for as long as the process lives, as does what it loads itself.
        std::mem::forget(library);
        check_version(api.version())?;
        api.load_companions()?;
        Ok(api)
    }

    /// The libraries that cuDNN opens by their names when it looks for an engine. It ends the process
    /// where cuBLASLt is missing; those that are loaded already it finds.
    fn load_companions(&self) -> Result<(), CudaError> {
        // SAFETY: takes and touches nothing.
        let major = unsafe { (self.get_cudart_version)() } / 1000;
        let toolkit = format!("cu{major}");
        for (library, name, wheel) in [
            ("cuBLASLt, which cuDNN needs,", "libcublasLt", "cublas"),
            ("NVRTC, which cuDNN needs,", "libnvrtc", "cuda_nvrtc"),
        ] {
            let folders = wheels::folders(&[wheel, &toolkit]);
            let found = find(library, &[format!("{name}.so.{major}")], folders, TOOLKIT)?;
            std::mem::forget(found);
        }
        Ok(())
    }

    /// The library's version, as 91900 for 9.19.0.
    pub(super) fn version(&self) -> usize {
        // SAFETY: takes and touches nothing.
        unsafe { (self.get_version)() }
    }

    /// Nothing, or a call that failed with what the library says about it.
    pub(super) fn check(&self, call: &'static str, status: Status) -> Result<(), CudaError> {
        if status == Status(0) {
            return Ok(());
        }
        let mut last = [0; 1024];
        // SAFETY: the library writes a text of at most so many bytes, and a zero is behind them; it takes
        // any number as a status and returns a text that lives as long as itself.
        let [what, last] = unsafe {
            (self.get_last_error_string)(last.as_mut_ptr(), last.len() - 1);
            [CStr::from_ptr((self.get_error_string)(status)), CStr::from_ptr(last.as_ptr())]
        }
        .map(|text| text.to_string_lossy().trim().to_string());
        let why = if last.is_empty() { what } else { format!("{what}: {last}") };
        Err(CudaError::Call { call, why })
    }
}

const TOOLKIT: &str = "install the CUDA toolkit that this cuDNN was built for (packages \
    libcublas-13-0 and cuda-nvrtc-13-0, or the wheels nvidia-cublas and nvidia-cuda-nvrtc with \
    LD_LIBRARY_PATH naming their folder)";

/// The first of the files that loads: by its name, then in a folder.
fn find(
    library: &'static str,
    names: &[String],
    folders: Vec<PathBuf>,
    install: &'static str,
) -> Result<Library, CudaError> {
    let files =
        names.iter().map(PathBuf::from).chain(folders.iter().map(|folder| folder.join(&names[0])));
    // SAFETY: loading a library runs its initialisers, as linking to it would.
    let found = files.into_iter().find_map(|file| unsafe { Library::new(file) }.ok());
    found.ok_or_else(|| CudaError::MissingLibrary {
        library,
        names: names.to_vec(),
        folders: folders.iter().map(|folder| folder.display().to_string()).collect(),
        install,
    })
}

/// The version of cuDNN that this process would use, as text: `9.19.0`.
///
/// # Errors
/// The library is missing, older than 9.15.1, or lacks a library that it needs itself.
pub fn version() -> Result<String, CudaError> {
    Api::get().map(|api| dotted(api.version()))
}

/// Whether there is a cuDNN for this process.
pub fn is_available() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| Api::get().is_ok())
}

fn dotted(version: usize) -> String {
    // Before 9.0 the library counted otherwise.
    let [major, minor] = if version < 90_000 { [1000, 10] } else { [10_000, 100] };
    format!("{}.{}.{}", version / major, version / 100 % minor, version % 100)
}

fn check_version(version: usize) -> Result<(), CudaError> {
    if version >= OLDEST {
        return Ok(());
    }
    let [found, oldest] = [version, OLDEST].map(dotted);
    Err(CudaError::Refused(format!("cuDNN {found} is too old, not {oldest} or newer: {INSTALL}")))
}

fn missing(function: &'static str) -> CudaError {
    CudaError::MissingFunction { library: "cuDNN", function, wanted: "9.15.1" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_old_a_library_is_refused_by_number() {
        assert_eq!(check_version(91501), Ok(()));
        assert_eq!(check_version(91900), Ok(()));
        for (version, text) in [(91500, "9.15.0"), (8907, "8.9.7")] {
            let error = check_version(version).unwrap_err().to_string();
            assert!(error.contains(text) && error.contains("9.15.1"), "{error}");
        }
    }

    #[test]
    fn a_machine_without_the_library_is_told_what_was_looked_for() {
        // Where one is installed, whichever, there is nothing to see.
        let Err(error @ CudaError::MissingLibrary { .. }) = version() else { return };
        let text = error.to_string();
        assert!(text.contains(".so.") && text.contains("install"), "{text}");
    }
}
