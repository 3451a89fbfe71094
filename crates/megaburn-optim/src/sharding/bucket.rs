use std::ops::Range;

use burn::Tensor;
use megaburn_kernels::FP8_MOMENT_BLOCK;

use super::ParamKind;

/// Alignment in bytes at which CUDA device memory can be split into views.
const CUT: usize = 512;

/// Alignment of parameters in a bucket, in elements: `CUT` bytes of bf16.
pub(super) const ALIGN: usize = CUT / 2;

// No block of a moment in 8 bits is on two ranks.
const _: () = assert!(ALIGN.is_multiple_of(FP8_MOMENT_BLOCK));

/// Consecutive parameters that are sent in one collective.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Bucket {
    /// The kind of all its parameters.
    pub(crate) kind: ParamKind,
    pub(crate) slots: Vec<Slot>,
    /// Elements, including the gaps between parameters; a multiple of the number of ranks.
    pub(crate) len: usize,
    /// The rank's pipeline stage of the parameters. The gradients of each stage come in its own
    /// backward pass.
    pub(crate) chunk: usize,
}

/// The position of a parameter in its bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    pub(crate) path: String,
    pub(crate) start: usize,
    pub(crate) len: usize,
}

impl Slot {
    fn range(&self) -> Range<usize> {
        self.start..self.start + self.len
    }

    /// The part of the parameter that lies in the range `range` of the bucket, as a range of the
    /// parameter.
    pub(crate) fn within(&self, range: &Range<usize>) -> Range<usize> {
        let [start, end] =
            [range.start, range.end].map(|at| at.clamp(self.start, self.range().end) - self.start);
        start..end
    }
}

impl Bucket {
    /// Fills buckets of about `target` elements with parameters (path, elements) of one kind and
    /// chunk, in order. Every bucket has at least one parameter and can be split evenly over
    /// `ranks`.
    pub(crate) fn fill(
        kind: ParamKind,
        chunk: usize,
        params: impl IntoIterator<Item = (String, usize)>,
        target: usize,
        ranks: usize,
    ) -> Vec<Self> {
        let mut buckets: Vec<Self> = Vec::new();
        for (path, len) in params {
            let start = match buckets.last() {
                Some(last) if last.len + len <= target => last.len,
                _ => {
                    buckets.push(Self {
                        kind,
                        slots: Vec::new(),
                        len: 0,
                        chunk,
                    });
                    0
                }
            };
            let bucket = buckets.last_mut().expect("a bucket was pushed");
            bucket.slots.push(Slot { path, start, len });
            bucket.len = (start + len).next_multiple_of(ALIGN);
        }
        for bucket in &mut buckets {
            bucket.len = bucket.len.next_multiple_of(ALIGN * ranks);
        }
        buckets
    }

    /// The range of the bucket that a rank keeps.
    pub(crate) fn share(&self, rank: usize, ranks: usize) -> Range<usize> {
        let len = self.len / ranks;
        rank * len..(rank + 1) * len
    }

    /// Whether the bucket's CUDA memory, in elements of `size` bytes, can be split into parameters
    /// without a copy. Parameters always start at a multiple of [`CUT`]; they must also end at one.
    pub(crate) fn is_cut_in_place(&self, size: usize) -> bool {
        self.slots
            .iter()
            .all(|slot| (slot.len * size).is_multiple_of(CUT))
    }

    /// Builds the range `range` of the bucket: `part` of each slot in it (called with a range of
    /// the parameter) at its offset, and `zeros` elsewhere.
    pub(crate) fn join(
        &self,
        range: Range<usize>,
        mut part: impl FnMut(&Slot, Range<usize>) -> Tensor<1>,
        zeros: impl Fn(usize) -> Tensor<1>,
    ) -> Tensor<1> {
        let mut parts = Vec::new();
        let mut at = range.start;
        for slot in &self.slots {
            let range = slot.within(&range);
            if range.is_empty() {
                continue;
            }
            let (start, end) = (slot.start + range.start, slot.start + range.end);
            if start > at {
                parts.push(zeros(start - at));
            }
            parts.push(part(slot, range));
            at = end;
        }
        if range.end > at {
            parts.push(zeros(range.end - at));
        }
        joined(parts)
    }
}

/// Concatenates the parts; a single part is not copied.
pub(crate) fn joined(mut parts: Vec<Tensor<1>>) -> Tensor<1> {
    match parts.len() {
        1 => parts.remove(0),
        _ => Tensor::cat(parts, 0),
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use proptest::prelude::*;

    use super::*;
    use crate::testing::values;

    #[test]
    fn a_bucket_is_cut_in_place_where_all_its_parameters_end_at_a_cut() {
        let bucket = |lens: &[usize]| {
            let params = lens
                .iter()
                .enumerate()
                .map(|(i, &len)| (i.to_string(), len));
            Bucket::fill(ParamKind::Dense, 0, params, 10_000, 2).remove(0)
        };
        assert!(bucket(&[256, 512]).is_cut_in_place(2));
        assert!(bucket(&[128, 512]).is_cut_in_place(4));
        assert!(!bucket(&[128, 512]).is_cut_in_place(2));
        assert!(!bucket(&[512, 300]).is_cut_in_place(4));
    }

    #[test]
    fn a_bucket_is_full_before_the_next_and_holds_what_is_larger_than_it() {
        let params = [("a", 200), ("b", 300), ("c", 5000), ("d", 1), ("e", 1)];
        let params = params.map(|(path, len)| (path.to_string(), len));
        let buckets = Bucket::fill(ParamKind::Dense, 0, params, 1000, 2);
        let places: Vec<Vec<_>> = buckets
            .iter()
            .map(|bucket| {
                bucket
                    .slots
                    .iter()
                    .map(|s| (s.path.as_str(), s.start))
                    .collect()
            })
            .collect();
        assert_eq!(
            places,
            [
                vec![("a", 0), ("b", 256)],
                vec![("c", 0)],
                vec![("d", 0), ("e", 256)]
            ]
        );
        assert_eq!(
            buckets.iter().map(|b| b.len).collect::<Vec<_>>(),
            [1024, 5120, 512]
        );
        assert!(Bucket::fill(ParamKind::Dense, 0, [], 1000, 2).is_empty());
    }

    proptest! {
        #[test]
        fn shares_hold_every_element_of_every_parameter_once(
            lens in prop::collection::vec(1usize..3000, 1..12),
            target in 1usize..5000,
            ranks in 1usize..9,
        ) {
            let params = lens.iter().enumerate().map(|(i, &len)| (i.to_string(), len));
            let buckets = Bucket::fill(ParamKind::Dense, 0, params, target, ranks);
            let mut held = vec![0; lens.len()];
            for bucket in &buckets {
                for rank in 0..ranks {
                    let share = bucket.share(rank, ranks);
                    for slot in &bucket.slots {
                        let range = slot.within(&share);
                        prop_assert!(slot.start % ALIGN == 0 && slot.range().end <= bucket.len);
                        if !range.is_empty() {
                            // Ranges come in order, without gaps.
                            let which: usize = slot.path.parse().unwrap();
                            prop_assert_eq!(held[which], range.start);
                            held[which] = range.end;
                        }
                    }
                }
            }
            prop_assert_eq!(held, lens);
        }

        #[test]
        fn joined_shares_are_the_bucket(
            lens in prop::collection::vec(1usize..600, 1..6),
            ranks in 1usize..5,
        ) {
            let params = lens.iter().enumerate().map(|(i, &len)| (i.to_string(), len));
            for bucket in Bucket::fill(ParamKind::Dense, 0, params, 1500, ranks) {
                let number = |slot: &Slot, at: usize| (1000 * slot.start + at + 1) as f32;
                let part = |slot: &Slot, range: Range<usize>| {
                    let numbers: Vec<f32> = range.map(|at| number(slot, at)).collect();
                    Tensor::from_floats(numbers.as_slice(), &Device::flex())
                };
                let zeros = |len: usize| Tensor::zeros([len], &Device::flex());
                let mut joined = Vec::new();
                for rank in 0..ranks {
                    joined.extend(values(bucket.join(bucket.share(rank, ranks), part, zeros)));
                }
                let mut expected = vec![0.0; bucket.len];
                for slot in &bucket.slots {
                    for at in 0..slot.len {
                        expected[slot.start + at] = number(slot, at);
                    }
                }
                prop_assert_eq!(joined, expected);
            }
        }
    }
}
