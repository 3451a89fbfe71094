//! Collectives of tensors through NCCL, compared with the same collectives on the host.

use burn::{
    prelude::Int,
    tensor::{DType, Float, Tensor, TensorData},
};
use megaburn::{
    collective::{
        CollectiveError, Group, Lane, ReduceOp, run_threads,
        tensors::{self, Work},
    },
    cuda::memory::MemoryReport,
};

use crate::{
    GroupTest,
    ranks::this_gpu,
    rows::{placed, uneven},
};

pub(crate) const GROUP_TESTS: &[GroupTest] = &[
    ("agree_with_the_host_in_every_type_and_shape", every_type),
    ("take_views_and_pitched_rows", views),
    ("take_nothing_at_all", nothing),
    ("send_uneven_rows", uneven),
    ("send_rows_to_where_they_are_wanted", placed),
    ("send_to_one_and_receive_from_one", pairs),
    ("keep_nan_in_a_maximum", nan),
    ("run_beside_what_follows", overlapped),
    ("gather_in_place", in_place),
    (
        "take_no_more_memory_after_a_thousand_rounds",
        thousand_rounds,
    ),
    ("are_refused_to_a_second_rank_of_a_process", second_rank),
];

pub(crate) type Outcome = Result<(), String>;

pub(crate) fn text(error: CollectiveError) -> String {
    error.to_string()
}

/// Checks for bitwise equality; NaN equals NaN.
pub(crate) fn same(got: TensorData, want: TensorData, what: &str) -> Outcome {
    let want = want.convert_dtype(got.dtype());
    if got.shape() != want.shape() {
        return Err(format!(
            "{what}: shape {:?}, not {:?}",
            got.shape(),
            want.shape()
        ));
    }
    let pairs = got.iter::<f64>().zip(want.iter::<f64>()).enumerate();
    match { pairs }.find(|(_, (a, b))| a != b && !(a.is_nan() && b.is_nan())) {
        None => Ok(()),
        Some((at, (a, b))) => Err(format!("{what}: element {at} is {a}, not {b}")),
    }
}

/// Small integers that differ by rank and position; their sums are exact in every type.
fn numbers(rank: usize, shape: &[usize]) -> TensorData {
    let count = shape.iter().product::<usize>();
    let values = (0..count).map(|i| ((i * 5 + 3 * rank + i / 7) % 8) as f32);
    TensorData::new(values.collect::<Vec<_>>(), shape)
}

pub(crate) fn floats<const D: usize>(rank: usize, shape: [usize; D], dtype: DType) -> Tensor<D> {
    Tensor::from_data(numbers(rank, &shape), (&this_gpu(), dtype))
}

fn ints<const D: usize>(rank: usize, shape: [usize; D], dtype: DType) -> Tensor<D, Int> {
    let data = numbers(rank, &shape).convert_dtype(DType::I64);
    Tensor::from_data(data, (&this_gpu(), dtype))
}

/// Checks all collectives on one tensor, whose first dimension is divisible by the number of
/// members.
fn check<const D: usize, K: tensors::CollectiveElement>(
    world: &Group,
    x: &Tensor<D, K>,
    what: &str,
) -> Outcome {
    let host = x.to_data();
    let what = |op: &str| format!("{op} of {what} {:?} {:?}", x.dtype(), x.dims());
    let ops = if x.dtype().is_float() {
        vec![ReduceOp::Sum, ReduceOp::Max, ReduceOp::Mean]
    } else {
        vec![ReduceOp::Sum, ReduceOp::Max]
    };
    for op in ops {
        let got = tensors::all_reduce(x.clone(), op, world, Lane::InOrder).map_err(text)?;
        let want = world.all_reduce(host.clone(), op).map_err(text)?;
        same(
            got.wait().into_data(),
            want,
            &what(&format!("all_reduce {op:?}")),
        )?;
        let got = tensors::reduce_scatter(x.clone(), op, world, Lane::InOrder).map_err(text)?;
        let want = world.reduce_scatter(host.clone(), op).map_err(text)?;
        same(
            got.wait().into_data(),
            want,
            &what(&format!("reduce_scatter {op:?}")),
        )?;
    }
    let got = tensors::all_gather(x.clone(), world, Lane::InOrder).map_err(text)?;
    let want = world.all_gather(host.clone()).map_err(text)?;
    same(got.wait().into_data(), want, &what("all_gather"))?;
    let root = world.size() - 1;
    let got = tensors::broadcast(x.clone(), root, world, Lane::InOrder).map_err(text)?;
    same(
        got.wait().into_data(),
        world.broadcast(host, root).map_err(text)?,
        &what("broadcast"),
    )?;
    let rows = vec![x.dims()[0] / world.size(); world.size()];
    let exchanged = |x| tensors::all_to_all(x, &rows, &rows, world, Lane::InOrder).map_err(text);
    let back = exchanged(exchanged(x.clone())?.wait())?.wait();
    same(
        back.into_data(),
        x.to_data(),
        &what("all_to_all there and back"),
    )
}

fn every_type(world: &Group) -> Outcome {
    let rank = world.rank();
    let n = world.size();
    for (rows, cols) in [(1, 1), (1, 33), (5, 33), (3, 64), (7, 1000), (64, 4097)] {
        for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
            check(world, &floats(rank, [rows * n, cols], dtype), "plain")?;
        }
        for dtype in [DType::I64, DType::I32, DType::U8] {
            check(world, &ints(rank, [rows * n, cols], dtype), "plain")?;
        }
    }
    check(world, &floats(rank, [n * 3_000_001], DType::BF16), "long")?;
    check(world, &floats(rank, [2 * n, 3, 5, 7], DType::F32), "deep")
}

/// Tensors that are not contiguous in memory.
fn views(world: &Group) -> Outcome {
    let rank = world.rank();
    let n = world.size();
    for dtype in [DType::BF16, DType::F32] {
        let x = floats(rank, [6 * n, 33], dtype);
        check(world, &x.clone().slice([0..6 * n, 1..32]), "columns")?;
        check(world, &x.clone().slice([2 * n..4 * n, 0..33]), "rows")?;
        check(
            world,
            &floats(rank, [33, 2 * n], dtype).transpose(),
            "transposed",
        )?;
        let deep = floats(rank, [5, 4 * n, 9], dtype).permute([1, 2, 0]);
        check(world, &deep, "permuted")?;
        let row = floats(rank, [1, 33], dtype).expand([2 * n, 33]);
        check(world, &row, "expanded")?;
        // A result that was just computed, in memory with padded rows.
        check(
            world,
            &(x.clone() + x.clone()).slice([0..2 * n, 3..30]),
            "computed",
        )?;
    }
    check(
        world,
        &ints(rank, [4 * n, 17], DType::I64).slice([0..2 * n, 5..16]),
        "columns",
    )
}

fn nothing(world: &Group) -> Outcome {
    check(
        world,
        &floats(world.rank(), [world.size(), 0], DType::BF16),
        "nothing",
    )?;
    check(world, &floats(world.rank(), [0, 33], DType::F32), "nothing")?;
    // The group must still work afterwards.
    check(
        world,
        &floats(world.rank(), [world.size(), 2], DType::F32),
        "something",
    )
}

fn pairs(world: &Group) -> Outcome {
    let rank = world.rank();
    let n = world.size();
    let next = (rank + 1) % n;
    let last = (rank + n - 1) % n;
    for shape in [[5, 33], [1, 1], [100, 4096]] {
        let mine = floats(rank, shape, DType::BF16);
        let send = || tensors::send(mine.clone(), next, world, Lane::InOrder).map_err(text);
        let receive = || {
            let place = (&this_gpu(), DType::BF16);
            let got = tensors::recv::<2, Float>(shape, place, last, world, Lane::InOrder);
            got.map(Work::wait).map_err(text)
        };
        let got = if rank.is_multiple_of(2) {
            send()?.wait();
            receive()?
        } else {
            let got = receive()?;
            send()?.wait();
            got
        };
        same(
            got.into_data(),
            numbers(last, &shape),
            &format!("{shape:?} from the last rank"),
        )?;
    }
    Ok(())
}

fn nan(world: &Group) -> Outcome {
    let inf = f32::INFINITY;
    let rank = world.rank();
    for dtype in [DType::F32, DType::BF16] {
        let mut values = [1.0 + rank as f32, -inf, inf, 0.0, -2.0, 7.0];
        values[3 + rank % 3] = f32::NAN;
        let x = Tensor::<1>::from_data(values, (&this_gpu(), dtype));
        let want = world.all_reduce(x.to_data(), ReduceOp::Max).map_err(text)?;
        let max = |lane| tensors::all_reduce(x.clone(), ReduceOp::Max, world, lane).map_err(text);
        let got = max(Lane::InOrder)?.wait();
        same(got.into_data(), want.clone(), "maximum with NaN")?;
        let got = max(Lane::Overlapped)?.wait();
        same(got.into_data(), want, "the same, overlapped")?;
    }
    Ok(())
}

/// Many rounds; the host does not wait until the end.
fn overlapped(world: &Group) -> Outcome {
    let rank = world.rank();
    let n = world.size();
    let total = (n * (n + 1) / 2) as f32;
    let mut found = Vec::new();
    for round in 0..40 {
        let scale = 1.0 + round as f32;
        let x = Tensor::<2>::ones([512, 1000 + round], &this_gpu()) * ((rank + 1) as f32 * scale);
        let sum = tensors::all_reduce(x.clone(), ReduceOp::Sum, world, Lane::Overlapped);
        let sum = sum.map_err(text)?;
        let whole = tensors::all_gather(x.clone(), world, Lane::Overlapped).map_err(text)?;
        // Allocate memory meanwhile, and run an in-order collective in between.
        let busy = x.clone().matmul(x.clone().transpose()).sum() * 0.0;
        let max = tensors::all_reduce(x.clone(), ReduceOp::Max, world, Lane::InOrder);
        let max = max.map_err(text)?.wait();
        // Also drop a collective without waiting for it.
        let dropped = tensors::reduce_scatter(x, ReduceOp::Sum, world, Lane::Overlapped);
        drop(dropped.map_err(text)?);
        let sum = sum.wait() + busy.unsqueeze();
        let whole = whole.wait();
        let ends = [
            sum.clone().min(),
            sum.max(),
            whole.sum() / (512 * (1000 + round)) as f32,
        ];
        found.push((scale, Tensor::cat(ends.to_vec(), 0), max.min()));
    }
    for (scale, ends, max) in found {
        let ends = ends
            .into_data()
            .try_to_vec::<f32>()
            .map_err(|error| error.to_string())?;
        let max = max.into_scalar::<f32>();
        let near = |value: f32, want: f32| (value - want).abs() <= 1e-4 * want;
        if !ends.iter().all(|end| near(*end, total * scale)) || max != n as f32 * scale {
            return Err(format!(
                "round {scale}: {ends:?} and {max}, not {}",
                total * scale
            ));
        }
    }
    Ok(())
}

/// Shares at offsets where memory can be sliced and, with other lengths, where it cannot.
fn in_place(world: &Group) -> Outcome {
    let rank = world.rank();
    let n = world.size();
    for (share, dtype) in [
        (256, DType::BF16),
        (128, DType::F32),
        (4096 * 33, DType::BF16),
        (37, DType::F32),
        (0, DType::F32),
    ] {
        let what = format!("{n} shares of {share} {dtype:?} in place");
        let own = floats(rank, [share], dtype);
        let want = world.all_gather(own.to_data()).map_err(text)?;
        let whole = Tensor::<1>::full([n * share], f32::NAN, (&this_gpu(), dtype));
        let at = rank * share..(rank + 1) * share;
        let whole = if share == 0 {
            whole
        } else {
            whole.slice_assign([at], own.clone())
        };
        let held = whole.clone();
        let started = tensors::all_gather_in_place(whole, world, Lane::Overlapped).map_err(text)?;
        // Allocate memory meanwhile.
        let busy =
            floats(rank, [512, 512], DType::F32).matmul(floats(rank, [512, 512], DType::F32));
        same(started.wait().into_data(), want.clone(), &what)?;
        if (share * dtype.size()).is_multiple_of(512) {
            same(held.into_data(), want, &format!("{what}, as others see it"))?;
        }
        drop(busy);
        // Members need not agree on where the result is stored.
        let want = world.all_gather(own.to_data()).map_err(text)?;
        let got = match rank {
            0 => tensors::all_gather(own, world, Lane::Overlapped),
            _ => {
                let whole = Tensor::cat(vec![own; n], 0);
                tensors::all_gather_in_place(whole, world, Lane::Overlapped)
            }
        };
        same(
            got.map_err(text)?.wait().into_data(),
            want,
            &format!("{what} on some"),
        )?;
    }
    Ok(())
}

/// Additional memory that rounds ahead of the GPU may need. A leak of one round would be multiplied
/// by 800.
const PAGES: u64 = 8 << 20;

fn thousand_rounds(world: &Group) -> Outcome {
    let device = this_gpu();
    let mut x = Tensor::<2>::ones([256, 333], &device);
    let mut early = 0;
    for round in 0..1000 {
        let sum = tensors::all_reduce(x.clone(), ReduceOp::Mean, world, Lane::InOrder);
        let sum = sum.map_err(text)?.wait();
        let later = tensors::all_gather(x, world, Lane::Overlapped).map_err(text)?;
        x = later.wait().slice([0..256, 0..333]) * 0.5 + sum * 0.5;
        if round % 100 == 99 {
            device.sync().map_err(|error| error.to_string())?;
            let used = MemoryReport::of(&device)
                .ok_or("no memory report")?
                .reserved;
            if round == 199 {
                early = used;
            } else if early > 0 && used > early + PAGES {
                return Err(format!(
                    "{early} bytes after 200 rounds, {used} after {}",
                    round + 1
                ));
            }
        }
    }
    same(
        x.into_data(),
        TensorData::new(vec![1f32; 256 * 333], [256, 333]),
        "a thousand rounds",
    )
}

fn second_rank(world: &Group) -> Outcome {
    check(
        world,
        &floats(world.rank(), [world.size(), 2], DType::F32),
        "first rank",
    )?;
    let ends = run_threads(2, Default::default(), |threads| {
        let x = Tensor::<1>::ones([3], &this_gpu());
        tensors::all_reduce(x, ReduceOp::Sum, &threads, Lane::InOrder).map(drop)
    });
    for end in ends {
        let told = end
            .err()
            .ok_or("a second rank was let onto the GPU")?
            .to_string();
        if !told.contains("megaburn launch") {
            return Err(format!("the error does not say what to do: {told}"));
        }
    }
    check(
        world,
        &floats(world.rank(), [world.size(), 2], DType::F32),
        "first rank again",
    )
}
