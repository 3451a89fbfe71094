use std::collections::BTreeMap;

use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::{DType, Tensor};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use megaburn_cuda::addresses::{Access, table, written_by};
use megaburn_cuda::tensor;

use super::many::{QUAD, entries, has_quads, is_in_quads, planes, put_quad, quad_at};
use super::{UNITS, cubes, factor_of, lanes, on_gpu, or_none, own, units, wrap};
use crate::optimizer::{AdamwState, AdamwStep};

pub(in crate::optimizer) fn adamw(
    state: AdamwState,
    grad: Tensor<1>,
    factor: Option<Tensor<1>>,
    step: &AdamwStep,
) -> AdamwState {
    let buffers = Buffers::of(state, grad);
    buffers.step(factor.map(on_gpu), step);
    buffers.state()
}

/// Groups parameters by the dtype of their rounded copies. Each group is one launch, if the
/// multi-tensor kernel supports its buffers.
pub(in crate::optimizer) fn adamw_all(
    all: Vec<(AdamwState, Tensor<1>)>,
    factor: Option<Tensor<1>>,
    step: &AdamwStep,
) -> Vec<AdamwState> {
    let factor = factor.map(on_gpu);
    let all: Vec<_> = all
        .into_iter()
        .map(|(state, grad)| Buffers::of(state, grad))
        .collect();
    let mut alike: BTreeMap<_, Vec<&Buffers>> = BTreeMap::new();
    for one in &all {
        alike.entry(one.narrow_in_quads()).or_default().push(one);
    }
    for (narrow, those) in alike {
        match narrow {
            Some(narrow) if those.len() > 1 => step_many(&those, narrow, factor.clone(), step),
            _ => those
                .into_iter()
                .for_each(|one| one.step(factor.clone(), step)),
        }
    }
    all.into_iter().map(Buffers::state).collect()
}

/// The buffers that a step reads and writes.
struct Buffers {
    grad: CubeTensor,
    /// The parameter and its moments.
    kept: [CubeTensor; 3],
    rounded: Option<CubeTensor>,
}

impl Buffers {
    /// Takes the buffers of a state; copies those that other tensors share.
    fn of(state: AdamwState, grad: Tensor<1>) -> Self {
        let AdamwState {
            param,
            exp_avg,
            exp_avg_sq,
            rounded,
        } = state;
        let kept = [param, exp_avg, exp_avg_sq].map(|x| own(on_gpu(x)));
        Self {
            grad: on_gpu(grad),
            kept,
            rounded: rounded.map(on_gpu),
        }
    }

    fn state(self) -> AdamwState {
        let Self {
            kept: [param, exp_avg, exp_avg_sq],
            rounded,
            ..
        } = self;
        let [param, exp_avg, exp_avg_sq] = [param, exp_avg, exp_avg_sq].map(wrap);
        AdamwState {
            param,
            exp_avg,
            exp_avg_sq,
            rounded: rounded.map(wrap),
        }
    }

    /// The PTX name of the rounded parameter's dtype, or `Some(None)` without a rounded parameter;
    /// `None` where the multi-tensor kernel does not support these buffers.
    fn narrow_in_quads(&self) -> Option<Option<&'static str>> {
        let Self {
            grad,
            kept,
            rounded,
        } = self;
        let name = match rounded {
            None => None,
            Some(narrow) if !has_quads(narrow, QUAD / 2) => return None,
            Some(narrow) => match narrow.dtype {
                DType::BF16 => Some("bf16"),
                DType::F16 => Some("f16"),
                _ => return None,
            },
        };
        kept.iter().chain([grad]).all(is_in_quads).then_some(name)
    }

    fn step(&self, factor: Option<CubeTensor>, step: &AdamwStep) {
        let Self {
            grad,
            kept: [param, exp_avg, exp_avg_sq],
            rounded,
        } = self;
        let len = grad.meta.num_elements();
        let rounds = rounded.is_some();
        let scales = factor.is_some();
        let rounded = or_none(rounded, grad, DType::BF16);
        let factor = or_none(&factor, grad, DType::F32);
        let dtypes = [
            grad.dtype,
            param.dtype,
            exp_avg.dtype,
            exp_avg_sq.dtype,
            rounded.dtype,
        ];
        let lanes = lanes(len, &dtypes);
        adamw_kernel::launch(
            &grad.client.clone(),
            cubes(len / lanes),
            units(),
            lanes,
            grad.clone().into_buffer_arg(),
            param.clone().into_buffer_arg(),
            exp_avg.clone().into_buffer_arg(),
            exp_avg_sq.clone().into_buffer_arg(),
            rounded.into_buffer_arg(),
            factor.into_buffer_arg(),
            len / lanes,
            numbers(step),
            rounds,
            scales,
            dtypes.map(dtype_to_storage_type),
        );
    }
}

/// The numbers of a step.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct AdamwNumbers {
    grad_factor: f32,
    beta_1: f32,
    /// `1 - beta_1`.
    rest_1: f32,
    beta_2: f32,
    /// `1 - beta_2`.
    rest_2: f32,
    /// Corrects the bias of the root of the second moment.
    root_factor: f32,
    epsilon: f32,
    /// The factor of the parameter, from weight decay.
    keep: f32,
    /// The learning rate, with the correction of the first moment's bias.
    rate: f32,
}

fn numbers(step: &AdamwStep) -> AdamwNumbersLaunch {
    let AdamwStep {
        lr,
        beta_1,
        beta_2,
        epsilon,
        weight_decay,
        grad_factor,
        ..
    } = *step;
    AdamwNumbersLaunch {
        grad_factor: grad_factor as f32,
        beta_1: beta_1 as f32,
        rest_1: (1.0 - beta_1) as f32,
        beta_2: beta_2 as f32,
        rest_2: (1.0 - beta_2) as f32,
        root_factor: (1.0 / step.correction(beta_2).sqrt()) as f32,
        epsilon: epsilon as f32,
        keep: (1.0 - lr * weight_decay) as f32,
        rate: (lr / step.correction(beta_1)) as f32,
    }
}

/// Steps several parameters whose buffers consist of quads, and rounds them to `narrow`.
fn step_many(
    all: &[&Buffers],
    narrow: Option<&'static str>,
    factor: Option<CubeTensor>,
    step: &AdamwStep,
) {
    let buffers = |one: &&Buffers| {
        let of_one = [&one.grad].into_iter().chain(&one.kept).chain(&one.rounded);
        of_one.cloned().collect::<Vec<_>>()
    };
    let tensors: Vec<CubeTensor> = all.iter().flat_map(buffers).collect();
    let lens = all.iter().map(|one| one.grad.meta.num_elements());
    let entries = match narrow {
        None => entries(lens, [QUAD; 4]),
        Some(_) => entries(lens, [QUAD, QUAD, QUAD, QUAD, QUAD / 2]),
    };
    let per_cube = if narrow.is_some() { 6 } else { 5 };
    let cubes = (entries.len() / per_cube) as u32;
    // Allocate these before the table: an allocation may move other buffers, whose addresses are in
    // the table.
    let done = tensor::empty(&tensors[0], [1], DType::U32);
    let scales = factor.is_some();
    let factor = or_none(&factor, &tensors[0], DType::F32);
    // (Gradients are only read. Marking them as written is harmless: a reader of a buffer whose
    // writer failed fails either way.)
    let table = table(&tensors, Access::Write, entries);
    // SAFETY: the tensors are held until this returns, and have the number of quads that the table
    // states, from the stated addresses. The caller allows writing to them, and no two of the
    // written ones overlap.
    unsafe {
        adamw_of_many_kernel::launch_unchecked(
            &done.client.clone(),
            CubeCount::Static(cubes, 1, 1),
            planes(),
            table.into_buffer_arg(),
            done.clone().into_buffer_arg(),
            factor.into_buffer_arg(),
            numbers(step),
            narrow,
            scales,
        );
    }
    written_by(&done, &tensors);
}

/// One AdamW step. `rounded` is used only if `rounds` is set, and `factor` only if `scales` is.
#[cube(launch)]
#[allow(
    clippy::too_many_arguments,
    reason = "the buffers of the optimizer state"
)]
fn adamw_kernel<G: Float, P: Float, M: Float, V: Float, R: Float, N: Size>(
    grad: &[Vector<G, N>],
    param: &mut [Vector<P, N>],
    exp_avg: &mut [Vector<M, N>],
    exp_avg_sq: &mut [Vector<V, N>],
    rounded: &mut [Vector<R, N>],
    factor: &[f32],
    vectors: usize,
    numbers: AdamwNumbers,
    #[comptime] rounds: bool,
    #[comptime] scales: bool,
    #[define(G, P, M, V, R)] _dtypes: [ElemType; 5],
) {
    if ABSOLUTE_POS < vectors {
        let (grad_factor, goes) = factor_of(numbers.grad_factor, factor, scales);
        let mut p = Vector::<f32, N>::cast_from(param[ABSOLUTE_POS]);
        if goes {
            let g = Vector::cast_from(grad[ABSOLUTE_POS]) * Vector::new(grad_factor);
            let m = decayed(
                Vector::cast_from(exp_avg[ABSOLUTE_POS]),
                g,
                numbers.beta_1,
                numbers.rest_1,
            );
            let v = decayed(
                Vector::cast_from(exp_avg_sq[ABSOLUTE_POS]),
                g * g,
                numbers.beta_2,
                numbers.rest_2,
            );
            p = moved(p, m, v, &numbers);
            exp_avg[ABSOLUTE_POS] = Vector::cast_from(m);
            exp_avg_sq[ABSOLUTE_POS] = Vector::cast_from(v);
            param[ABSOLUTE_POS] = Vector::cast_from(p);
        }
        if rounds {
            rounded[ABSOLUTE_POS] = Vector::cast_from(p);
        }
    }
}

/// One AdamW step of several parameters. `table` has for each cube: the addresses of the first quad
/// of the gradient, the parameter, the two moments and, with `narrow`, the rounded parameter; then
/// the number of quads. `done: [1]` is written by the same launch.
#[cube(launch_unchecked)]
fn adamw_of_many_kernel(
    table: &[u64],
    done: &mut [u32],
    factor: &[f32],
    numbers: AdamwNumbers,
    #[comptime] narrow: Option<&'static str>,
    #[comptime] scales: bool,
) {
    if ABSOLUTE_POS == 0 {
        done[0] = 1u32;
    }
    let buffers = comptime!(if narrow.is_some() { 5usize } else { 4usize });
    let entry = CUBE_POS * (buffers + 1);
    let grad = table[entry];
    let param = table[entry + 1];
    let exp_avg = table[entry + 2];
    let exp_avg_sq = table[entry + 3];
    let rounded = table[entry + buffers - 1];
    let quads = table[entry + buffers] as usize;
    let (grad_factor, goes) = factor_of(numbers.grad_factor, factor, scales);
    let mut at = UNIT_POS as usize;
    while at < quads {
        let place = at as u64 * QUAD;
        let mut p = quad_at(param + place);
        if goes {
            let g = quad_at(grad + place) * Vector::new(grad_factor);
            let m = quad_at(exp_avg + place);
            let v = quad_at(exp_avg_sq + place);
            let m = decayed(m, g, numbers.beta_1, numbers.rest_1);
            let v = decayed(v, g * g, numbers.beta_2, numbers.rest_2);
            p = moved(p, m, v, &numbers);
            put_quad(exp_avg + place, m, comptime!(None));
            put_quad(exp_avg_sq + place, v, comptime!(None));
            put_quad(param + place, p, comptime!(None));
        }
        if comptime!(narrow.is_some()) {
            put_quad(rounded + place / 2, p, narrow);
        }
        at += UNITS;
    }
}

/// Adds `x` to a decaying mean.
#[cube]
fn decayed<N: Size>(
    mean: Vector<f32, N>,
    x: Vector<f32, N>,
    beta: f32,
    rest: f32,
) -> Vector<f32, N> {
    mean * Vector::new(beta) + x * Vector::new(rest)
}

/// The parameter after the step.
#[cube]
fn moved<N: Size>(
    p: Vector<f32, N>,
    m: Vector<f32, N>,
    v: Vector<f32, N>,
    numbers: &AdamwNumbers,
) -> Vector<f32, N> {
    let root = v.sqrt() * Vector::new(numbers.root_factor) + Vector::new(numbers.epsilon);
    p * Vector::new(numbers.keep) - m / root * Vector::new(numbers.rate)
}
