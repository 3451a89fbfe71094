//! The kernels, in which each row has a cube. Its units read the row as vectors of up to 16 bytes,
//! four at a time, so that enough reads are in flight while the exponentials are computed.

use cubecl::prelude::*;

use super::fallback::LOWEST;

/// Units of a plane.
pub(super) const PLANE: usize = 32;
/// Planes of the largest cube.
pub(super) const MAX_PLANES: usize = 16;
/// Vectors that a unit reads at once.
pub(super) const READS: usize = 4;

/// `2^x` by the single instruction for it; 0 for minus infinity.
#[cube]
fn exp2(x: f32) -> f32 {
    let y: f32;
    gpu_asm!("ex2.approx.ftz.f32 {}, {};", out(_) y, in(_) x, options(pure, nomem));
    y
}

/// `exp(x)` for `x <= 0`.
#[cube]
fn exp_of(x: f32) -> f32 {
    exp2(x * core::f32::consts::LOG2_E)
}

/// The columns of this part.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct VocabPart {
    /// Vectors from a row to the next.
    pub(super) stride: u32,
    /// The number of columns that belong to tokens; they come first.
    pub(super) tokens: u32,
    /// The token of the first column.
    pub(super) first: i32,
    /// The label that is ignored.
    pub(super) ignored: i32,
}

/// The statistics of a row at `out[i * rows + row]`: its maximum `m`, the sum of `exp(x - m)`, the
/// target's `x` and, if `smoothed`, the sum of `x - m`.
#[cube(launch, address_type = "dynamic")]
pub(super) fn statistics_kernel<F: Float, I: Numeric, N: Size>(
    logits: &[Vector<F, N>],
    labels: &[I],
    out: &mut [f32],
    part: VocabPart,
    #[comptime] planes: usize,
    #[comptime] smoothed: bool,
    #[define(F, I)] _dtypes: [ElemType; 2],
) {
    let mut tops = Shared::new_slice(planes);
    let mut sums = Shared::new_slice(planes);
    let mut sums_above = Shared::new_slice(planes);
    let lanes = N::value();
    let row = CUBE_POS_X as usize;
    let rows = CUBE_COUNT_X as usize;
    let label = i32::cast_from(labels[row]);
    let base = row * part.stride as usize;
    let mut whole = part.tokens / lanes as u32;
    let mut rest = part.tokens % lanes as u32;
    if label == part.ignored {
        // The statistics of an ignored row are never used, so its columns are not read.
        whole = 0;
        rest = 0;
    }

    let mut top = f32::new(LOWEST);
    let mut sum = f32::new(0.0);
    // The sum of `x - origin`, where `origin` is the row's first logit: it is known from the start,
    // and close enough to the others to avoid cancellation.
    let mut above = f32::new(0.0);
    let mut origin = f32::new(0.0);
    if smoothed && part.tokens > 0 {
        origin = f32::cast_from(logits[base].extract(0usize));
    }
    let mut start = UNIT_POS;
    while start < whole {
        // All reads are issued before the first result is used. Reads past the end read the last
        // vector, and are not used.
        let mut read = Array::<Vector<F, N>>::new(READS);
        #[unroll]
        for i in 0..READS {
            let at = min(start + comptime!((i * planes * PLANE) as u32), whole - 1);
            read[i] = logits[base + at as usize];
        }
        let mut x = Array::<Vector<f32, N>>::new(READS);
        #[unroll]
        for i in 0..READS {
            let at = start + comptime!((i * planes * PLANE) as u32);
            x[i] = Vector::new(f32::new(LOWEST));
            if at < whole {
                x[i] = Vector::cast_from(read[i]);
            }
        }
        let mut high = top;
        #[unroll]
        for i in 0..READS {
            #[unroll]
            for lane in 0..lanes {
                high = max(high, x[i].extract(lane));
            }
        }
        sum *= exp_of(top - high);
        top = high;
        #[unroll]
        for i in 0..READS {
            #[unroll]
            for lane in 0..lanes {
                sum += exp_of(x[i].extract(lane) - top);
            }
            if smoothed {
                let at = start + comptime!((i * planes * PLANE) as u32);
                if at < whole {
                    above += Vector::vector_sum(x[i] - Vector::new(origin));
                }
            }
        }
        start += comptime!((READS * planes * PLANE) as u32);
    }
    // The vector in which the tokens end and the padding starts.
    if UNIT_POS == 0 && rest > 0 {
        let x = Vector::<f32, N>::cast_from(logits[base + whole as usize]);
        #[unroll]
        for lane in 0..lanes {
            if comptime!(lane as u32) < rest {
                let x = x.extract(lane);
                let high = max(top, x);
                sum = sum * exp_of(top - high) + exp_of(x - high);
                top = high;
                above += x - origin;
            }
        }
    }

    let high = plane_max(top);
    let sum = plane_sum(sum * exp_of(top - high));
    let above = plane_sum(above);
    if UNIT_POS_X == 0 {
        tops[UNIT_POS_Y as usize] = high;
        sums[UNIT_POS_Y as usize] = sum;
        sums_above[UNIT_POS_Y as usize] = above;
    }
    sync_cube();
    if UNIT_POS == 0 {
        let mut top = f32::new(LOWEST);
        #[unroll]
        for i in 0..planes {
            top = max(top, tops[i]);
        }
        let mut sum = f32::new(0.0);
        let mut above = f32::new(0.0);
        #[unroll]
        for i in 0..planes {
            sum += sums[i] * exp_of(tops[i] - top);
            above += sums_above[i];
        }
        let mut target = f32::new(0.0);
        let local = label - part.first;
        if local >= 0 && local < i32::cast_from(part.tokens) && label != part.ignored {
            let local = u32::cast_from(local);
            let x = Vector::<f32, N>::cast_from(logits[base + local as usize / lanes]);
            #[unroll]
            for lane in 0..lanes {
                if comptime!(lane as u32) == local % lanes as u32 {
                    target = x.extract(lane);
                }
            }
        }
        out[row] = top;
        out[rows + row] = sum;
        out[2 * rows + row] = target;
        out[3 * rows + row] = above + f32::cast_from(part.tokens) * (origin - top);
    }
}

/// The numbers with which the statistics of all parts are combined.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct CombineArgs {
    pub(super) rows: usize,
    /// The number of parts, and the columns of each.
    pub(super) parts: u32,
    pub(super) columns: u32,
    pub(super) vocab: u32,
    /// The label that is ignored.
    pub(super) ignored: i32,
    /// The weight of the target's logarithm, and that of each token's.
    pub(super) on_target: f32,
    pub(super) on_each: f32,
    /// Factor of the squared logarithm of the sum of exponentials.
    pub(super) z_loss: f32,
}

/// Combines the parts; a unit has a row. Writes the maximum `m`, the sum of `exp(x - m)` and the
/// loss, which is NaN for a label that is no token.
#[cube(launch)]
pub(super) fn combine_kernel<I: Numeric>(
    statistics: &[f32],
    labels: &[I],
    out: &mut [f32],
    args: CombineArgs,
    #[comptime] smoothed: bool,
    #[define(I)] _dtype: ElemType,
) {
    let rows = args.rows;
    let row = ABSOLUTE_POS;
    if row < rows {
        let mut top = f32::new(LOWEST);
        for part in 0..args.parts {
            top = max(top, statistics[part as usize * 4 * rows + row]);
        }
        let mut sum = f32::new(0.0);
        let mut target = f32::new(0.0);
        let mut above = f32::new(0.0);
        for part in 0..args.parts {
            let at = part as usize * 4 * rows + row;
            let lower = statistics[at] - top;
            sum += statistics[at + rows] * exp_of(lower);
            target += statistics[at + 2 * rows];
            if smoothed {
                let before = min(part * args.columns, args.vocab);
                let tokens = min(args.vocab - before, args.columns);
                above += statistics[at + 3 * rows] + lower * f32::cast_from(tokens);
            }
        }
        let label = i32::cast_from(labels[row]);
        if label < 0 || label >= i32::cast_from(args.vocab) {
            sum = f32::new(f32::NAN);
        }
        let mut loss = sum.ln() - (target - top) * args.on_target;
        if smoothed {
            loss -= above * args.on_each;
        }
        let log_sum = top + sum.ln();
        loss += args.z_loss * log_sum * log_sum;
        if label == args.ignored {
            loss = f32::new(0.0);
        }
        out[row] = top;
        out[rows + row] = sum;
        out[2 * rows + row] = loss;
    }
}

/// The gradient `(exp(x - m) / sum - wanted) * grad`, in place of `x` or elsewhere; 0 for padding.
#[cube(launch, address_type = "dynamic")]
#[allow(
    clippy::too_many_arguments,
    reason = "the shape of the logits and the options of the loss"
)]
pub(super) fn gradient_kernel<F: Float, I: Numeric, N: Size>(
    logits: &[Vector<F, N>],
    labels: &[I],
    rows: &[f32],
    grad: &[f32],
    out: &mut [Vector<F, N>],
    part: VocabPart,
    out_stride: u32,
    vectors: u32,
    on_target: f32,
    on_each: f32,
    z_loss: f32,
    #[comptime] planes: usize,
    #[define(F, I)] _dtypes: [ElemType; 2],
) {
    let lanes = N::value();
    let row = CUBE_POS_X as usize;
    let num_rows = CUBE_COUNT_X as usize;
    let label = i32::cast_from(labels[row]);
    let from = row * part.stride as usize;
    let to = row * out_stride as usize;
    let counts = label != part.ignored;
    let top = rows[row];
    let sum = rows[num_rows + row];
    // The z-loss grows with the logarithm of the sum of exponentials.
    let share = (1.0 + 2.0 * z_loss * (top + sum.ln())) / sum;
    let grad = grad[row];
    let local = label - part.first;
    let mut target = part.tokens;
    if local >= 0 && local < i32::cast_from(part.tokens) {
        target = u32::cast_from(local);
    }
    let mut start = UNIT_POS;
    while start < vectors {
        let mut x = Array::<Vector<F, N>>::new(READS);
        #[unroll]
        for i in 0..READS {
            let at = start + comptime!((i * planes * PLANE) as u32);
            if at < vectors && counts {
                x[i] = logits[from + at as usize];
            }
        }
        #[unroll]
        for i in 0..READS {
            let at = start + comptime!((i * planes * PLANE) as u32);
            if at < vectors {
                let mut y = Vector::<F, N>::new(F::new(0.0));
                if counts {
                    let mut wide = Vector::<f32, N>::cast_from(x[i]);
                    #[unroll]
                    for lane in 0..lanes {
                        let p = exp_of(wide.extract(lane) - top) * share;
                        wide.insert(lane, (p - on_each) * grad);
                    }
                    let column = at * lanes as u32;
                    // Few vectors contain the target, and at most one the end of the tokens.
                    if target / lanes as u32 == at || column + lanes as u32 > part.tokens {
                        #[unroll]
                        for lane in 0..lanes {
                            let here = column + comptime!(lane as u32);
                            if here >= part.tokens {
                                wide.insert(lane, f32::new(0.0));
                            } else if here == target {
                                wide.insert(lane, wide.extract(lane) - on_target * grad);
                            }
                        }
                    }
                    y = Vector::cast_from(wide);
                }
                out[to + at as usize] = y;
            }
        }
        start += comptime!((READS * planes * PLANE) as u32);
    }
}
