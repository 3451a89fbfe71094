//! NCCL's functions, loaded at run time.
//!
//! cudarc's own loader never tries `libnccl.so.2`, the only name under which distributions and
//! Python wheels install the library, so this module loads it.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    path::PathBuf,
    sync::OnceLock,
};

use cudarc::nccl::sys::{ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId};
use libloading::Library;

use super::config::Config;
use crate::{error::CudaError, search::Machine};

/// 2.22.3 in the encoding of `ncclGetVersion`. In older versions, an abort inside a group does not
/// set its flag at once and free memory at the end of the group (`handles`).
pub(super) const OLDEST: c_int = 2_22_03;
const NAME: &str = "libnccl.so.2";
const INSTALL: &str = "install NCCL 2.22.3 or newer (package libnccl2, or the wheel \
                      nvidia-nccl-cu13), or set MEGABURN_NCCL to its file";

/// The environment variable that names the file of the NCCL to load. If it is set, no other NCCL is
/// considered.
const VARIABLE: &str = "MEGABURN_NCCL";

/// The result of a call: `ncclResult_t`, kept as a number because newer libraries define more
/// values.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Code(c_int);

impl Code {
    pub(super) const SUCCESS: Self = Self(0);
    pub(super) const IN_PROGRESS: Self = Self(7);

    /// Whether there was no error so far.
    pub(super) fn is_fine(self) -> bool {
        self == Self::SUCCESS || self == Self::IN_PROGRESS
    }

    /// This code if it is a failure; otherwise the result of `next`.
    pub(super) fn and(self, next: impl FnOnce() -> Self) -> Self {
        if self.is_fine() { next() } else { self }
    }
}

macro_rules! functions {
    ($($name:ident: $symbol:literal ($($argument:ty),*) -> $result:ty;)*) => {
        /// The functions of NCCL that megaburn uses. Each must be called with the context of the
        /// communicator's GPU current.
        #[derive(Debug)]
        pub(super) struct Api {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Api {
            fn resolve(library: &Library) -> Result<Self, CudaError> {
                Ok(Self {
                    // SAFETY: the types match the public header of 2.22 and later.
                    $($name: *unsafe { library.get($symbol) }.map_err(|_| missing($symbol))?,)*
                })
            }
        }
    };
}

functions! {
    get_version: "ncclGetVersion" (*mut c_int) -> Code;
    get_unique_id: "ncclGetUniqueId" (*mut ncclUniqueId) -> Code;
    get_error_string: "ncclGetErrorString" (Code) -> *const c_char;
    get_last_error: "ncclGetLastError" (ncclComm_t) -> *const c_char;
    comm_init_rank_config: "ncclCommInitRankConfig"
        (*mut ncclComm_t, c_int, ncclUniqueId, c_int, *mut Config) -> Code;
    comm_split: "ncclCommSplit"
        (ncclComm_t, c_int, c_int, *mut ncclComm_t, *mut Config) -> Code;
    comm_get_async_error: "ncclCommGetAsyncError" (ncclComm_t, *mut Code) -> Code;
    comm_abort: "ncclCommAbort" (ncclComm_t) -> Code;
    comm_finalize: "ncclCommFinalize" (ncclComm_t) -> Code;
    comm_destroy: "ncclCommDestroy" (ncclComm_t) -> Code;
    group_start: "ncclGroupStart" () -> Code;
    group_end: "ncclGroupEnd" () -> Code;
    all_reduce: "ncclAllReduce"
        (*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, *mut c_void) -> Code;
    all_gather: "ncclAllGather"
        (*const c_void, *mut c_void, usize, ncclDataType_t, ncclComm_t, *mut c_void) -> Code;
    reduce_scatter: "ncclReduceScatter"
        (*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, *mut c_void) -> Code;
    broadcast: "ncclBroadcast"
        (*const c_void, *mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, *mut c_void) -> Code;
    send: "ncclSend" (*const c_void, usize, ncclDataType_t, c_int, ncclComm_t, *mut c_void) -> Code;
    recv: "ncclRecv" (*mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, *mut c_void) -> Code;
}

impl Api {
    /// The library of this process; the first call loads it.
    ///
    /// # Errors
    /// The library is missing or too old.
    pub(super) fn get() -> Result<&'static Self, CudaError> {
        static API: OnceLock<Result<Api, CudaError>> = OnceLock::new();
        API.get_or_init(Self::load).as_ref().map_err(Clone::clone)
    }

    /// Loads the first NCCL that is new enough. The loader's own NCCL is tried first, because
    /// network plugins belong to it; then those of the toolkit and of Python's wheels.
    fn load() -> Result<Self, CudaError> {
        let machine = Machine::this();
        let named = machine.variable(VARIABLE).map(PathBuf::from);
        let files = match &named {
            Some(file) => vec![file.clone()],
            None => [NAME, "libnccl.so"]
                .map(PathBuf::from)
                .into_iter()
                .chain(machine.files(NAME, &["nccl"]))
                .collect(),
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
                    // Leak the handle: NCCL's threads may outlive any owner.
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
                library: "NCCL",
                names: vec![NAME.into()],
                folders: machine
                    .folders(NAME, &["nccl"])
                    .iter()
                    .map(|folder| folder.display().to_string())
                    .collect(),
                install: INSTALL,
            },
        }))
    }

    /// The library's version; 22703 means 2.27.3.
    fn version(&self) -> Result<c_int, CudaError> {
        let mut version = 0;
        // SAFETY: the library writes the number through the pointer.
        let code = unsafe { (self.get_version)(&mut version) };
        if code == Code::SUCCESS {
            Ok(version)
        } else {
            Err(self.error("ncclGetVersion", code, None))
        }
    }

    /// Wraps a failed call with the library's message.
    pub(super) fn error(
        &self,
        call: &'static str,
        code: Code,
        comm: Option<ncclComm_t>,
    ) -> CudaError {
        // SAFETY: both functions return strings that live as long as the library. NCCL accepts a
        // null communicator for failures that precede its creation.
        let [what, last] = unsafe {
            [
                (self.get_error_string)(code),
                (self.get_last_error)(comm.unwrap_or(std::ptr::null_mut())),
            ]
        }
        .map(|text| {
            if text.is_null() {
                return String::new();
            }
            // SAFETY: the library's strings end with a zero.
            unsafe { CStr::from_ptr(text) }
                .to_string_lossy()
                .trim()
                .to_string()
        });
        let why = if last.is_empty() {
            what
        } else {
            format!("{what}: {last}")
        };
        CudaError::Call { call, why }
    }
}

/// The version of NCCL that this process uses, e.g. `2.27.3`.
///
/// # Errors
/// The library is missing or older than 2.22.3.
pub fn version() -> Result<String, CudaError> {
    Api::get()?.version().map(dotted)
}

fn dotted(version: c_int) -> String {
    // Before 2.9 the number was encoded differently; such versions are too old under either
    // encoding.
    format!(
        "{}.{}.{}",
        version / 10_000,
        version / 100 % 100,
        version % 100
    )
}

fn check_version(version: c_int) -> Result<(), CudaError> {
    if version >= OLDEST {
        return Ok(());
    }
    let [found, oldest] = [version, OLDEST].map(dotted);
    Err(CudaError::Refused(format!(
        "NCCL {found} (ncclGetVersion says {version}) is too old: {oldest} or newer is needed to \
         abort calls safely; {INSTALL}"
    )))
}

fn missing(function: &'static str) -> CudaError {
    CudaError::MissingFunction {
        library: "NCCL",
        function,
        wanted: "2.22.3",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_old_a_library_is_refused_by_number() {
        assert_eq!(check_version(22203), Ok(()));
        assert_eq!(check_version(22703), Ok(()));
        for (version, text) in [(22105, "2.21.5"), (2708, "0.27.8")] {
            let error = check_version(version).unwrap_err().to_string();
            assert!(error.contains(text) && error.contains("2.22.3"), "{error}");
            assert!(error.contains(&version.to_string()), "{error}");
        }
    }

    #[test]
    fn a_machine_without_the_library_is_told_what_was_looked_for() {
        // On a machine with NCCL there is nothing to test.
        let Err(error) = version() else { return };
        let text = error.to_string();
        assert!(
            text.contains("libnccl.so.2") && text.contains("install"),
            "{text}"
        );
    }

    #[test]
    fn a_failure_ends_a_chain_and_progress_does_not() {
        let failure = Code(5);
        assert_eq!(Code::IN_PROGRESS.and(|| Code::SUCCESS), Code::SUCCESS);
        assert_eq!(Code::SUCCESS.and(|| Code::IN_PROGRESS), Code::IN_PROGRESS);
        assert_eq!(failure.and(|| panic!("not called")), failure);
    }
}
