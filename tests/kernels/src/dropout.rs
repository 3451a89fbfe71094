//! Tests of dropout: the masks on the GPU equal those on the CPU bit for bit.

use burn::{
    prelude::Device,
    tensor::{DType, Tensor},
};
use megaburn_kernels::*;
use megaburn_mesh::{PositionRng, Purpose};

use super::compare::*;

pub(super) const TESTS: &[super::Test] = &[
    ("dropout_masks", masks),
    ("dropout_draws", draws),
    ("dropout_gradients", gradients),
    ("bias_dropout_add", added),
    ("bias_dropout_add_of_views", views),
];

fn rng() -> PositionRng {
    PositionRng::new(42, Purpose::Dropout, "blocks.3").with_stream((9 << 32) + 5)
}

/// Compares the mask of a shard on both devices.
fn same_mask<const D: usize>(shape: [usize; D], p: f64, key: &DropoutKey) -> Result<(), String> {
    let [expected, found] = [Device::flex(), Device::cuda(0)]
        .map(|device| host(dropout(Tensor::<D>::ones(shape, &device), p, key.clone())));
    if expected? == found? {
        Ok(())
    } else {
        Err(format!("{p} of {shape:?}, {key:?}: another mask"))
    }
}

/// Unsharded tensors and shards, with ends at block boundaries of the random numbers and elsewhere.
fn masks() -> Result<(), String> {
    for p in [0.1, 0.5] {
        same_mask([37], p, &DropoutKey::new(rng(), &[37]))?;
        same_mask([5, 64], p, &DropoutKey::new(rng(), &[5, 64]))?;
        same_mask(
            [5, 8],
            p,
            &DropoutKey::new(rng(), &[5, 64]).with_offset(1, 16),
        )?;
        same_mask(
            [5, 8],
            p,
            &DropoutKey::new(rng(), &[5, 64]).with_offset(1, 17),
        )?;
        let key = DropoutKey::new(rng(), &[6, 4, 24])
            .with_offset(0, 2)
            .with_offset(1, 1);
        same_mask([3, 2, 24], p, &key)?;
        same_mask([3, 2, 7], p, &key.with_offset(2, 3))?;
        let key = DropoutKey::new(rng(), &[4, 3, 5, 8])
            .with_offset(1, 1)
            .with_offset(2, 2);
        same_mask([4, 2, 3, 8], p, &key)?;
        let key = DropoutKey::new(rng(), &[3, 4, 3, 5, 12]).with_offset(1, 2);
        same_mask([3, 2, 2, 3, 4], p, &key)?;
        // Blocks whose index has more than 32 bits.
        let key = DropoutKey::new(rng(), &[1 << 40, 3, 8]).with_offset(0, (1 << 39) + 77);
        same_mask([5, 2, 8], p, &key.with_offset(1, 1))?;
    }
    Ok(())
}

/// Checks each random number: its element is dropped at the next larger probability, but not at
/// this one.
fn draws() -> Result<(), String> {
    let rng = rng();
    let n = 40;
    let ones = Tensor::<1>::ones([n], &Device::cuda(0));
    for index in 0..n {
        let draw = f64::from(rng.uniform(index as u64));
        for (p, dropped) in [(draw, false), (draw + (-24f64).exp2(), true)] {
            let y = host(dropout(ones.clone(), p, DropoutKey::new(rng, &[n])))?;
            if (y[index] == 0.0) != dropped {
                return Err(format!(
                    "element {index} is {} at probability {p}",
                    y[index]
                ));
            }
        }
    }
    Ok(())
}

fn gradients() -> Result<(), String> {
    for (dtype, tolerance) in DTYPES {
        for shape in [[4, 2, 64], [5, 3, 7]] {
            compare!(format!("dropout {shape:?}"), dtype, tolerance, [x: shape], |_, x| {
                dropout::<3>(x, 0.3, DropoutKey::new(rng(), &shape))
            });
        }
    }
    Ok(())
}

fn added() -> Result<(), String> {
    for (dtype, tolerance) in DTYPES {
        for ([s, b, n], p) in [([9, 2, 64], 0.1), ([5, 3, 7], 0.1), ([300, 2, 8], 0.0)] {
            let shape = [s, b, n];
            let what = format!("bias_dropout_add {shape:?} {p}");
            let key = DropoutKey::new(rng(), &[s + 1, b, n]).with_offset(0, 1);
            compare!(what, dtype, tolerance, [x: shape, residual: shape], |_, x, residual| {
                bias_dropout_add::<3>(x, None, residual, p, key.clone())
            });
            compare!(
                what,
                dtype,
                tolerance,
                [x: shape, residual: shape, bias: [n]],
                |_, x, residual, bias| {
                    bias_dropout_add::<3>(x, Some(bias), residual, p, key.clone())
                }
            );
        }
    }
    Ok(())
}

/// Rows sliced out of longer ones, a residual with swapped dimensions, and a bias of another dtype.
fn views() -> Result<(), String> {
    for (dtype, tolerance) in DTYPES {
        for [s, b, n] in [[4, 3, 32], [3, 5, 6]] {
            let key = DropoutKey::new(rng(), &[s, b, n]);
            compare!(
                format!("view {s}x{b}x{n}"),
                dtype,
                tolerance,
                [x: [s, b, 2 * n + 8], residual: [b, s, n], bias: [n]],
                |_, x, residual, bias| {
                    let (x, residual, bias): (Tensor<3>, Tensor<3>, Tensor<1>) =
                        (x, residual, bias);
                    let (x, bias) = (x.narrow(2, 8, n), Some(bias.cast(DType::F32)));
                    bias_dropout_add(x, bias, residual.swap_dims(0, 1), 0.2, key.clone())
                }
            );
        }
    }
    Ok(())
}
