//! CUPTI's functions, loaded at run time.
//!
//! cudarc has them too, but its loader does not look into `extras/CUPTI` of the toolkit or into
//! Python's wheels, and panics where a function is missing.

use std::{
    ffi::{CStr, c_char, c_void},
    path::PathBuf,
    sync::OnceLock,
};

use libloading::Library;

use crate::{error::CudaError, search::Machine};

/// The names of the library, newest first.
const NAMES: [&str; 3] = ["libcupti.so.13", "libcupti.so.12", "libcupti.so"];
/// The wheels that contain it.
const WHEELS: [&str; 2] = ["cu13", "cuda_cupti"];
const INSTALL: &str = "install CUPTI of CUDA 12 or 13 (package cuda-cupti-13-0, or the wheel \
                      nvidia-cuda-cupti), or set MEGABURN_CUPTI to its file";
/// The environment variable that names the file of the CUPTI to load.
const VARIABLE: &str = "MEGABURN_CUPTI";

/// The result of a call: `CUptiResult`, kept as a number because newer libraries define more
/// values.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Code(u32);

impl Code {
    pub(super) const SUCCESS: Self = Self(0);
}

/// Called for an empty buffer: its address, its length, and the most records in it (0: no limit).
pub(super) type Requested = unsafe extern "C" fn(*mut *mut u8, *mut usize, *mut usize);
/// Called with a buffer: the context, a stream, its address, its length and how much is valid.
pub(super) type Completed = unsafe extern "C" fn(*mut c_void, u32, *mut u8, usize, usize);
/// Called for the time in nanoseconds.
pub(super) type Timestamp = unsafe extern "C" fn() -> u64;

macro_rules! functions {
    ($($name:ident: $symbol:literal ($($argument:ty),*);)*) => {
        /// The functions of CUPTI that megaburn uses.
        #[derive(Debug)]
        pub(super) struct Api {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> Code,)*
        }

        impl Api {
            fn resolve(library: &Library) -> Result<Self, CudaError> {
                Ok(Self {
                    // SAFETY: the types match the public headers of CUDA 12.0 to 13.4.
                    $($name: *unsafe { library.get($symbol) }.map_err(|_| missing($symbol))?,)*
                })
            }
        }
    };
}

functions! {
    get_version: "cuptiGetVersion" (*mut u32);
    get_result_string: "cuptiGetResultString" (Code, *mut *const c_char);
    register_callbacks: "cuptiActivityRegisterCallbacks" (Requested, Completed);
    register_timestamp: "cuptiActivityRegisterTimestampCallback" (Timestamp);
    get_timestamp: "cuptiGetTimestamp" (*mut u64);
    enable: "cuptiActivityEnable" (u32);
    disable: "cuptiActivityDisable" (u32);
    flush_all: "cuptiActivityFlushAll" (u32);
    next_record: "cuptiActivityGetNextRecord" (*mut u8, usize, *mut *mut u8);
    num_dropped: "cuptiActivityGetNumDroppedRecords" (*mut c_void, u32, *mut usize);
}

impl Api {
    /// The library of this process; the first call loads it.
    ///
    /// # Errors
    /// The library is missing, or its records are not known.
    pub(super) fn get() -> Result<&'static Self, CudaError> {
        static API: OnceLock<Result<Api, CudaError>> = OnceLock::new();
        API.get_or_init(Self::load).as_ref().map_err(Clone::clone)
    }

    fn load() -> Result<Self, CudaError> {
        let machine = Machine::this();
        let named = machine.variable(VARIABLE).map(PathBuf::from);
        let files = match &named {
            Some(file) => vec![file.clone()],
            None => {
                let places = NAMES.iter().flat_map(|name| {
                    let toolkit = machine.files_in_toolkits("extras/CUPTI/lib64", name);
                    machine.files(name, &WHEELS).into_iter().chain(toolkit)
                });
                let loaders_own = NAMES.iter().map(PathBuf::from);
                loaders_own.chain(places).collect()
            }
        };
        let mut refused = None;
        for file in files {
            // SAFETY: loading the library runs its initializers, as linking to it would.
            let Ok(library) = (unsafe { Library::new(&file) }) else {
                continue;
            };
            let api = Self::resolve(&library);
            match api.and_then(|api| check_version(api.version()?).map(|()| api)) {
                Ok(api) => {
                    // Leak the handle: CUPTI's threads live as long as the process.
                    std::mem::forget(library);
                    return Ok(api);
                }
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        Err(refused.unwrap_or_else(|| match named {
            Some(file) => {
                CudaError::Refused(format!("{VARIABLE} is {file:?}, which cannot be loaded"))
            }
            None => CudaError::MissingLibrary {
                library: "CUPTI, which records kernels,",
                names: NAMES.map(String::from).to_vec(),
                folders: machine
                    .folders(NAMES[0], &WHEELS)
                    .iter()
                    .map(|folder| folder.display().to_string())
                    .collect(),
                install: INSTALL,
            },
        }))
    }

    fn version(&self) -> Result<u32, CudaError> {
        let mut version = 0;
        // SAFETY: the library writes the number through the pointer.
        self.check("cuptiGetVersion", unsafe {
            (self.get_version)(&mut version)
        })?;
        Ok(version)
    }

    /// The error of a call that failed, with the library's words.
    pub(super) fn check(&self, call: &'static str, code: Code) -> Result<(), CudaError> {
        if code == Code::SUCCESS {
            return Ok(());
        }
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: the library writes the address of a string that lives as long as itself.
        let found = unsafe { (self.get_result_string)(code, &mut text) };
        let why = if found == Code::SUCCESS && !text.is_null() {
            // SAFETY: the library's strings end with a zero.
            unsafe { CStr::from_ptr(text) }
                .to_string_lossy()
                .into_owned()
        } else {
            format!("result {}", code.0)
        };
        Err(CudaError::Call { call, why })
    }
}

/// Refuses a library whose records may differ from those that `records.rs` reads. CUDA 12 numbers
/// its versions from 18 on, CUDA 13 from 130000 on.
fn check_version(version: u32) -> Result<(), CudaError> {
    if (18..100).contains(&version) || (130_000..140_000).contains(&version) {
        return Ok(());
    }
    Err(CudaError::Refused(format!(
        "CUPTI of version {version} may have other records than those of CUDA 12 and 13, which are \
        known: {INSTALL}"
    )))
}

fn missing(function: &'static str) -> CudaError {
    CudaError::MissingFunction {
        library: "CUPTI",
        function,
        wanted: "that of CUDA 12.0",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_of_unknown_records_are_refused_by_number() {
        for version in [18, 28, 130_001, 130_401] {
            assert_eq!(check_version(version), Ok(()));
        }
        for version in [14, 17, 100, 140_000] {
            let error = check_version(version).unwrap_err().to_string();
            assert!(error.contains(&version.to_string()), "{error}");
        }
    }

    #[test]
    fn a_machine_without_the_library_is_named_what_was_looked_for() {
        // On a machine with CUPTI there is nothing to test.
        let Err(error) = Api::get() else { return };
        let text = error.to_string();
        let words = ["libcupti.so.13", "MEGABURN_CUPTI"];
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
    }
}
