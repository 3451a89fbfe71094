use std::{
    cell::RefCell,
    collections::{HashMap, hash_map::Entry},
    ffi::c_void,
    ptr,
};

use burn::tensor::DType;
use cudarc::{
    cublaslt::{
        result as lt,
        sys::{
            self as lts, cublasComputeType_t as Compute, cublasLtEpilogue_t as Epilogue,
            cublasLtMatmulDescAttributes_t as DescAttribute,
            cublasLtMatrixLayoutAttribute_t as LayoutAttribute, cudaDataType,
        },
    },
    driver::sys as cu,
};

use super::{
    Factors,
    key::Key,
    options::Tuning,
    suggestions::{self, WORKSPACE},
    tune,
    tuned::Tuned,
};
use crate::{error::CudaError, queue::RawBuffer, streams::Stream, tensor::MatrixView};

/// The maximum number of cached plans.
const MOST_PLANS: usize = 4096;

/// cuBLASLt on one device thread: its handle, the workspace of CubeCL's stream, and plans and
/// algorithms for the shapes used so far. It lives as long as the device thread, i.e. as the
/// process.
struct Library {
    handle: lts::cublasLtHandle_t,
    workspace: u64,
    /// Plans by product, alignment, and whether the algorithm may be tuned.
    plans: HashMap<(Key, [u32; 4], bool), Plan>,
    /// The fastest algorithms of tuned products.
    tuned: Tuned<lts::cublasLtMatmulAlgo_t>,
    /// cuBLASLt's suggestions for products that are not tuned, by their [rounded](Key::round)
    /// sizes.
    suggested: HashMap<(Key, [u32; 4]), lts::cublasLtMatmulAlgo_t>,
}

/// A product that is ready to be launched on any matrices of its shape and alignment.
pub(super) struct Plan {
    desc: lts::cublasLtMatmulDesc_t,
    /// The layouts of B, A and D, in cuBLASLt's order.
    layouts: [lts::cublasLtMatrixLayout_t; 3],
    algorithm: lts::cublasLtMatmulAlgo_t,
    /// Whether the algorithm was chosen by timing.
    is_timed: bool,
}

thread_local! {
    static LIBRARY: RefCell<Option<Library>> = const { RefCell::new(None) };
}

/// Enqueues the product on `stream`. The matrices are in the order A, B, D.
pub(super) fn run(
    key: &Key,
    stream: Stream,
    [a, b, out]: [RawBuffer; 3],
    bias: Option<RawBuffer>,
    factors: Factors,
    (tune, tuning): (bool, Tuning),
) -> Result<(), CudaError> {
    check_bounds(key, [a, b, out])?;
    let bias = bias.map_or(0, |bias| bias.ptr);
    LIBRARY.with_borrow_mut(|library| {
        let library = match library {
            Some(library) => library,
            None => library.insert(Library::load()?),
        };
        let handle = library.handle;
        let workspace = library.workspace;
        let launch = |plan: &Plan, out: u64| {
            plan.launch(
                handle,
                workspace,
                stream,
                factors,
                [a.ptr, b.ptr, out, bias],
            )
        };
        let aligned = [a.ptr, b.ptr, out.ptr, bias].map(alignment);
        if let Some(plan) = library.plans.get(&(*key, aligned, tune)) {
            return launch(plan, out.ptr);
        }
        if library.plans.len() >= MOST_PLANS {
            // Evict untimed plans: they belong to products whose sizes keep changing, e.g. with the
            // rows of experts or with distributed documents.
            library.plans.retain(|_, plan| plan.is_timed);
        }
        let mut plan = Plan::new(key)?;
        let can_run = |algorithm: &lts::cublasLtMatmulAlgo_t| {
            suggestions::can_run(handle, plan.desc, plan.layouts, algorithm)
        };
        let best = if !tune {
            library.suggestion(key, &plan, aligned, tuning)?
        } else if let Some(known) = library.tuned.near(key, aligned).filter(can_run) {
            known
        } else {
            let candidates = plan.candidates(handle, aligned, tuning)?;
            let found = tune::fastest(stream, &candidates, out.bytes, tuning, |algorithm, out| {
                plan.algorithm = algorithm;
                launch(&plan, out)
            });
            if let Some(found) = found {
                library.tuned.put(key, aligned, found);
                plan.is_timed = true;
            }
            found.unwrap_or(candidates[0])
        };
        plan.algorithm = best;
        launch(
            library.plans.entry((*key, aligned, tune)).or_insert(plan),
            out.ptr,
        )
    })
}

/// The largest power of two up to 256 that divides an address; algorithms may rely on it.
fn alignment(ptr: u64) -> u32 {
    1 << ptr.trailing_zeros().min(8)
}

/// Refuses matrices that exceed their buffers; cuBLASLt does not check this.
fn check_bounds(key: &Key, buffers: [RawBuffer; 3]) -> Result<(), CudaError> {
    let sizes = [key.input.size(), key.input.size(), key.output.size()];
    for ((view, buffer), size) in [key.a, key.b, key.out].iter().zip(buffers).zip(sizes) {
        let [long, wide] = if view.transposed {
            [view.cols, view.rows]
        } else {
            [view.rows, view.cols]
        };
        let last = (view.batch - 1) * view.batch_stride + (long - 1) * view.ld + wide;
        if (last * size) as u64 > buffer.bytes {
            let bytes = buffer.bytes;
            return Err(CudaError::Refused(format!(
                "{view:?} reaches past its buffer of {bytes} bytes"
            )));
        }
    }
    Ok(())
}

impl Library {
    fn load() -> Result<Self, CudaError> {
        let mut workspace = 0;
        // SAFETY: the driver writes the new address through the pointer; the context is current.
        unsafe { cu::cuMemAlloc_v2(&mut workspace, WORKSPACE) }
            .result()
            .map_err(CudaError::driver(
                "cuMemAlloc of cuBLASLt's workspace of 64 MiB",
            ))?;
        let handle = lt::create_handle().map_err(CudaError::cublas("cublasLtCreate"))?;
        let (plans, tuned, suggested) = Default::default();
        Ok(Self {
            handle,
            workspace,
            plans,
            tuned,
            suggested,
        })
    }

    /// The algorithm of a product that is not tuned. Asking cuBLASLt takes longer than many a
    /// product, so products with about equal row counts share one answer; the rows of experts
    /// differ in each pass.
    fn suggestion(
        &mut self,
        key: &Key,
        plan: &Plan,
        aligned: [u32; 4],
        tuning: Tuning,
    ) -> Result<lts::cublasLtMatmulAlgo_t, CudaError> {
        let round = key.round();
        let handle = self.handle;
        let algorithm = match self.suggested.entry((round, aligned)) {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(new) => {
                *new.insert(Plan::new(&round)?.candidates(handle, aligned, tuning)?[0])
            }
        };
        if round == *key || suggestions::can_run(handle, plan.desc, plan.layouts, &algorithm) {
            Ok(algorithm)
        } else {
            Ok(plan.candidates(handle, aligned, tuning)?[0])
        }
    }
}

fn data_type(dtype: DType) -> cudaDataType {
    match dtype {
        DType::BF16 => cudaDataType::CUDA_R_16BF,
        DType::F16 => cudaDataType::CUDA_R_16F,
        _ => cudaDataType::CUDA_R_32F,
    }
}

impl Plan {
    /// Creates descriptors for `key`, without an algorithm yet.
    fn new(key: &Key) -> Result<Self, CudaError> {
        let compute = if key.tf32 {
            Compute::CUBLAS_COMPUTE_32F_FAST_TF32
        } else {
            Compute::CUBLAS_COMPUTE_32F
        };
        let desc = lt::create_matmul_desc(compute, cudaDataType::CUDA_R_32F)
            .map_err(CudaError::cublas("cublasLtMatmulDescCreate"))?;
        // A matrix that is transposed in row-major terms is not transposed in column-major terms,
        // and vice versa. Requesting the transposed product cancels this, so the flags can be
        // passed unchanged.
        set_desc(
            desc,
            DescAttribute::CUBLASLT_MATMUL_DESC_TRANSA,
            &transpose(&key.b),
        )?;
        set_desc(
            desc,
            DescAttribute::CUBLASLT_MATMUL_DESC_TRANSB,
            &transpose(&key.a),
        )?;
        if key.bias {
            let epilogue = Epilogue::CUBLASLT_EPILOGUE_BIAS;
            set_desc(
                desc,
                DescAttribute::CUBLASLT_MATMUL_DESC_EPILOGUE,
                &epilogue,
            )?;
            // Each launch sets its own bias pointer; the heuristic only needs a non-null one.
            let some = 256u64;
            set_desc(
                desc,
                DescAttribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                &some,
            )?;
            let dtype = data_type(key.output);
            set_desc(
                desc,
                DescAttribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE,
                &dtype,
            )?;
        }
        let layouts = [
            layout(&key.b, key.input)?,
            layout(&key.a, key.input)?,
            layout(&key.out, key.output)?,
        ];
        // SAFETY: an algorithm consists of plain numbers, for which zero is valid; it is set before
        // the plan is launched.
        let algorithm = unsafe { std::mem::zeroed() };
        Ok(Self {
            desc,
            layouts,
            algorithm,
            is_timed: false,
        })
    }

    fn candidates(
        &self,
        handle: lts::cublasLtHandle_t,
        aligned: [u32; 4],
        tuning: Tuning,
    ) -> Result<Vec<lts::cublasLtMatmulAlgo_t>, CudaError> {
        suggestions::candidates(handle, self.desc, self.layouts, aligned, tuning)
    }

    fn launch(
        &self,
        handle: lts::cublasLtHandle_t,
        workspace: u64,
        stream: Stream,
        factors: Factors,
        [a, b, out, bias]: [u64; 4],
    ) -> Result<(), CudaError> {
        if bias != 0 {
            set_desc(
                self.desc,
                DescAttribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                &bias,
            )?;
        }
        let Factors { alpha, beta } = factors;
        let [of_b, of_a, of_out] = self.layouts;
        // SAFETY: descriptors and algorithm belong together; `check_bounds` and `alignment` have
        // checked the addresses; alpha and beta are f32 on the host, as the scale type requires.
        unsafe {
            lt::matmul(
                handle,
                self.desc,
                ptr::from_ref(&alpha).cast(),
                ptr::from_ref(&beta).cast(),
                b as *const c_void,
                of_b,
                a as *const c_void,
                of_a,
                out as *const c_void,
                of_out,
                out as *mut c_void,
                of_out,
                &self.algorithm,
                workspace as *mut c_void,
                WORKSPACE,
                stream.0.cast(),
            )
        }
        .map_err(CudaError::cublas("cublasLtMatmul"))
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: this plan owns the handles, and they are not used afterwards.
        unsafe {
            let _ = lt::destroy_matmul_desc(self.desc);
            for layout in self.layouts {
                let _ = lt::destroy_matrix_layout(layout);
            }
        }
    }
}

/// `CUBLAS_OP_N` or `CUBLAS_OP_T`, which cudarc's bindings of cuBLASLt do not define.
fn transpose(view: &MatrixView) -> i32 {
    i32::from(view.transposed)
}

/// The column-major layout of a view's memory.
fn layout(view: &MatrixView, dtype: DType) -> Result<lts::cublasLtMatrixLayout_t, CudaError> {
    let [long, wide] = if view.transposed {
        [view.cols, view.rows]
    } else {
        [view.rows, view.cols]
    };
    let layout =
        lt::create_matrix_layout(data_type(dtype), wide as u64, long as u64, view.ld as i64)
            .map_err(CudaError::cublas("cublasLtMatrixLayoutCreate"))?;
    if view.batch > 1 {
        let count = view.batch as i32;
        let stride = view.batch_stride as i64;
        let set = |attribute, value: *const c_void, size| {
            // SAFETY: `value` points to `size` bytes of the type that the attribute has.
            unsafe { lt::set_matrix_layout_attribute(layout, attribute, value, size) }
                .map_err(CudaError::cublas("cublasLtMatrixLayoutSetAttribute"))
        };
        set(
            LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
            ptr::from_ref(&count).cast(),
            4,
        )?;
        let offset = LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
        set(offset, ptr::from_ref(&stride).cast(), 8)?;
    }
    Ok(layout)
}

fn set_desc<T>(
    desc: lts::cublasLtMatmulDesc_t,
    attribute: DescAttribute,
    value: &T,
) -> Result<(), CudaError> {
    let size = size_of::<T>();
    // SAFETY: `value` is of the type that the attribute has.
    unsafe { lt::set_matmul_desc_attribute(desc, attribute, ptr::from_ref(value).cast(), size) }
        .map_err(CudaError::cublas("cublasLtMatmulDescSetAttribute"))
}
