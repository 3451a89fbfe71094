//! Queries cuBLASLt for algorithms.

use std::{ffi::c_void, ptr};

use cudarc::cublaslt::{
    result as lt,
    sys::{self as lts, cublasLtMatmulPreferenceAttributes_t as PrefAttribute},
};

use super::options::Tuning;
use crate::error::CudaError;

/// Size of cuBLASLt's workspace in bytes. Its documentation recommends at least 32 MiB on Hopper.
pub(super) const WORKSPACE: usize = 64 << 20;

/// The algorithms that cuBLASLt suggests, best first; there is at least one.
pub(super) fn candidates(
    handle: lts::cublasLtHandle_t,
    desc: lts::cublasLtMatmulDesc_t,
    [b, a, out]: [lts::cublasLtMatrixLayout_t; 3],
    aligned: [u32; 4],
    tuning: Tuning,
) -> Result<Vec<lts::cublasLtMatmulAlgo_t>, CudaError> {
    let preference =
        lt::create_matmul_pref().map_err(CudaError::cublas("cublasLtMatmulPreferenceCreate"))?;
    let set = |attribute, value: *const c_void, size| {
        // SAFETY: `value` points to `size` bytes of the type that the attribute has.
        unsafe { lt::set_matmul_pref_attribute(preference, attribute, value, size) }
            .map_err(CudaError::cublas("cublasLtMatmulPreferenceSetAttribute"))
    };
    let workspace = WORKSPACE;
    let bytes = PrefAttribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
    set(bytes, ptr::from_ref(&workspace).cast(), 8)?;
    let [of_a, of_b, of_out, _] = &aligned;
    for (attribute, bytes) in [
        (
            PrefAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            of_b,
        ),
        (
            PrefAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            of_a,
        ),
        (
            PrefAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            of_out,
        ),
        (
            PrefAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
            of_out,
        ),
    ] {
        set(attribute, ptr::from_ref(bytes).cast(), 4)?;
    }
    let most = tuning.suggestions.max(1);
    // SAFETY: the value consists of numbers and a status, for which zero is valid.
    let nothing: lts::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
    let mut found = vec![nothing; most];
    let mut count = 0;
    // SAFETY: `found` has space for the requested number of results; all handles are live.
    let status = unsafe {
        lts::cublasLtMatmulAlgoGetHeuristic(
            handle,
            desc,
            b,
            a,
            out,
            out,
            preference,
            i32::try_from(most).unwrap_or(i32::MAX),
            found.as_mut_ptr(),
            &mut count,
        )
    };
    // SAFETY: this function owns the preference.
    let _ = unsafe { lt::destroy_matmul_pref(preference) };
    status
        .result()
        .map_err(CudaError::cublas("cublasLtMatmulAlgoGetHeuristic"))?;
    let found = found.into_iter().take(usize::try_from(count).unwrap_or(0));
    let usable = found.filter(|found| found.state.result().is_ok());
    let usable: Vec<_> = usable.map(|found| found.algo).collect();
    if usable.is_empty() {
        return Err(CudaError::Refused(
            "cuBLASLt has no algorithm for it".into(),
        ));
    }
    Ok(usable)
}

/// Whether an algorithm that was suggested for another product can compute this one.
pub(super) fn can_run(
    handle: lts::cublasLtHandle_t,
    desc: lts::cublasLtMatmulDesc_t,
    [b, a, out]: [lts::cublasLtMatrixLayout_t; 3],
    algorithm: &lts::cublasLtMatmulAlgo_t,
) -> bool {
    // SAFETY: the value consists of numbers and a status, for which zero is valid.
    let mut found: lts::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
    // SAFETY: all handles are live, and both pointers refer to values of the right types.
    let status = unsafe {
        lts::cublasLtMatmulAlgoCheck(handle, desc, b, a, out, out, algorithm, &mut found)
    };
    status.result().is_ok() && found.workspaceSize <= WORKSPACE
}
