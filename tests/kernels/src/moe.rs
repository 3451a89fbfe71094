//! Tests of permute and unpermute, and of the permutation by expert.

use burn::{
    prelude::{Device, Int},
    tensor::{DType, Distribution, Tensor, TensorData},
};
use megaburn_kernels::{
    ExpertPermutation, ep_ranks_of_experts, permutation_by_expert, permute, unpermute,
};

use super::compare::*;

pub(super) const TESTS: &[super::Test] = &[
    ("rows_are_taken_and_summed_as_on_the_cpu", rows),
    ("rows_of_views_too", views),
    ("rows_that_are_nobodys_are_not_a_number", unknown),
    ("slots_are_put_in_the_order_of_experts", order),
    ("tokens_go_once_to_each_rank", ranks),
];

/// Fresh random numbers below `end`.
pub(super) fn random(len: usize, end: usize) -> Vec<i64> {
    let drawn = Tensor::<1>::random([len], Distribution::Uniform(0.0, 1.0), &Device::flex());
    let number = |x: f64| ((x * end as f64) as usize).min(end - 1) as i64;
    drawn.into_data().iter::<f64>().map(number).collect()
}

pub(super) fn ints<const D: usize>(
    of: &[i64],
    shape: [usize; D],
    device: &Device,
    dtype: DType,
) -> Tensor<D, Int> {
    Tensor::from_data(TensorData::new(of.to_vec(), shape), (device, dtype))
}

pub(super) fn numbers<const D: usize>(x: Tensor<D, Int>) -> Result<Vec<i64>, String> {
    let data = x.try_into_data().map_err(|error| error.to_string())?;
    Ok(data.iter::<i64>().collect())
}

/// Fills freed memory of these sizes with NaN, so that the next results of the same size are
/// written into it.
pub(super) fn poison(bytes: &[usize]) -> Result<(), String> {
    let device = Device::cuda(0);
    let len = |bytes: &usize| bytes.div_ceil(4).max(1);
    let all = bytes.iter().flat_map(|bytes| [len(bytes); 3]);
    let all: Vec<_> = all
        .map(|len| Tensor::<1>::full([len], f32::NAN, &device))
        .collect();
    all.into_iter().try_for_each(|x| host(x).map(drop))
}

fn rows() -> Result<(), String> {
    let shapes = [
        ([9, 64], [13, 2]),
        ([300, 24], [70, 8]),
        ([7, 5], [4, 1]),
        ([33, 258], [11, 5]),
        ([1, 1], [3, 3]),
        ([5, 8], [0, 2]),
        ([0, 8], [3, 2]),
        ([4, 0], [3, 2]),
    ];
    for (dtype, tolerance) in DTYPES {
        for ([m, n], [t, k]) in shapes {
            for of_index in [DType::I32, DType::I64] {
                let what = format!("rows {m}x{n} of {t}x{k} {dtype:?} {of_index:?}");
                let x = normal([m, n], dtype);
                // The index `m` names no row.
                let index = random(t * k, m + 1);
                let some: Vec<i64> = index
                    .iter()
                    .copied()
                    .filter(|&row| row < m as i64)
                    .collect();
                let run = |device: &Device, dtype| -> Result<_, String> {
                    let x = || Tensor::<2>::from_data(x.clone(), (device, dtype));
                    let taken = permute(x(), ints(&some, [some.len()], device, of_index));
                    let summed = unpermute(x(), ints(&index, [t, k], device, of_index));
                    Ok([host(taken)?, host(summed)?])
                };
                let [taken, summed] = run(&Device::flex(), DType::F32)?;
                poison(&[some.len() * n * dtype.size(), t * n * dtype.size()])?;
                let found = run(&Device::cuda(0), dtype)?;
                close(&format!("{what}: taken"), &found[0], &taken, 0.0)?;
                close(&format!("{what}: summed"), &found[1], &summed, tolerance)?;
                if run(&Device::cuda(0), dtype)? != found {
                    return Err(format!("{what}: other bits the second time"));
                }
            }
        }
    }
    Ok(())
}

fn views() -> Result<(), String> {
    let index = random(24, 6);
    let x = normal([12, 40], DType::F32);
    type Cut = fn(Tensor<2>) -> Tensor<2>;
    let cuts: [Cut; 4] = [
        |x| x.narrow(1, 8, 20),
        |x| x.narrow(0, 3, 6),
        |x| x.transpose().narrow(0, 0, 6),
        |x| x.narrow(0, 2, 1).expand([6, 40]),
    ];
    for (i, cut) in cuts.into_iter().enumerate() {
        let run = |device: &Device| -> Result<_, String> {
            let x = || cut(Tensor::<2>::from_data(x.clone(), device));
            let taken = permute(x(), ints(&index, [24], device, DType::I32));
            let summed = unpermute(
                x(),
                ints(&index, [3, 8], device, DType::I32).narrow(1, 1, 5),
            );
            Ok([host(taken)?, host(summed)?].concat())
        };
        let expected = run(&Device::flex())?;
        let found = run(&Device::cuda(0))?;
        close(&format!("rows of view {i}"), &found, &expected, 1e-6)?;
    }
    Ok(())
}

fn unknown() -> Result<(), String> {
    let device = Device::cuda(0);
    let x = || Tensor::<2>::ones([3, 4], &device);
    let taken = host(permute(x(), ints(&[-1, 2, 3], [3], &device, DType::I64)))?;
    let index = ints(&[0, -1, 1, 3, 4, 2], [3, 2], &device, DType::I32);
    let summed = host(unpermute(x(), index))?;
    let is_nan = |x: &[f32]| {
        x.chunks(4)
            .map(|row| row.iter().all(|x| x.is_nan()))
            .collect()
    };
    let found: [Vec<bool>; 2] = [is_nan(&taken), is_nan(&summed)];
    if found == [vec![true, false, true], vec![true, false, true]] && summed[4..8] == [1.0; 4] {
        Ok(())
    } else {
        Err(format!("{taken:?} {summed:?}"))
    }
}

fn order() -> Result<(), String> {
    // Fewer assignments than a chunk of 256, several chunks, and several chunks for each of the
    // most cubes.
    let shapes = [[0, 2], [3, 1], [100, 2], [700, 1], [259, 8], [4200, 8]];
    for num_experts in [1, 8, 60, 256, 600] {
        for [t, k] in shapes {
            for (of_experts, dropped) in [(DType::I32, 0), (DType::I64, 2)] {
                let what = format!("order of {t}x{k} of {num_experts} experts, {dropped} no ones");
                let mut experts = random(t * k, num_experts + dropped);
                // Numbers that are not experts: one past the last, and -1.
                let last = num_experts as i64;
                experts
                    .iter_mut()
                    .filter(|e| **e > last)
                    .for_each(|expert| *expert = -1);
                let run = |device: &Device| -> Result<_, String> {
                    let experts = ints(&experts, [t, k], device, of_experts);
                    let ExpertPermutation {
                        counts,
                        slots,
                        tokens,
                        rows,
                    } = permutation_by_expert(experts, num_experts);
                    let dtypes = [counts.dtype(), slots.dtype(), tokens.dtype(), rows.dtype()];
                    if dtypes != [DType::I32; 4] || rows.dims() != [t, k] {
                        return Err(format!("{what}: {dtypes:?} and rows {:?}", rows.dims()));
                    }
                    Ok([
                        numbers(counts)?,
                        numbers(slots)?,
                        numbers(tokens)?,
                        numbers(rows)?,
                    ])
                };
                let expected = run(&Device::flex())?;
                poison(&[4 * t * k, 4 * num_experts])?;
                let found = run(&Device::cuda(0))?;
                let names = ["counts", "slots", "tokens", "rows"];
                for ((name, found), expected) in names.into_iter().zip(&found).zip(&expected) {
                    if found != expected {
                        let at = found.iter().zip(expected).position(|(a, b)| a != b);
                        return Err(format!("{what}: {name} differ, first at {at:?}"));
                    }
                }
            }
        }
    }
    Ok(())
}

fn ranks() -> Result<(), String> {
    for ([t, k], of_rank) in [
        ([0, 2], 3),
        ([3, 1], 1),
        ([700, 2], 4),
        ([259, 8], 16),
        ([1, 5], 7),
    ] {
        for dtype in [DType::I32, DType::I64] {
            let mut experts = random(t * k, 8 * of_rank + 2);
            let last = 8 * of_rank as i64;
            experts
                .iter_mut()
                .filter(|e| **e >= last)
                .for_each(|expert| *expert = -1);
            let run = |device: &Device| {
                numbers(ep_ranks_of_experts(
                    ints(&experts, [t, k], device, dtype),
                    of_rank,
                ))
            };
            let expected = run(&Device::flex())?;
            poison(&[4 * t * k])?;
            let found = run(&Device::cuda(0))?;
            if found != expected {
                return Err(format!("{t}x{k} of {of_rank}: {found:?}, not {expected:?}"));
            }
        }
    }
    Ok(())
}
