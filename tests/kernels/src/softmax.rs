//! Tests of the softmax of scores with every mask.

use burn::{
    prelude::{Bool, Device},
    tensor::{DType, Tensor, TensorData},
};
use megaburn_kernels::{SoftmaxMask, reference, scale_mask_softmax};

use super::compare::*;

pub(super) const TESTS: &[super::Test] = &[
    ("softmax_under_every_mask", softmaxes),
    ("scores_that_others_hold_stay", held),
];

/// A mask per sequence and head, or one for all. The second query sees no key, and no query sees
/// the first key.
fn mask([b, h, s_q, s_k]: [usize; 4], device: &Device) -> SoftmaxMask {
    let hidden =
        |i: usize| i.is_multiple_of(s_k) || i / s_k % s_q == 1 || (i * 7919).is_multiple_of(5);
    let bits: Vec<bool> = (0..b * h * s_q * s_k).map(hidden).collect();
    let bits = TensorData::new(bits, [b, h, s_q, s_k]);
    SoftmaxMask::Masked(Tensor::<4, Bool>::from_data(bits, device))
}

fn softmaxes() -> Result<(), String> {
    for (dtype, _) in DTYPES {
        let tolerance = match dtype {
            DType::F32 => 2e-6,
            DType::BF16 => 8e-3,
            _ => 1e-3,
        };
        // One plane per row, several, and rows too long for registers; with full vectors and
        // without.
        for shape in [
            [2, 3, 9, 64],
            [1, 2, 5, 7],
            [2, 1, 3, 2056],
            [1, 1, 2, 17000],
        ] {
            let [b, _, s_q, s_k] = shape;
            for size in [1.0, 1e4] {
                for kind in 0..5 {
                    let what = format!("softmax {shape:?} {dtype:?} mask {kind} times {size}");
                    let masked = |device: &Device| match kind {
                        0 => SoftmaxMask::None,
                        1 => SoftmaxMask::Causal,
                        2 => mask([1, 1, s_q, s_k], device),
                        3 => mask([b, 1, s_q, s_k], device),
                        _ => mask(shape, device),
                    };
                    let scores = normal(shape, dtype);
                    let weight = normal(shape, dtype);
                    let run = |device: &Device, dtype| {
                        let x: Tensor<4> = leaf(&scores, device, dtype);
                        // No other tensor shares these scores, so the kernel may work in place.
                        let own = x.clone() * 1.0;
                        let softmax = if device == &Device::flex() {
                            reference::scale_mask_softmax
                        } else {
                            scale_mask_softmax
                        };
                        let p = softmax(own, masked(device), 0.35 * size);
                        let on = (&device.clone().autodiff(), dtype);
                        let weight = Tensor::from_data(weight.clone(), on);
                        let grads = (p.clone() * weight).sum().backward();
                        let dx = x.grad(&grads).ok_or("no gradient")? / size;
                        // Where one key takes all the weight, gradients of about 1 cancel; so
                        // compare with 1 instead of with the difference.
                        let dx = [host(dx)?, vec![1.0]].concat();
                        Ok::<_, String>([host(p)?, dx])
                    };
                    let expected = run(&Device::flex(), DType::F32)?;
                    let found = run(&Device::cuda(0), dtype)?;
                    for (name, i) in [("values", 0), ("gradient", 1)] {
                        close(
                            &format!("{what}: {name}"),
                            &found[i],
                            &expected[i],
                            tolerance,
                        )?;
                    }
                }
            }
        }
    }
    Ok(())
}

fn held() -> Result<(), String> {
    let data = normal([1, 2, 3, 48], DType::F32);
    let x = Tensor::<4>::from_data(data.clone(), &Device::cuda(0));
    let _ = host(scale_mask_softmax(x.clone(), SoftmaxMask::Causal, 0.5))?;
    let before = host(Tensor::<4>::from_data(data, &Device::flex()))?;
    close("scores that are held", &host(x)?, &before, 0.0)
}
