use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::{DType, Tensor};

use super::{cubes, lanes, on_gpu, or_none, own, units, wrap};
use crate::optimizer::kernels::sgd::{SgdNumbersLaunch, SgdVariant, sgd_kernel};
use crate::optimizer::options::{SgdState, SgdStep};

pub(in crate::optimizer) fn sgd(
    state: SgdState,
    grad: Tensor<1>,
    factor: Option<Tensor<1>>,
    step: &SgdStep,
) -> SgdState {
    let SgdState {
        param,
        momentum_buffer,
        rounded,
    } = state;
    let [grad, param] = [grad, param].map(on_gpu);
    let [momentum_buffer, rounded, factor] =
        [momentum_buffer, rounded, factor].map(|x| x.map(on_gpu));
    let len = grad.meta.num_elements();
    let param = own(param);
    let momentum_buffer = momentum_buffer.map(own);
    let SgdStep {
        lr,
        momentum,
        nesterov,
        weight_decay,
        grad_factor,
    } = *step;
    let variant = SgdVariant {
        decays: weight_decay != 0.0,
        momentum: momentum_buffer.is_some(),
        nesterov,
        rounds: rounded.is_some(),
        scales: factor.is_some(),
    };
    let [buffer_arg, rounded_arg] =
        [&momentum_buffer, &rounded].map(|x| or_none(x, &grad, DType::BF16));
    let factor = or_none(&factor, &grad, DType::F32);
    let dtypes = [grad.dtype, param.dtype, buffer_arg.dtype, rounded_arg.dtype];
    let lanes = lanes(len, &dtypes);
    sgd_kernel::launch(
        &grad.client.clone(),
        cubes(len / lanes),
        units(),
        lanes,
        grad.into_buffer_arg(),
        param.clone().into_buffer_arg(),
        buffer_arg.into_buffer_arg(),
        rounded_arg.into_buffer_arg(),
        factor.into_buffer_arg(),
        len / lanes,
        SgdNumbersLaunch {
            grad_factor: grad_factor as f32,
            momentum: momentum as f32,
            weight_decay: weight_decay as f32,
            lr: lr as f32,
        },
        variant,
        dtypes.map(dtype_to_storage_type),
    );
    SgdState {
        param: wrap(param),
        momentum_buffer: momentum_buffer.map(wrap),
        rounded: rounded.map(wrap),
    }
}
