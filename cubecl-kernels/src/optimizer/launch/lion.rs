use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::{DType, Tensor};

use super::{cubes, lanes, on_gpu, or_none, own, units, wrap};
use crate::optimizer::kernels::lion::{LionNumbersLaunch, lion_kernel};
use crate::optimizer::options::{LionState, LionStep};

pub(in crate::optimizer) fn lion(
    state: LionState,
    grad: Tensor<1>,
    factor: Option<Tensor<1>>,
    step: &LionStep,
) -> LionState {
    let LionState {
        param,
        exp_avg,
        rounded,
    } = state;
    let [grad, param, exp_avg] = [grad, param, exp_avg].map(on_gpu);
    let [rounded, factor] = [rounded, factor].map(|x| x.map(on_gpu));
    let len = grad.meta.num_elements();
    let [param, exp_avg] = [param, exp_avg].map(own);
    let LionStep {
        lr,
        beta_1,
        beta_2,
        weight_decay,
        grad_factor,
    } = *step;
    let rounds = rounded.is_some();
    let scales = factor.is_some();
    let rounded_arg = or_none(&rounded, &grad, DType::BF16);
    let factor = or_none(&factor, &grad, DType::F32);
    let dtypes = [grad.dtype, param.dtype, exp_avg.dtype, rounded_arg.dtype];
    let lanes = lanes(len, &dtypes);
    lion_kernel::launch(
        &grad.client.clone(),
        cubes(len / lanes),
        units(),
        lanes,
        grad.into_buffer_arg(),
        param.clone().into_buffer_arg(),
        exp_avg.clone().into_buffer_arg(),
        rounded_arg.into_buffer_arg(),
        factor.into_buffer_arg(),
        len / lanes,
        LionNumbersLaunch {
            grad_factor: grad_factor as f32,
            beta_1: beta_1 as f32,
            rest_1: (1.0 - beta_1) as f32,
            beta_2: beta_2 as f32,
            rest_2: (1.0 - beta_2) as f32,
            keep: (1.0 - lr * weight_decay) as f32,
            lr: lr as f32,
        },
        rounds,
        scales,
        dtypes.map(dtype_to_storage_type),
    );
    LionState {
        param: wrap(param),
        exp_avg: wrap(exp_avg),
        rounded: rounded.map(wrap),
    }
}
