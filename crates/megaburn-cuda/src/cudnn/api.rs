//! cuDNN's functions, loaded at run time.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    fmt,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use libloading::os::unix::Library;

use super::{
    choice::{CandidateLibrary, LibraryChoice},
    files,
    names::{Handle, Raw},
};
use crate::{
    error::CudaError,
    search::{Machine, Version},
};

/// The result of a call: `cudnnStatus_t`, kept as a number because newer libraries define more
/// values.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Status(c_int);

macro_rules! functions {
    ($($name:ident: $symbol:literal ($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions of cuDNN that megaburn uses.
        #[derive(Debug)]
        pub(super) struct Api {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Api {
            fn resolve(library: &Library) -> Result<Self, CudaError> {
                Ok(Self {
                    // SAFETY: the types match the public header of 9.0 and later.
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
    /// The library of this process; the first call loads it.
    ///
    /// # Errors
    /// The library is missing or too old, or a library is missing without which it would end the
    /// process.
    pub(super) fn get() -> Result<&'static Self, CudaError> {
        Ok(&Loaded::get()?.api)
    }

    /// Loads the libraries that cuDNN opens by name when it searches for an engine. cuDNN ends the
    /// process if cuBLASLt is missing, but it finds libraries that are already loaded.
    fn load_companions(&self) -> Result<(), CudaError> {
        // SAFETY: the call takes no arguments and accesses no memory of ours.
        let major = unsafe { (self.get_cudart_version)() } / 1000;
        let toolkit = format!("cu{major}");
        for (library, name, wheel) in [
            ("cuBLASLt, which cuDNN needs,", "libcublasLt", "cublas"),
            ("NVRTC, which cuDNN needs,", "libnvrtc", "cuda_nvrtc"),
        ] {
            find(library, &format!("{name}.so.{major}"), &[wheel, &toolkit])?;
        }
        Ok(())
    }

    /// The library's version; 91900 means 9.19.0.
    pub(super) fn version(&self) -> usize {
        // SAFETY: the call takes no arguments and accesses no memory of ours.
        unsafe { (self.get_version)() }
    }

    /// Turns a failed call into an error with the library's message.
    pub(super) fn check(&self, call: &'static str, status: Status) -> Result<(), CudaError> {
        if status == Status(0) {
            return Ok(());
        }
        let mut last = [0; 1024];
        // SAFETY: the library writes at most this number of bytes of text, so the buffer keeps a
        // final zero. It accepts any number as a status and returns a string that lives as long as
        // the library.
        let [what, last] = unsafe {
            (self.get_last_error_string)(last.as_mut_ptr(), last.len() - 1);
            [
                CStr::from_ptr((self.get_error_string)(status)),
                CStr::from_ptr(last.as_ptr()),
            ]
        }
        .map(|text| text.to_string_lossy().trim().to_string());
        let why = if last.is_empty() {
            what
        } else {
            format!("{what}: {last}")
        };
        Err(CudaError::Call { call, why })
    }
}

const TOOLKIT: &str = "install the CUDA toolkit that this cuDNN was built for (packages \
    libcublas-13-0 and cuda-nvrtc-13-0, or the wheels nvidia-cublas and nvidia-cuda-nvrtc)";

/// Loads a library by its name or, if the loader does not find it, from one of the searched
/// folders.
fn find(library: &'static str, name: &str, wheels: &[&str]) -> Result<(), CudaError> {
    let machine = Machine::this();
    let files = machine.files(name, wheels);
    let found = std::iter::once(PathBuf::from(name))
        .chain(files)
        .find_map(|file| {
            // SAFETY: loading a library runs its initializers, as linking to it would.
            unsafe { Library::new(file) }.ok()
        });
    let Some(found) = found else {
        let folders = machine.folders(name, wheels);
        return Err(CudaError::MissingLibrary {
            library,
            names: vec![name.into()],
            folders: folders
                .iter()
                .map(|folder| folder.display().to_string())
                .collect(),
            install: TOOLKIT,
        });
    };
    // Leak the handle: the library must stay loaded for the life of the process.
    std::mem::forget(found);
    Ok(())
}

/// The loaded cuDNN of this process.
#[derive(Debug)]
struct Loaded {
    api: Api,
    found: FoundCudnn,
}

/// The cuDNN that a process uses. It is displayed as `9.19.0 (/folder/libcudnn.so.9)`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundCudnn {
    version: Version,
    file: PathBuf,
}

impl FoundCudnn {
    /// The version, e.g. `9.19.0`.
    pub fn version(&self) -> String {
        self.version.to_string()
    }

    /// The file.
    pub fn file(&self) -> &Path {
        &self.file
    }
}

impl fmt::Display for FoundCudnn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.version, self.file.display())
    }
}

impl Loaded {
    fn get() -> Result<&'static Self, CudaError> {
        static LOADED: OnceLock<Result<Loaded, CudaError>> = OnceLock::new();
        LOADED
            .get_or_init(Self::load)
            .as_ref()
            .map_err(Clone::clone)
    }

    fn load() -> Result<Self, CudaError> {
        let choice = LibraryChoice::on(&Machine::this(), files::loaded()?.as_deref())?;
        let seen = choice
            .seen
            .iter()
            .map(|seen| seen.file.display().to_string());
        tracing::info!(
            "cuDNN installations on this machine: {}",
            seen.collect::<Vec<_>>().join(", ")
        );
        let mut failed = None;
        for best in &choice.best {
            let library = match files::load(&best.file) {
                Ok(library) => library,
                // Another library may only be loaded if nothing of this one was loaded.
                Err(error) if files::loaded()?.is_none() => {
                    tracing::warn!("{error}");
                    failed = failed.or(Some(error));
                    continue;
                }
                Err(error) => return Err(error),
            };
            let api = Api::resolve(&library)?;
            // Leak the handle: the library and the parts that it loads must stay loaded.
            std::mem::forget(library);
            let found = FoundCudnn {
                version: counted(api.version()),
                file: best.file.clone(),
            };
            choice.check(&CandidateLibrary {
                file: found.file.clone(),
                version: Some(found.version),
            })?;
            api.load_companions()?;
            return Ok(Self { api, found });
        }
        Err(failed.unwrap_or_else(|| CudaError::Refused("no cuDNN was found".into())))
    }
}

/// Returns the cuDNN of this process; the first call loads it.
///
/// # Errors
/// The library is missing or older than 9.15.1, or lacks a library that it needs itself.
pub fn found() -> Result<FoundCudnn, CudaError> {
    Loaded::get().map(|loaded| loaded.found.clone())
}

/// The cuDNNs on this machine that this process does not use, such as those in Python's wheels next
/// to one of the system, or the other way around.
pub fn others() -> Vec<String> {
    let used = found().ok().map(|found| found.file);
    let choice = LibraryChoice::on(&Machine::this(), None);
    let seen = choice.map(|choice| choice.seen).unwrap_or_default();
    let is_other = |seen: &&CandidateLibrary| Some(&seen.file) != used.as_ref();
    seen.iter()
        .filter(is_other)
        .map(CandidateLibrary::describe)
        .collect()
}

/// Whether this process can use cuDNN.
pub fn is_available() -> bool {
    Loaded::get().is_ok()
}

/// Splits the number of `cudnnGetVersion` into three.
fn counted(version: usize) -> Version {
    // Before 9.0 the number was encoded differently.
    let [major, minor] = if version < 90_000 {
        [1000, 10]
    } else {
        [10_000, 100]
    };
    let numbers = [version / major, version / 100 % minor, version % 100];
    Version(numbers.map(|number| u32::try_from(number).unwrap_or(u32::MAX)))
}

fn missing(function: &'static str) -> CudaError {
    CudaError::MissingFunction {
        library: "cuDNN",
        function,
        wanted: "9.15.1",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_of_counting_are_read() {
        for (number, text) in [(91501, "9.15.1"), (91900, "9.19.0"), (8907, "8.9.7")] {
            assert_eq!(counted(number).to_string(), text);
        }
    }

    #[test]
    fn a_machine_without_the_library_is_told_what_was_looked_for() {
        // On a machine with a cuDNN of any version there is nothing to test.
        let Err(error @ CudaError::MissingLibrary { .. }) = found() else {
            return;
        };
        let text = error.to_string();
        assert!(text.contains(".so.") && text.contains("install"), "{text}");
    }

    #[test]
    #[ignore = "tools/cuda-emulator/choose-cudnn starts it, where two cuDNNs are installed"]
    fn all_parts_are_those_of_the_chosen_one() {
        let expected = std::env::var("EXPECTED_CUDNN").unwrap();
        let found = match found() {
            Ok(found) => found.to_string(),
            Err(error) => format!("error: {error}"),
        };
        assert!(found.contains(&expected), "{found}");
        // At least the main library, the graph library, and the engines and heuristics.
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let files: std::collections::BTreeSet<&str> = maps
            .lines()
            .filter(|line| line.contains("libcudnn"))
            .map(|line| &line[line.find('/').unwrap()..])
            .collect();
        assert!(files.len() >= 8, "{files:?}");
        assert_eq!(files::loaded().unwrap().into_iter().count(), 1);
    }
}
