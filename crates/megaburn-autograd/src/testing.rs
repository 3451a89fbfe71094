//! Helpers that tests of operations share.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::{Device, Distribution, Tensor, quantization::QuantScheme};

/// A device with autodiff.
pub fn device() -> Device {
    Device::flex().autodiff()
}

/// A fresh leaf of standard normal numbers.
pub fn normal<const D: usize>(shape: [usize; D]) -> Tensor<D> {
    leaf(Tensor::random(
        shape,
        Distribution::Normal(0.0, 1.0),
        &device(),
    ))
}

/// The same numbers as a new leaf, without the operations that made them. (Two graphs would share
/// those operations, and the first backward would consume them for the second.)
pub fn leaf<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    Tensor::from_inner(x.inner()).require_grad()
}

/// Fresh standard normal numbers without a gradient. (Burn's `detach` would keep a leaf a leaf.)
pub fn constant<const D: usize>(shape: [usize; D]) -> Tensor<D> {
    Tensor::from_inner(normal(shape).inner())
}

/// Fresh standard normal numbers on `device`, a leaf if the device has autodiff.
pub fn normal_on<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    let x = normal(shape);
    if device.is_autodiff() { x } else { x.inner() }
}

/// A tensor of a dtype that no operation supports.
pub fn quantized<const D: usize>(shape: [usize; D]) -> Tensor<D> {
    normal(shape)
        .inner()
        .quantize_dynamic(&QuantScheme::default())
}

/// Asserts that `call` panics with a message that contains `message`.
pub fn assert_refused<T>(call: impl FnOnce() -> T, message: &str) {
    let panic = catch_unwind(AssertUnwindSafe(|| drop(call())));
    let panic = panic.expect_err("it was accepted");
    let said = panic.downcast_ref::<String>().cloned();
    let said = said.or_else(|| panic.downcast_ref::<&str>().map(|said| said.to_string()));
    let said = said.expect("the panic has a message");
    assert!(said.contains(message), "unexpected message: {said}");
}

/// The elements in f64, whatever the dtype.
pub fn values<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

/// The largest difference, relative to the largest element of `b` (or to `least` if that is less).
fn distance_over<const D: usize>(a: Tensor<D>, b: Tensor<D>, least: f64) -> f64 {
    assert_eq!(a.dims(), b.dims());
    let a = values(a);
    let b = values(b);
    let size = b.iter().fold(least, |m, v| m.max(v.abs()));
    a.iter()
        .zip(&b)
        .map(|(a, b)| if a == b { 0.0 } else { (a - b).abs() })
        .fold(0.0, |m, d| {
            assert!(!d.is_nan(), "a result is NaN");
            f64::max(m, d / size)
        })
}

/// The largest difference, relative to the largest element of `b` (or to 1 if that is less).
pub fn distance<const D: usize>(a: Tensor<D>, b: Tensor<D>) -> f64 {
    distance_over(a, b, 1.0)
}

/// Asserts that two tensors agree within `tolerance`, relative to the largest element.
pub fn assert_close<const D: usize>(a: Tensor<D>, b: Tensor<D>, tolerance: f64) {
    let distance = distance(a, b);
    assert!(
        distance <= tolerance,
        "differ by {distance:e}, allowed {tolerance:e}"
    );
}

/// Asserts that two gradients of an input agree within `tolerance`, relative to the largest element
/// or to the size that is typical for them: each element is a sum over the `results / elements`
/// results that the input's element took part in, and a sum of `k` standard normal numbers is
/// about `sqrt(k)`. (A sum that happens to be near 0 still has the rounding error of its terms.)
pub fn assert_close_gradients<const D: usize>(
    a: Tensor<D>,
    b: Tensor<D>,
    results: usize,
    tolerance: f64,
) {
    let terms = results as f64 / b.shape().num_elements().max(1) as f64;
    let distance = distance_over(a, b, terms.sqrt().max(1.0));
    assert!(
        distance <= tolerance,
        "gradients differ by {distance:e}, allowed {tolerance:e}"
    );
}

/// Asserts that two tensors are equal bit for bit.
pub fn assert_same_bits<const D: usize>(a: Tensor<D>, b: Tensor<D>) {
    let a = a.into_data();
    let b = b.into_data();
    assert_eq!((a.shape(), a.dtype()), (b.shape(), b.dtype()));
    assert_eq!(a.as_bytes(), b.as_bytes(), "the bits differ");
}

/// Asserts that `$fast` and `$slow` have the same values and, for random output gradients, the same
/// gradient of each listed input. The inputs are names of leaves that the expressions clone.
#[macro_export]
macro_rules! assert_same_function {
    ($tolerance:expr, [$($input:ident),+], $fast:expr, $slow:expr) => {{
        let (fast, slow) = ($fast, $slow);
        $crate::testing::assert_close(fast.clone(), slow.clone(), $tolerance);
        let results = fast.shape().num_elements();
        let weight = $crate::testing::leaf($crate::testing::normal(fast.dims()).cast(fast.dtype()));
        let fast = (fast * weight.clone()).sum().backward();
        let slow = (slow * weight).sum().backward();
        $(
            let (a, b) = ($input.grad(&fast), $input.grad(&slow));
            $crate::testing::assert_close_gradients(
                a.expect(concat!("fast gradient of ", stringify!($input))),
                b.expect(concat!("reference gradient of ", stringify!($input))),
                results,
                $tolerance,
            );
        )+
    }};
}
pub use crate::assert_same_function;
