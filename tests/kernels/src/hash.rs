//! Compares hashes that a GPU computes with those of the host.

use std::ops::Range;

use burn::{
    prelude::Device,
    tensor::{DType, Distribution, Tensor, TensorData},
};
use megaburn_kernels::{PendingHash, Runs};

pub(super) const TESTS: &[super::Test] = &[
    ("hashes_are_those_of_the_host", hashes),
    ("a_flipped_bit_changes_a_hash", flips),
];

const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

fn flat(len: usize) -> Runs {
    Runs {
        start: 0,
        len,
        stride: len,
    }
}

fn normal(len: usize, dtype: DType) -> TensorData {
    let x = Tensor::<1>::random([len], Distribution::Normal(0.0, 1.0), &Device::flex());
    x.cast(dtype).into_data()
}

fn one(hash: PendingHash) -> Result<u64, String> {
    Ok(PendingHash::read(&[hash])?[0])
}

fn hashes() -> Result<(), String> {
    let gpu = Device::cuda(0);
    // Of one run and of many, whole and in part, ragged, and of more elements than all cubes take at
    // once. Some tensors are parts that begin at an offset.
    let runs = |start, len, stride| Runs { start, len, stride };
    let cases: [(usize, usize, Runs, Range<usize>); 7] = [
        (1, 0, flat(1), 0..1),
        (37, 0, flat(37), 3..36),
        (6_000_001, 0, flat(6_000_001), 0..6_000_001),
        (6_000_001, 0, runs(1, 7, 11), 5..3_000_000),
        (
            4096,
            5_000_000_000,
            flat(6_000_000_000),
            5_000_000_003..5_000_004_096,
        ),
        (4096, 300, runs(290, 13, 64), 20..600),
        (70_000, 0, runs(0, 35_000, 35_000), 0..70_000),
    ];
    for (len, offset, runs, indices) in cases {
        for dtype in DTYPES {
            let data = normal(len, dtype);
            let x = Tensor::<1>::from_data(data.clone(), (&gpu, dtype));
            let found = one(PendingHash::of(x.clone(), offset, runs, indices.clone())?)?;
            let expected = one(PendingHash::of_data(&data, offset, runs, indices.clone()))?;
            if found != expected {
                return Err(format!(
                    "{indices:?} of {runs:?} of {len} {dtype:?}: {found:x}, not {expected:x}"
                ));
            }
            // A view of a larger tensor.
            let around = Tensor::cat(vec![x.clone(), x.clone(), x], 0);
            let view = around.narrow(0, len, len);
            let of_view = one(PendingHash::of(view, offset, runs, indices.clone())?)?;
            if of_view != expected {
                return Err(format!(
                    "{indices:?} of a view of {len} {dtype:?}: {of_view:x}"
                ));
            }
        }
    }
    Ok(())
}

/// Many hashes are read at once, and one bit in any place changes only its own.
fn flips() -> Result<(), String> {
    let gpu = Device::cuda(0);
    let len = 100_003;
    let data = normal(len, DType::F32);
    let values: Vec<f32> = data.try_to_vec().map_err(|error| error.to_string())?;
    let hash = |values: &[f32]| {
        let x = Tensor::<1>::from_floats(values, &gpu);
        PendingHash::of(x, 0, flat(len), 0..len)
    };
    let mut all = vec![hash(&values)?];
    for at in [0, 1, 4095, 4096, 77_777, len - 1] {
        for bit in [0, 9, 31] {
            let mut other = values.clone();
            other[at] = f32::from_bits(other[at].to_bits() ^ 1 << bit);
            all.push(hash(&other)?);
        }
    }
    all.push(hash(&values)?);
    let mut read = PendingHash::read(&all)?;
    if read.pop() != read.first().copied() {
        return Err("the same values have two hashes".into());
    }
    let num = read.len();
    read.sort_unstable();
    read.dedup();
    match read.len() == num {
        true => Ok(()),
        false => Err(format!("{num} tensors have {} hashes", read.len())),
    }
}
