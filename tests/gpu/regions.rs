//! Differentiable region functions through NCCL, forward and backward, compared with rank threads
//! on the CPU.

use burn::{
    prelude::Device,
    tensor::{DType, Tensor, TensorData},
};
use megaburn::collective::{
    CollectiveError, Group, GroupOptions,
    region::{
        all_to_all, copy_to, gather_from_last_dim, gather_from_sequence,
        gather_from_sequence_to_replicas, max_over, reduce_from, reduce_scatter_to_sequence,
        ring_shift, scatter_to_last_dim, scatter_to_sequence,
    },
    run_threads,
};

use crate::{
    GroupTest,
    collectives::{Outcome, same},
    ranks::this_gpu,
};

pub(crate) const GROUP_TESTS: &[GroupTest] = &[
    ("give_what_they_give_on_the_cpu", every_region),
    ("keep_nan_in_a_maximum", nan),
    ("run_in_order_with_kernels_a_thousand_times", in_order),
];

type Region = fn(Tensor<3>, &Group) -> Tensor<3>;

const REGIONS: [(&str, Region); 15] = [
    ("copy_to", copy_to),
    ("reduce_from", reduce_from),
    ("scatter_to_last_dim", scatter_to_last_dim),
    ("gather_from_last_dim", gather_from_last_dim),
    ("scatter_to_sequence", scatter_to_sequence),
    ("gather_from_sequence", gather_from_sequence),
    (
        "gather_from_sequence_to_replicas",
        gather_from_sequence_to_replicas,
    ),
    ("reduce_scatter_to_sequence", reduce_scatter_to_sequence),
    ("heads to sequence", |x, group| all_to_all(x, 2, 0, group)),
    ("sequence to heads", |x, group| all_to_all(x, 0, 2, group)),
    ("middle to last", |x, group| all_to_all(x, 1, 2, group)),
    ("last to last", |x, group| all_to_all(x, 2, 2, group)),
    ("ring_shift on", |x, group| ring_shift(x, 1, group)),
    ("ring_shift back by two", |x, group| {
        ring_shift(x, -2, group)
    }),
    ("a view of a view", |x, group| {
        let x = gather_from_last_dim(x.swap_dims(0, 1), group).swap_dims(1, 2);
        reduce_scatter_to_sequence(x, group)
    }),
];

/// Integers, so that sums are exact.
fn numbers(shape: [usize; 3], salt: usize) -> TensorData {
    let count = shape.iter().product::<usize>();
    let values = (0..count).map(|i| ((i * 7 + 11 * salt + i / 5) % 9) as f32 - 4.0);
    TensorData::new(values.collect::<Vec<_>>(), shape)
}

/// The output of a region for this rank's tensor, and the gradient of its input.
fn run(region: Region, group: &Group, device: &Device, dtype: DType, shape: [usize; 3]) -> Pair {
    let tensor = |data: TensorData, device: &Device| Tensor::<3>::from_data(data, (device, dtype));
    let x = tensor(numbers(shape, group.rank()), &device.clone().autodiff()).require_grad();
    let y = region(x.clone(), group);
    let weight = tensor(numbers(y.dims(), 10 + group.rank()), device);
    let grads = (y.clone() * Tensor::from_inner(weight)).sum().backward();
    let grad = x.grad(&grads).expect("the input is tracked");
    [y.inner().into_data(), grad.into_data()]
}

type Pair = [TensorData; 2];

fn every_region(world: &Group) -> Outcome {
    let n = world.size();
    for dtype in [DType::F32, DType::BF16] {
        // Widths with and without padded rows, and a single row.
        for shape in [
            [2 * n, n, 3 * n],
            [n, 2 * n, 64 * n],
            [n, n, n],
            [4 * n, n, 33 * n],
        ] {
            for (name, region) in REGIONS {
                let want = run_threads(n, GroupOptions::default(), |group| {
                    let pair = run(region, &group, &Device::flex(), dtype, shape);
                    Ok::<_, CollectiveError>(pair)
                });
                let want = want
                    .into_iter()
                    .nth(world.rank())
                    .expect("there are as many ranks");
                let want = want.map_err(|error| error.to_string())?;
                let got = run(region, world, &this_gpu(), dtype, shape);
                for (part, (got, want)) in ["forward", "backward"]
                    .iter()
                    .zip(got.into_iter().zip(want))
                {
                    same(got, want, &format!("{name} {part}, {dtype:?} {shape:?}"))?;
                }
            }
        }
    }
    Ok(())
}

fn nan(world: &Group) -> Outcome {
    let mut values = [[
        1.0 + world.rank() as f32,
        f32::NEG_INFINITY,
        3.0,
        -1.0,
        0.5,
        2.0,
    ]; 5];
    values[world.rank() % 5][2 + world.rank() % 2] = f32::NAN;
    let x = Tensor::<2>::from_data(values, &this_gpu());
    let all = run_threads(world.size(), GroupOptions::default(), |group| {
        let mut values = [[
            1.0 + group.rank() as f32,
            f32::NEG_INFINITY,
            3.0,
            -1.0,
            0.5,
            2.0,
        ]; 5];
        values[group.rank() % 5][2 + group.rank() % 2] = f32::NAN;
        let x = Tensor::<2>::from_data(values, &Device::flex());
        Ok::<_, CollectiveError>(max_over(x, &group).into_data())
    });
    let want = all
        .into_iter()
        .next()
        .expect("there is at least one rank")
        .map_err(|error| error.to_string())?;
    same(max_over(x, world).into_data(), want, "maximum with NaN")
}

/// A producer kernel, a collective and a consumer kernel, with one read at the end. A collective
/// that starts early or a consumer that does not wait changes the result.
fn in_order(world: &Group) -> Outcome {
    let n = world.size() as f32;
    let mut x = Tensor::<2>::ones([257, 129], &this_gpu());
    for round in 0..1000 {
        let scale = 1.0 + (round % 7) as f32;
        x = reduce_from(x * scale, world) / (n * scale);
        if round % 3 == 0 {
            x = gather_from_sequence(x.slice([0..257, 0..129]), world).slice([0..257, 0..129]);
        }
    }
    let [low, high] = [x.clone().min(), x.max()].map(|x| x.into_scalar::<f32>());
    if (low - 1.0).abs() > 1e-3 || (high - 1.0).abs() > 1e-3 {
        return Err(format!(
            "between {low} and {high} after a thousand rounds, not 1"
        ));
    }
    Ok(())
}
