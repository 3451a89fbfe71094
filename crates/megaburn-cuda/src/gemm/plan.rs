use std::{ffi::c_void, ptr};

use cudarc::cublaslt::{
    result as lt,
    sys::{
        self as lts, cublasComputeType_t as Compute, cublasLtEpilogue_t as Epilogue,
        cublasLtMatmulDescAttributes_t as DescAttribute,
        cublasLtMatrixLayoutAttribute_t as LayoutAttribute, cudaDataType,
    },
};

use super::{
    element::Element,
    fp8_matrix::Fp8Scaling,
    key::Key,
    options::Tuning,
    suggestions::{self, WORKSPACE},
};
use crate::{error::CudaError, queue::RawBuffer, streams::Stream, tensor::MatrixView};

/// An address for descriptors that are not launched yet: each launch sets its own, and cuBLASLt's
/// heuristic only needs one that is not null.
const SOME_ADDRESS: u64 = 256;

/// The factors in `D = alpha A B + beta D`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Factors {
    pub(super) alpha: f32,
    pub(super) beta: f32,
}

/// The buffers of a product.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operands {
    pub(super) a: RawBuffer,
    pub(super) b: RawBuffer,
    pub(super) out: RawBuffer,
    pub(super) bias: Option<RawBuffer>,
    /// Of FP8 matrices: the factors that the elements of `a` and `b` are multiplied with, in f32.
    pub(super) scales: Option<[RawBuffer; 2]>,
}

/// The memory that cuBLASLt may use, and the stream that it launches on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) handle: lts::cublasLtHandle_t,
    pub(super) workspace: u64,
    pub(super) stream: Stream,
}

/// A product that is ready to be launched on any matrices of its shape and alignment.
pub(super) struct Plan {
    pub(super) desc: lts::cublasLtMatmulDesc_t,
    /// The layouts of B, A and D, in cuBLASLt's order.
    pub(super) layouts: [lts::cublasLtMatrixLayout_t; 3],
    pub(super) algorithm: lts::cublasLtMatmulAlgo_t,
    /// Whether the algorithm was chosen by timing.
    pub(super) is_timed: bool,
}

impl Plan {
    /// Creates descriptors for `key`, without an algorithm yet.
    pub(super) fn new(key: &Key) -> Result<Self, CudaError> {
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
            set_desc(
                desc,
                DescAttribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                &SOME_ADDRESS,
            )?;
            let dtype = Element::Float(key.output).data_type();
            set_desc(
                desc,
                DescAttribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE,
                &dtype,
            )?;
        }
        if key.is_fp8() {
            set_scales(desc, [SOME_ADDRESS; 2])?;
            let [of_a, of_b] = key.scaling.map(Fp8Scaling::mode);
            set_desc(
                desc,
                DescAttribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE,
                &of_b,
            )?;
            set_desc(
                desc,
                DescAttribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE,
                &of_a,
            )?;
            let fast = i8::from(key.fast_accum);
            set_desc(desc, DescAttribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast)?;
        }
        let layouts = [
            layout(&key.b, key.of_b)?,
            layout(&key.a, key.of_a)?,
            layout(&key.out, Element::Float(key.output))?,
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

    pub(super) fn candidates(
        &self,
        handle: lts::cublasLtHandle_t,
        aligned: [u32; 4],
        tuning: Tuning,
    ) -> Result<Vec<lts::cublasLtMatmulAlgo_t>, CudaError> {
        suggestions::candidates(handle, self.desc, self.layouts, aligned, tuning)
    }

    /// Launches the product; its result goes to the address `out`, which differs from the operands'
    /// while algorithms are timed.
    pub(super) fn launch(
        &self,
        place: Place,
        factors: Factors,
        operands: Operands,
        out: u64,
    ) -> Result<(), CudaError> {
        let Place {
            handle,
            workspace,
            stream,
        } = place;
        let [a, b] = [operands.a.ptr, operands.b.ptr];
        if let Some(bias) = operands.bias {
            set_desc(
                self.desc,
                DescAttribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                &bias.ptr,
            )?;
        }
        if let Some(scales) = operands.scales {
            set_scales(self.desc, scales.map(|scale| scale.ptr))?;
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
fn layout(view: &MatrixView, element: Element) -> Result<lts::cublasLtMatrixLayout_t, CudaError> {
    let [long, wide] = if view.transposed {
        [view.cols, view.rows]
    } else {
        [view.rows, view.cols]
    };
    let layout = lt::create_matrix_layout(
        element.data_type(),
        wide as u64,
        long as u64,
        view.ld as i64,
    )
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

/// Sets the addresses of the factors of `a` and `b`, which cuBLASLt takes in its own order.
fn set_scales(desc: lts::cublasLtMatmulDesc_t, [a, b]: [u64; 2]) -> Result<(), CudaError> {
    set_desc(
        desc,
        DescAttribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER,
        &b,
    )?;
    set_desc(
        desc,
        DescAttribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER,
        &a,
    )
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
