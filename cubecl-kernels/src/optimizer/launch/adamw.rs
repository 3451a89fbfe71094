use std::collections::BTreeMap;

use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::{DType, Tensor};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use megaburn_cuda::addresses::{Access, table, written_by};
use megaburn_cuda::tensor;

use super::many::{entries, has_quads, is_in_quads, planes};
use super::{cubes, lanes, on_gpu, or_none, own, units, wrap};
use crate::optimizer::kernels::adamw::{AdamwNumbersLaunch, adamw_kernel, adamw_of_many_kernel};
use crate::optimizer::kernels::many::QUAD;
use crate::optimizer::options::{AdamwState, AdamwStep};
use crate::quantized::launch::AmaxCells;

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
/// multi-tensor kernel supports its buffers. With `finds_amaxes` it also finds the largest magnitudes of
/// the new parameters.
pub(in crate::optimizer) fn adamw_all(
    all: Vec<(AdamwState, Tensor<1>)>,
    factor: Option<Tensor<1>>,
    step: &AdamwStep,
    finds_amaxes: bool,
) -> Vec<(AdamwState, Option<Tensor<1>>)> {
    let factor = factor.map(on_gpu);
    let all: Vec<_> = all
        .into_iter()
        .map(|(state, grad)| Buffers::of(state, grad))
        .collect();
    let mut alike: BTreeMap<_, Vec<usize>> = BTreeMap::new();
    for (i, one) in all.iter().enumerate() {
        alike.entry(one.narrow_in_quads()).or_default().push(i);
    }
    let mut amaxes = vec![None; all.len()];
    for (narrow, those) in alike {
        match narrow {
            Some(narrow) if those.len() > 1 || finds_amaxes => {
                let buffers: Vec<_> = those.iter().map(|i| &all[*i]).collect();
                let cells = finds_amaxes.then(|| AmaxCells::new(&buffers[0].grad, those.len()));
                step_many(&buffers, narrow, factor.clone(), step, cells.as_ref());
                let found = cells.into_iter().flat_map(AmaxCells::values);
                those
                    .iter()
                    .zip(found)
                    .for_each(|(i, amax)| amaxes[*i] = Some(wrap(amax)));
            }
            _ => those
                .into_iter()
                .for_each(|i| all[i].step(factor.clone(), step)),
        }
    }
    all.into_iter().map(Buffers::state).zip(amaxes).collect()
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
    amaxes: Option<&AmaxCells>,
) {
    let buffers = |one: &&Buffers| {
        let of_one = [&one.grad].into_iter().chain(&one.kept).chain(&one.rounded);
        of_one.cloned().collect::<Vec<_>>()
    };
    let tensors: Vec<CubeTensor> = all.iter().flat_map(buffers).collect();
    let lens = all.iter().map(|one| one.grad.meta.num_elements());
    let cell = |set| amaxes.map(|cells| cells.index(set) as u64);
    let entries = match narrow {
        None => entries(lens, [QUAD; 4], cell),
        Some(_) => entries(lens, [QUAD, QUAD, QUAD, QUAD, QUAD / 2], cell),
    };
    let per_cube = if narrow.is_some() { 6 } else { 5 } + usize::from(amaxes.is_some());
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
            amaxes
                .map_or(&done, AmaxCells::buffer)
                .clone()
                .into_buffer_arg(),
            factor.into_buffer_arg(),
            numbers(step),
            narrow,
            scales,
            amaxes.is_some(),
        );
    }
    written_by(&done, &tensors);
}
