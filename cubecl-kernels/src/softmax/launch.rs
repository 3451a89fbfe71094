//! Launches the softmax kernels.

use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::ops::BoolTensorOps;
use burn::backend::tensor::{BoolTensor, FloatTensor};
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use megaburn_cuda::tensor;

use super::kernels::{
    MAX_PLANES, PLANE, ROWS, ScoresLaunch, SoftmaxPlan, VECS_PER_THREAD, gradient_kernel,
    softmax_kernel,
};
use crate::kernel_parts::address_type;

/// `softmax(scores * scale)` over the keys where `mask`, `[b or 1, h or 1, s_q, s_k]`, is false; if
/// `causal`, over the first `i + 1` keys of query `i`.
pub(super) fn softmax(
    scores: FloatTensor<Cube>,
    mask: Option<BoolTensor<Cube>>,
    scale: f64,
    causal: bool,
) -> FloatTensor<Cube> {
    let shape = scores.shape();
    let mask = mask.map(|mask| {
        let [b, h, _, _] = mask.shape().dims();
        let mask = Cube::bool_expand(mask, Shape::from([b, h, shape[2], shape[3]]));
        tensor::contiguous(tensor::from_backend(mask))
    });
    let scores = tensor::contiguous(tensor::from_backend(scores));
    let grid = Grid::of(&scores, causal, mask.is_some());
    let of_mask = mask.as_ref().map_or([0; 2], |mask| {
        let [b, h, _, _] = mask.shape().dims();
        let head = grid.queries * grid.vectors;
        [
            if b == 1 { 0 } else { h * head },
            if h == 1 { 0 } else { head },
        ]
    });
    // Every kernel argument needs a buffer, even one that the kernel does not read.
    let mask = mask.unwrap_or_else(|| tensor::empty(&scores, [1], DType::F32));
    let client = scores.client.clone();
    let dtypes = [scores.dtype, mask.dtype];
    let (out, out_arg) = place(&scores, 0);
    softmax_kernel::launch(
        &client,
        grid.cubes(),
        grid.dim(),
        address_type(&[&scores]),
        grid.lanes,
        scores.into_buffer_arg(),
        mask.into_buffer_arg(),
        out_arg.into_buffer_arg(),
        grid.scores(of_mask, scale),
        grid.plan,
        dtypes.map(dtype_to_storage_type),
    );
    tensor::into_backend(out)
}

/// `scale * p * (dp - sum(p * dp))`. If `causal`, `p` is 0 for keys `j > i` of query `i`.
pub(super) fn softmax_gradient(
    p: FloatTensor<Cube>,
    dp: FloatTensor<Cube>,
    scale: f64,
    causal: bool,
) -> FloatTensor<Cube> {
    let [p, dp] = [p, dp].map(|x| tensor::contiguous(tensor::from_backend(x)));
    let grid = Grid::of(&p, causal, false);
    let client = p.client.clone();
    let dtype = dtype_to_storage_type(p.dtype);
    let (out, out_arg) = place(&dp, 1);
    gradient_kernel::launch(
        &client,
        grid.cubes(),
        grid.dim(),
        address_type(&[&p]),
        grid.lanes,
        p.into_buffer_arg(),
        dp.into_buffer_arg(),
        out_arg.into_buffer_arg(),
        grid.scores([0; 2], scale),
        grid.plan,
        dtype,
    );
    tensor::into_backend(out)
}

/// The output buffer and argument: `x` itself, which is argument `position` of the kernel, if no
/// other tensor shares it.
fn place(x: &CubeTensor, position: usize) -> (CubeTensor, TensorArg) {
    if x.can_mut() {
        return (x.clone(), x.as_tensor_alias(position));
    }
    let out = tensor::empty(x, x.shape(), x.dtype);
    (out.clone(), out.into_tensor_arg())
}

/// How contiguous scores are distributed over planes.
struct Grid {
    rows: usize,
    queries: usize,
    heads: usize,
    /// Vectors per row.
    vectors: usize,
    lanes: usize,
    plan: SoftmaxPlan,
}

impl Grid {
    fn of(scores: &CubeTensor, causal: bool, masked: bool) -> Self {
        let [b, heads, queries, keys] = scores.shape().dims();
        let most = 16 / scores.dtype.size();
        let lanes = [most, most / 2, most / 4]
            .into_iter()
            .find(|n| *n > 0 && keys.is_multiple_of(*n));
        let lanes = lanes.unwrap_or(1);
        let vectors = keys / lanes;
        let planes = vectors
            .div_ceil(VECS_PER_THREAD * PLANE)
            .next_power_of_two()
            .min(MAX_PLANES);
        let fits = vectors <= planes * PLANE * VECS_PER_THREAD;
        let plan = SoftmaxPlan {
            planes,
            fits,
            causal,
            masked,
        };
        Self {
            rows: b * heads * queries,
            queries,
            heads,
            vectors,
            lanes,
            plan,
        }
    }

    fn cubes(&self) -> CubeCount {
        let rows = if self.plan.planes == 1 { ROWS } else { 1 };
        CubeCount::Static(self.rows.div_ceil(rows) as u32, 1, 1)
    }

    fn dim(&self) -> CubeDim {
        let planes = if self.plan.planes == 1 {
            ROWS
        } else {
            self.plan.planes
        };
        CubeDim::new_2d(PLANE as u32, planes as u32)
    }

    fn scores(&self, [mask_batch, mask_head]: [usize; 2], scale: f64) -> ScoresLaunch {
        ScoresLaunch {
            rows: self.rows as u32,
            vectors: self.vectors as u32,
            queries: self.queries as u32,
            heads: self.heads as u32,
            mask_batch: mask_batch as u32,
            mask_head: mask_head as u32,
            scale: scale as f32,
        }
    }
}
