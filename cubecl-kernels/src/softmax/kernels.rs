//! Softmax kernels. One plane or several process a row, which stays in registers between the two
//! passes over it if it fits. In place, each unit writes only elements that it alone reads.

use cubecl::prelude::*;

/// Units of a plane.
pub(super) const PLANE: usize = 32;
/// Most planes per cube.
pub(super) const MAX_PLANES: usize = 16;
/// Rows per cube if one plane per row is enough.
pub(super) const ROWS: usize = 8;
/// Vectors of 16 bytes that a unit holds in registers.
pub(super) const VECS_PER_THREAD: usize = 4;

/// The dimensions of scores and the strides of the mask, in vectors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Scores {
    pub(super) rows: u32,
    /// Vectors per row.
    pub(super) vectors: u32,
    pub(super) queries: u32,
    pub(super) heads: u32,
    /// The mask's stride from one sequence to the next; 0 if all sequences share it.
    pub(super) mask_batch: u32,
    /// The mask's stride from one head to the next; 0 if all heads share it.
    pub(super) mask_head: u32,
    pub(super) scale: f32,
}

/// How a kernel distributes rows over units, and which scores are hidden.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(super) struct SoftmaxPlan {
    /// Planes per row.
    pub(super) planes: usize,
    /// Whether the units hold a full row in registers.
    pub(super) fits: bool,
    pub(super) causal: bool,
    pub(super) masked: bool,
}

/// The row of this unit's plane.
#[cube]
fn row(#[comptime] plan: SoftmaxPlan) -> u32 {
    if comptime!(plan.planes == 1) {
        CUBE_POS_X * comptime!(ROWS as u32) + UNIT_POS_Y
    } else {
        CUBE_POS_X
    }
}

/// The index of this unit among the units of its row.
#[cube]
fn unit(#[comptime] plan: SoftmaxPlan) -> u32 {
    if comptime!(plan.planes == 1) {
        UNIT_POS_X
    } else {
        UNIT_POS
    }
}

/// The number of keys that a row's query sees, not counting the mask.
#[cube]
fn visible(scores: &Scores, row: u32, lanes: u32, #[comptime] plan: SoftmaxPlan) -> u32 {
    let all = scores.vectors * lanes;
    if comptime!(plan.causal) {
        min(row % scores.queries + 1, all)
    } else {
        all
    }
}
/// A finite substitute for minus infinity: its difference with itself is not NaN.
const LOWEST: f32 = -3.0e38;

/// `exp(x)` for `x <= 0`, with the GPU's instruction for powers of 2.
#[cube]
fn exp_of(x: f32) -> f32 {
    let y: f32;
    let x = x * core::f32::consts::LOG2_E;
    gpu_asm!("ex2.approx.ftz.f32 {}, {};", out(_) y, in(_) x, options(pure, nomem));
    y
}

/// A vector of scaled scores, with `LOWEST` where hidden.
#[cube]
fn scaled<F: Float, M: Numeric, N: Size>(
    read: Vector<F, N>,
    hidden: Vector<M, N>,
    at: u32,
    seen: u32,
    scale: f32,
    #[comptime] plan: SoftmaxPlan,
) -> Vector<f32, N> {
    let lanes = N::value();
    let mut y = Vector::<f32, N>::cast_from(read) * Vector::new(scale);
    if comptime!(plan.causal) {
        let column = at * lanes as u32;
        if column + lanes as u32 > seen {
            #[unroll]
            for lane in 0..lanes {
                if column + comptime!(lane as u32) >= seen {
                    y.insert(lane, f32::new(LOWEST));
                }
            }
        }
    }
    if comptime!(plan.masked) {
        #[unroll]
        for lane in 0..lanes {
            if hidden.extract(lane) != M::from_int(0) {
                y.insert(lane, f32::new(LOWEST));
            }
        }
    }
    y
}

#[cube(launch, address_type = "dynamic")]
pub(super) fn softmax_kernel<F: Float, M: Numeric, N: Size>(
    from: &[Vector<F, N>],
    mask: &[Vector<M, N>],
    out: &mut [Vector<F, N>],
    scores: Scores,
    #[comptime] plan: SoftmaxPlan,
    #[define(F, M)] _dtypes: [ElemType; 2],
) {
    let lanes = N::value();
    let step = comptime!((plan.planes * PLANE) as u32);
    let row = row(plan);
    if row < scores.rows {
        let start = row as usize * scores.vectors as usize;
        let seen = visible(&scores, row, lanes as u32, plan);
        let seen_vectors = seen.div_ceil(lanes as u32);
        let head = row / scores.queries;
        let mask_start = (head / scores.heads) as usize * scores.mask_batch as usize
            + (head % scores.heads) as usize * scores.mask_head as usize
            + (row % scores.queries) as usize * scores.vectors as usize;

        let mut x = Array::<Vector<f32, N>>::new(VECS_PER_THREAD);
        #[unroll]
        for i in 0..VECS_PER_THREAD {
            x[i] = Vector::new(f32::new(LOWEST));
        }
        let mut top = f32::new(LOWEST);
        let mut sum = f32::new(0.0);
        let mut first = unit(plan);
        while first < seen_vectors {
            // Issue all loads before using the first. Indices past the end load the last vector,
            // which is then ignored.
            let mut read = Array::<Vector<F, N>>::new(VECS_PER_THREAD);
            let mut hidden = Array::<Vector<M, N>>::new(VECS_PER_THREAD);
            #[unroll]
            for i in 0..VECS_PER_THREAD {
                let at = min(first + comptime!(i as u32) * step, seen_vectors - 1);
                read[i] = from[start + at as usize];
                hidden[i] = Vector::new(M::from_int(0));
                if comptime!(plan.masked) {
                    hidden[i] = mask[mask_start + at as usize];
                }
            }
            let mut high = top;
            #[unroll]
            for i in 0..VECS_PER_THREAD {
                let at = first + comptime!(i as u32) * step;
                x[i] = Vector::new(f32::new(LOWEST));
                if at < seen_vectors {
                    x[i] = scaled::<F, M, N>(read[i], hidden[i], at, seen, scores.scale, plan);
                }
                #[unroll]
                for lane in 0..lanes {
                    high = max(high, x[i].extract(lane));
                }
            }
            sum *= exp_of(top - high);
            top = high;
            #[unroll]
            for i in 0..VECS_PER_THREAD {
                #[unroll]
                for lane in 0..lanes {
                    sum += exp_of(x[i].extract(lane) - top);
                }
            }
            first += comptime!(VECS_PER_THREAD as u32) * step;
        }

        let mut high = plane_max(top);
        let mut total = plane_sum(sum * exp_of(top - high));
        if comptime!(plan.planes > 1) {
            let mut tops = Shared::new_slice(comptime!(plan.planes));
            let mut sums = Shared::new_slice(comptime!(plan.planes));
            if UNIT_POS_X == 0 {
                tops[UNIT_POS_Y as usize] = high;
                sums[UNIT_POS_Y as usize] = total;
            }
            sync_cube();
            high = f32::new(LOWEST);
            #[unroll]
            for i in 0..comptime!(plan.planes) {
                high = max(high, tops[i]);
            }
            total = f32::new(0.0);
            #[unroll]
            for i in 0..comptime!(plan.planes) {
                total += sums[i] * exp_of(tops[i] - high);
            }
        }
        // For a query without visible keys `total` is meaningless: each hidden key counted as 1.
        let mut share = 1.0 / total;
        if high <= f32::new(LOWEST) {
            share = f32::new(0.0);
        }

        let mut first = unit(plan);
        while first < scores.vectors {
            #[unroll]
            for i in 0..VECS_PER_THREAD {
                let at = first + comptime!(i as u32) * step;
                if at < scores.vectors {
                    let mut y = Vector::<f32, N>::new(f32::new(LOWEST));
                    if comptime!(plan.fits) {
                        y = x[i];
                    } else if at < seen_vectors {
                        let mut hidden = Vector::<M, N>::new(M::from_int(0));
                        if comptime!(plan.masked) {
                            hidden = mask[mask_start + at as usize];
                        }
                        let read = from[start + at as usize];
                        y = scaled::<F, M, N>(read, hidden, at, seen, scores.scale, plan);
                    }
                    #[unroll]
                    for lane in 0..lanes {
                        let p = exp_of(y.extract(lane) - high) * share;
                        y.insert(lane, p);
                    }
                    out[start + at as usize] = Vector::cast_from(y);
                }
            }
            first += comptime!(VECS_PER_THREAD as u32) * step;
        }
    }
}

#[cube(launch, address_type = "dynamic")]
pub(super) fn gradient_kernel<F: Float, N: Size>(
    p: &[Vector<F, N>],
    dp: &[Vector<F, N>],
    out: &mut [Vector<F, N>],
    scores: Scores,
    #[comptime] plan: SoftmaxPlan,
    #[define(F)] _dtype: ElemType,
) {
    let lanes = N::value();
    let step = comptime!((plan.planes * PLANE) as u32);
    let row = row(plan);
    if row < scores.rows {
        let start = row as usize * scores.vectors as usize;
        let seen = visible(&scores, row, lanes as u32, plan).div_ceil(lanes as u32);
        let mut held_p = Array::<Vector<F, N>>::new(VECS_PER_THREAD);
        let mut held_dp = Array::<Vector<F, N>>::new(VECS_PER_THREAD);
        let mut sums = Vector::<f32, N>::new(0.0);
        let mut first = unit(plan);
        while first < seen {
            #[unroll]
            for i in 0..VECS_PER_THREAD {
                let at = first + comptime!(i as u32) * step;
                if at < seen {
                    held_p[i] = p[start + at as usize];
                    held_dp[i] = dp[start + at as usize];
                    sums += Vector::<f32, N>::cast_from(held_p[i])
                        * Vector::<f32, N>::cast_from(held_dp[i]);
                }
            }
            first += comptime!(VECS_PER_THREAD as u32) * step;
        }

        let mut sum = plane_sum(Vector::vector_sum(sums));
        if comptime!(plan.planes > 1) {
            let mut of_planes = Shared::new_slice(comptime!(plan.planes));
            if UNIT_POS_X == 0 {
                of_planes[UNIT_POS_Y as usize] = sum;
            }
            sync_cube();
            sum = f32::new(0.0);
            #[unroll]
            for i in 0..comptime!(plan.planes) {
                sum += of_planes[i];
            }
        }

        let mut first = unit(plan);
        while first < scores.vectors {
            #[unroll]
            for i in 0..VECS_PER_THREAD {
                let at = first + comptime!(i as u32) * step;
                if at < scores.vectors {
                    let mut dx = Vector::<f32, N>::new(f32::new(0.0));
                    if at < seen {
                        let mut p_here = held_p[i];
                        let mut dp_here = held_dp[i];
                        if comptime!(!plan.fits) {
                            p_here = p[start + at as usize];
                            dp_here = dp[start + at as usize];
                        }
                        let above = Vector::<f32, N>::cast_from(dp_here) - Vector::new(sum);
                        dx =
                            Vector::<f32, N>::cast_from(p_here) * above * Vector::new(scores.scale);
                    }
                    out[start + at as usize] = Vector::cast_from(dx);
                }
            }
            first += comptime!(VECS_PER_THREAD as u32) * step;
        }
    }
}
