use std::ops::Range;

/// A slice of a tensor along one dimension, or a range of its elements, as laid out in memory: a
/// piece in a file, or a rank's shard.
#[derive(Clone, Debug)]
pub(crate) struct DimSlice {
    /// The dimension that is sliced.
    pub(crate) dim: usize,
    /// The range of that dimension in the global tensor.
    pub(crate) global: Range<usize>,
    /// Where the range starts in the memory's own dimension.
    pub(crate) start: usize,
    /// Length of the memory's own dimension.
    pub(crate) len: usize,
    /// The elements that are there, in row-major order of the memory's own shape. Offsets count
    /// from the first of them.
    pub(crate) elements: Range<usize>,
}

impl DimSlice {
    /// Offset in elements from the start of the memory's own shape to the element at global index
    /// `at`. Coordinates past `at.len()` are 0.
    fn offset(&self, shape: &[usize], at: &[usize]) -> usize {
        shape.iter().enumerate().fold(0, |offset, (dim, &size)| {
            let index = at.get(dim).copied().unwrap_or(0);
            if dim == self.dim {
                offset * self.len + (index - self.global.start + self.start)
            } else {
                offset * size + index
            }
        })
    }

    /// The part of dimension 0 of the global tensor in which elements can be.
    fn rows(&self, shape: &[usize]) -> Range<usize> {
        let own = |(dim, &size): (usize, &usize)| if dim == self.dim { self.len } else { size };
        let row: usize = shape.iter().enumerate().skip(1).map(own).product();
        let row = row.max(1);
        let rows = self.elements.start / row..self.elements.end.div_ceil(row);
        if self.dim == 0 {
            let global = |at: usize| (at + self.global.start).saturating_sub(self.start);
            global(rows.start)..global(rows.end)
        } else {
            rows
        }
    }
}

/// Calls `f(offset in a, offset in b, length)` for each contiguous run of elements that both slices
/// hold.
///
/// `shape` is the global shape; the slices may be along different dimensions.
pub(crate) fn for_each_shared_run(
    shape: &[usize],
    a: &DimSlice,
    b: &DimSlice,
    mut f: impl FnMut(usize, usize, usize),
) {
    let mut shared: Vec<Range<usize>> = shape.iter().map(|&size| 0..size).collect();
    for slice in [a, b] {
        for (dim, range) in [(slice.dim, slice.global.clone()), (0, slice.rows(shape))] {
            let held = &mut shared[dim];
            held.start = held.start.max(range.start);
            held.end = held.end.min(range.end);
        }
    }
    if shared.iter().any(Range::is_empty) {
        return;
    }
    // Both slices are full in the dimensions after the last sliced one, so a run spans those.
    let last = a.dim.max(b.dim);
    let run = shared[last].len() * shape[last + 1..].iter().product::<usize>();
    let rows: usize = shared[..last].iter().map(Range::len).product();
    let mut at: Vec<usize> = shared[..=last].iter().map(|range| range.start).collect();
    for _ in 0..rows {
        let starts = [(a, a.offset(shape, &at)), (b, b.offset(shape, &at))];
        // Only the part of the run whose elements both have.
        let skipped =
            |(slice, start): &(&DimSlice, usize)| slice.elements.start.saturating_sub(*start);
        let first = starts.iter().map(skipped).max().unwrap_or(0);
        let left = |(slice, start): &(&DimSlice, usize)| slice.elements.end.saturating_sub(*start);
        let end = starts.iter().map(left).fold(run, usize::min);
        if first < end {
            let [from, to] = starts.map(|(slice, start)| start + first - slice.elements.start);
            f(from, to, end - first);
        }
        for dim in (0..last).rev() {
            at[dim] += 1;
            if at[dim] < shared[dim].end {
                break;
            }
            at[dim] = shared[dim].start;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    /// The element numbers of a global tensor, as the slice holds them.
    fn held(shape: &[usize], range: &DimSlice) -> Vec<usize> {
        let mut local = shape.to_vec();
        local[range.dim] = range.len;
        let mut memory = vec![usize::MAX; local.iter().product()];
        for element in 0..shape.iter().product() {
            let mut rest = element;
            let mut at = vec![0; shape.len()];
            for dim in (0..shape.len()).rev() {
                at[dim] = rest % shape[dim];
                rest /= shape[dim];
            }
            if range.global.contains(&at[range.dim]) {
                memory[range.offset(shape, &at)] = element;
            }
        }
        memory
    }

    #[rstest]
    #[case(&[7], 0, 0)]
    #[case(&[5, 6], 0, 1)]
    #[case(&[5, 6], 1, 1)]
    #[case(&[3, 5, 4], 1, 0)]
    #[case(&[3, 5, 4], 2, 1)]
    #[case(&[2, 3, 2, 4], 1, 3)]
    fn shared_runs_carry_every_shared_element_once(
        #[case] shape: &[usize],
        #[case] dim_a: usize,
        #[case] dim_b: usize,
    ) {
        let size_a = shape[dim_a];
        let size_b = shape[dim_b];
        let slice = |dim: usize, global: Range<usize>, start, len| {
            let memory = shape.iter().product::<usize>() / shape[dim] * len;
            DimSlice {
                dim,
                global,
                start,
                len,
                elements: 0..memory,
            }
        };
        for (from_a, to_a) in (0..size_a).flat_map(|i| (i..=size_a).map(move |j| (i, j))) {
            for (from_b, to_b) in (0..size_b).flat_map(|i| (i..=size_b).map(move |j| (i, j))) {
                let a = slice(dim_a, from_a..to_a, 0, to_a - from_a);
                let b = slice(dim_b, from_b..to_b, 2, size_b + 3);
                check(shape, &a, &b);
            }
        }
    }

    /// Checks that the runs that `a` and `b` share copy each of their shared elements once.
    fn check(shape: &[usize], a: &DimSlice, b: &DimSlice) {
        let source = &held(shape, a)[a.elements.clone()];
        let wanted = &held(shape, b)[b.elements.clone()];
        let mut copied = vec![usize::MAX; wanted.len()];
        for_each_shared_run(shape, a, b, |x, y, n| {
            assert!(copied[y..y + n].iter().all(|&c| c == usize::MAX));
            copied[y..y + n].copy_from_slice(&source[x..x + n]);
        });
        for (got, want) in copied.iter().zip(wanted) {
            let shared = *want != usize::MAX && source.contains(want);
            assert_eq!(*got, if shared { *want } else { usize::MAX }, "{a:?} {b:?}");
        }
    }

    proptest! {
        /// Ranges of the elements of slices, along any dimensions.
        #[test]
        fn shared_runs_of_ranges_carry_every_shared_element_once(
            shape in prop::collection::vec(1usize..6, 1..4),
            (dim_a, dim_b) in (any::<prop::sample::Index>(), any::<prop::sample::Index>()),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 8),
            (start, padding) in (0usize..3, 0usize..3),
        ) {
            let range = |a: usize, b: usize, len: usize| {
                let (a, b) = (cuts[a].index(len + 1), cuts[b].index(len + 1));
                a.min(b)..a.max(b)
            };
            let slice = |dim: usize, at: usize, start: usize, padding: usize| {
                let global = range(at, at + 1, shape[dim]);
                let len = start + global.len() + padding;
                let memory = shape.iter().product::<usize>() / shape[dim] * len;
                DimSlice { dim, global, start, len, elements: range(at + 2, at + 3, memory) }
            };
            let a = slice(dim_a.index(shape.len()), 0, 0, 0);
            let b = slice(dim_b.index(shape.len()), 4, start, padding);
            check(&shape, &a, &b);
        }
    }
}
