use std::ops::Range;

/// A slice of a tensor along one dimension, as laid out in memory: a piece in a file, or a rank's
/// shard.
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
}

impl DimSlice {
    /// Offset in elements from the start of the memory to the element at global index `at`.
    /// Coordinates past `at.len()` are 0.
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
    for range in [a, b] {
        let held = &mut shared[range.dim];
        held.start = held.start.max(range.global.start);
        held.end = held.end.min(range.global.end);
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
        f(a.offset(shape, &at), b.offset(shape, &at), run);
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
        for (from_a, to_a) in (0..size_a).flat_map(|i| (i..=size_a).map(move |j| (i, j))) {
            for (from_b, to_b) in (0..size_b).flat_map(|i| (i..=size_b).map(move |j| (i, j))) {
                let a = DimSlice {
                    dim: dim_a,
                    global: from_a..to_a,
                    start: 0,
                    len: to_a - from_a,
                };
                let b = DimSlice {
                    dim: dim_b,
                    global: from_b..to_b,
                    start: 2,
                    len: size_b + 3,
                };
                let source = held(shape, &a);
                let wanted = held(shape, &b);
                let mut copied = vec![usize::MAX; wanted.len()];
                for_each_shared_run(shape, &a, &b, |x, y, n| {
                    assert!(copied[y..y + n].iter().all(|&c| c == usize::MAX));
                    copied[y..y + n].copy_from_slice(&source[x..x + n]);
                });
                for (got, want) in copied.iter().zip(&wanted) {
                    let shared = *want != usize::MAX && source.contains(want);
                    assert_eq!(*got, if shared { *want } else { usize::MAX });
                }
            }
        }
    }
}
