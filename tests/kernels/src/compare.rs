//! Compares an operation on the GPU with the same on the CPU in f32: values, and gradients of all
//! inputs.

use burn::{
    prelude::Device,
    tensor::{DType, Distribution, Tensor, TensorData},
};

/// The tolerance of each dtype against the CPU in f32, relative to the largest element.
pub(super) const DTYPES: [(DType, f64); 3] =
    [(DType::F32, 2e-5), (DType::BF16, 2e-2), (DType::F16, 3e-3)];

/// Standard normal numbers that are exactly representable in `dtype`, on the CPU.
pub(super) fn normal<const D: usize>(shape: [usize; D], dtype: DType) -> TensorData {
    let x = Tensor::<D>::random(shape, Distribution::Normal(0.0, 1.0), &Device::flex());
    x.cast(dtype).cast(DType::F32).into_data()
}

pub(super) fn leaf<const D: usize>(data: &TensorData, device: &Device, dtype: DType) -> Tensor<D> {
    let x = Tensor::<D>::from_data(data.clone(), (&device.clone().autodiff(), dtype));
    x.require_grad()
}

pub(super) fn host<const D: usize>(x: Tensor<D>) -> Result<Vec<f32>, String> {
    let data = x
        .cast(DType::F32)
        .try_into_data()
        .map_err(|error| error.to_string())?;
    data.try_to_vec().map_err(|error| format!("{error:?}"))
}

/// Checks that `found` is within `tolerance` of `expected`, relative to the largest element.
pub(super) fn close(
    what: &str,
    found: &[f32],
    expected: &[f32],
    tolerance: f64,
) -> Result<(), String> {
    if found.len() != expected.len() {
        return Err(format!(
            "{what}: {} elements for {}",
            found.len(),
            expected.len()
        ));
    }
    let size = expected
        .iter()
        .fold(1e-3f64, |size, x| size.max(f64::from(x.abs())));
    let mut worst = 0.0f64;
    for (a, b) in found.iter().zip(expected) {
        let apart = f64::from((a - b).abs()) / size;
        if apart.is_nan() || apart > worst {
            worst = apart;
        }
        if worst.is_nan() {
            break;
        }
    }
    if worst <= tolerance {
        Ok(())
    } else {
        Err(format!(
            "{what}: {worst:.2e} apart, allowed {tolerance:.0e}"
        ))
    }
}

/// Runs `$body` on the GPU in `$dtype` and on the CPU in f32, on the same numbers, and compares the
/// values and the gradients of all inputs. Skips cases that belong to another process (see `part`).
macro_rules! compare {
    ($what:expr, $dtype:expr, $tolerance:expr, [$($input:ident: $shape:expr),+], $body:expr) => { if super::part::is_mine() {
        let dtype: DType = $dtype;
        $(let $input = normal($shape, dtype);)+
        let mut found: [Vec<Vec<f32>>; 2] = Default::default();
        let mut weight = None;
        let devices = [(Device::flex(), DType::F32), (Device::cuda(0), dtype)];
        for ((device, dtype), found) in devices.into_iter().zip(&mut found) {
            $(let $input = leaf(&$input, &device, dtype);)+
            #[allow(clippy::redundant_closure_call, reason = "the closure is the macro's argument")]
            let y = ($body)(&device, $($input.clone()),+);
            let weight = weight.get_or_insert_with(|| normal(y.dims(), $dtype)).clone();
            found.push(host(y.clone())?);
            let weight = Tensor::from_data(weight, (&device.autodiff(), y.dtype()));
            let grads = (y * weight).sum().backward();
            $(found.push(host($input.grad(&grads).ok_or("no gradient")?)?);)+
        }
        let names = ["values", $(concat!("gradient of ", stringify!($input))),+];
        let [expected, found] = found;
        for ((name, found), expected) in names.into_iter().zip(&found).zip(&expected) {
            let what = format!("{} {:?} {name}", $what, dtype);
            close(&what, found, expected, $tolerance)?;
        }
    } };
}
pub(super) use compare;
