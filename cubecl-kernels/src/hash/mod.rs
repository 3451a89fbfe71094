//! Hashes of the elements of a tensor, by which copies on several ranks are compared. A GPU computes
//! them, and at most 8 KiB of each go to the host.

#[cfg(feature = "cuda")]
mod kernels;
#[cfg(feature = "cuda")]
mod launch;
mod reference;

use std::ops::Range;

use burn::tensor::{DType, Int, Tensor, TensorData};

#[cfg(feature = "cuda")]
use crate::gpu::is_on_gpu;

/// Elements of a flat tensor, in order: runs of `len` elements, of which the first begins at `start`
/// and each other one `stride` elements after the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Runs {
    /// The position of the first element.
    pub start: usize,
    /// The elements of a run; at least one.
    pub len: usize,
    /// The elements from the start of one run to the next; at least `len`.
    pub stride: usize,
}

impl Runs {
    /// The position of the element with this index among all elements of the runs.
    pub fn position(&self, index: usize) -> usize {
        self.start + index / self.len * self.stride + index % self.len
    }

    /// How many elements of the runs come before the position.
    pub fn num_before(&self, position: usize) -> usize {
        let Some(after) = position.checked_sub(self.start) else {
            return 0;
        };
        after / self.stride * self.len + (after % self.stride).min(self.len)
    }
}

/// The hash of elements of a tensor, which may still be on its device. Each half of its 64 bits is a
/// wrapping sum over the elements. An f32 or bf16 element that differs always changes it; several
/// leave it unchanged with a probability of about 2^-64.
#[derive(Clone, Debug)]
pub struct PendingHash(Sums);

#[derive(Clone, Debug)]
enum Sums {
    /// Pairs of partial sums, on a GPU.
    #[cfg_attr(
        not(feature = "cuda"),
        expect(dead_code, reason = "other devices hash at once")
    )]
    OnGpu(Box<Tensor<1, Int>>),
    Known(u64),
}

impl PendingHash {
    /// Hashes the elements `indices` of `runs` of a flat tensor, of which `x` has a part: its element 0
    /// is at position `offset`. An element counts with its index, so tensors with other runs have the
    /// same hash if their elements are the same, in the same order and dtype.
    ///
    /// # Shapes
    /// `x: [n]`
    /// # Errors
    /// The device cannot be read; the error is its message.
    /// # Panics
    /// If `x` lacks one of the elements.
    pub fn of(
        x: Tensor<1>,
        offset: usize,
        runs: Runs,
        indices: Range<usize>,
    ) -> Result<Self, String> {
        if indices.is_empty() {
            return Ok(Self(Sums::Known(0)));
        }
        let x = match x.device().is_autodiff() {
            true => x.inner(),
            false => x,
        };
        let (first, last) = (runs.position(indices.start), runs.position(indices.end - 1));
        let len = x.dims()[0];
        assert!(
            offset <= first && last < offset + len,
            "a tensor with {len} elements from position {offset} on has no {first} to {last}"
        );
        #[cfg(feature = "cuda")]
        if is_on_gpu(&x) && matches!(x.dtype(), DType::F32 | DType::BF16 | DType::F16) {
            let sums = launch::hash(x, offset, runs, indices);
            return Ok(Self(Sums::OnGpu(Box::new(sums))));
        }
        let part = x.narrow(0, first - offset, last + 1 - first);
        let data = part.try_into_data().map_err(|error| error.to_string())?;
        Ok(Self::of_data(&data, first, runs, indices))
    }

    /// As [`of`](Self::of), of data on the host.
    ///
    /// # Panics
    /// If the data lack one of the elements.
    pub fn of_data(data: &TensorData, offset: usize, runs: Runs, indices: Range<usize>) -> Self {
        Self(Sums::Known(reference::hash(data, offset, runs, indices)))
    }

    /// Reads hashes from their device, in one transfer.
    ///
    /// # Errors
    /// The device cannot be read; the error is its message.
    pub fn read(all: &[Self]) -> Result<Vec<u64>, String> {
        let on_gpu = all.iter().filter_map(|hash| match &hash.0 {
            Sums::OnGpu(sums) => Some(Tensor::clone(sums)),
            Sums::Known(_) => None,
        });
        let on_gpu: Vec<_> = on_gpu.collect();
        let read: Vec<i32> = match on_gpu.is_empty() {
            true => Vec::new(),
            false => {
                let data = Tensor::cat(on_gpu, 0).try_into_data();
                let data = data.map_err(|error| error.to_string())?;
                data.convert_dtype(DType::I32)
                    .try_to_vec()
                    .map_err(|error| error.to_string())?
            }
        };
        let mut rest = &read[..];
        let hash = |hash: &Self| match &hash.0 {
            Sums::Known(known) => *known,
            Sums::OnGpu(sums) => {
                let (own, others) = rest.split_at(sums.dims()[0]);
                rest = others;
                let add = |sum: [u32; 2], pair: &[i32]| {
                    [0, 1].map(|at| sum[at].wrapping_add(pair[at].cast_unsigned()))
                };
                reference::joined(own.chunks_exact(2).fold([0; 2], add))
            }
        };
        Ok(all.iter().map(hash).collect())
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use rstest::rstest;

    use super::*;

    const RUNS: Runs = Runs {
        start: 3,
        len: 4,
        stride: 10,
    };

    fn hash(values: &[f32], offset: usize, runs: Runs, indices: Range<usize>) -> u64 {
        let x = Tensor::<1>::from_floats(values, &Device::flex());
        let pending = PendingHash::of(x, offset, runs, indices).unwrap();
        PendingHash::read(&[pending]).unwrap()[0]
    }

    fn values(len: usize) -> Vec<f32> {
        (0..len).map(|at| (at * at % 97) as f32 - 40.0).collect()
    }

    #[test]
    fn positions_of_runs_are_counted() {
        let positions: Vec<usize> = (0..9).map(|index| RUNS.position(index)).collect();
        assert_eq!(positions, [3, 4, 5, 6, 13, 14, 15, 16, 23]);
        for position in 0..40 {
            let before = (0..16).filter(|index| RUNS.position(*index) < position);
            assert_eq!(RUNS.num_before(position), before.count(), "{position}");
        }
    }

    #[test]
    fn elements_count_by_their_order_in_the_runs_alone() {
        let x = values(40);
        let picked: Vec<f32> = (0..16).map(|index| x[RUNS.position(index)]).collect();
        let flat = Runs {
            start: 0,
            len: 16,
            stride: 16,
        };
        let whole = hash(&x, 0, RUNS, 0..16);
        assert_eq!(whole, hash(&picked, 0, flat, 0..16));
        // A part of the tensor, with its offset.
        assert_eq!(hash(&x, 0, RUNS, 5..12), hash(&x[9..], 9, RUNS, 5..12));
        // Each half of the hash is the sum of the same half of its parts.
        let [a, b] = [hash(&x, 0, RUNS, 0..7), hash(&x, 0, RUNS, 7..16)];
        let add = |shift: u32| ((a >> shift) as u32).wrapping_add((b >> shift) as u32);
        assert_eq!(u64::from(add(32)) << 32 | u64::from(add(0)), whole);
        assert_eq!(hash(&x, 0, RUNS, 3..3), 0);
    }

    #[rstest]
    fn each_bit_and_each_place_matters(#[values(0, 7, 15)] at: usize) {
        let x = values(16);
        let flat = Runs {
            start: 0,
            len: 16,
            stride: 16,
        };
        let mut found = vec![hash(&x, 0, flat, 0..16)];
        for bit in 0..32 {
            let mut other = x.clone();
            other[at] = f32::from_bits(other[at].to_bits() ^ 1 << bit);
            found.push(hash(&other, 0, flat, 0..16));
        }
        let mut swapped = x;
        swapped.swap(at, (at + 1) % 16);
        found.push(hash(&swapped, 0, flat, 0..16));
        let len = found.len();
        found.sort_unstable();
        found.dedup();
        assert_eq!(found.len(), len);
    }

    #[test]
    fn data_of_other_dtypes_have_hashes() {
        let device = Device::flex();
        let flat = Runs {
            start: 0,
            len: 5,
            stride: 5,
        };
        let of = |dtype| {
            let x = Tensor::<1>::from_floats(&values(5)[..], &device).cast(dtype);
            PendingHash::of_data(&x.into_data(), 0, flat, 0..5)
        };
        let all = [DType::F32, DType::BF16, DType::F64].map(of);
        let found = PendingHash::read(&all).unwrap();
        // Small whole numbers are the same in bf16.
        assert_eq!(found[0], found[1]);
        assert_ne!(found[0], found[2]);
        let bytes = TensorData::new(vec![1u8, 2, 3, 4, 5], [5]);
        let other = TensorData::new(vec![1u8, 2, 3, 4, 6], [5]);
        let [a, b] = [bytes, other].map(|data| PendingHash::of_data(&data, 0, flat, 0..5));
        let found = PendingHash::read(&[a, b]).unwrap();
        assert_ne!(found[0], found[1]);
    }
}
