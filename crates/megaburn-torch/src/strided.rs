use std::ops::Range;

use crate::file_range::FileRange;

/// The most bytes of a tensor that repeats elements of its storage (stride 0).
const MOST_REPEATED: usize = 1 << 30;

/// Runs of at least this number of bytes are read one by one.
const LONG_RUN: usize = 1 << 16;

/// Where the elements of a tensor are in its storage.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout<'a> {
    /// The bytes of an element.
    pub(crate) item: usize,
    pub(crate) shape: &'a [usize],
    pub(crate) strides: &'a [usize],
    /// The number of the first element.
    pub(crate) offset: usize,
}

/// The strides of a row-major tensor; `None` if its bytes cannot be counted.
pub(crate) fn row_major(shape: &[usize]) -> Option<Vec<usize>> {
    let mut strides = vec![1; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = shape[dim].max(1).checked_mul(strides[dim])?;
    }
    Some(strides)
}

/// The product of sizes.
pub(crate) fn num_elements(sizes: &[usize]) -> Option<usize> {
    if sizes.contains(&0) {
        return Some(0);
    }
    sizes
        .iter()
        .try_fold(1usize, |product, size| product.checked_mul(*size))
}

/// Whether a region is inside a shape.
pub(crate) fn check_region(
    shape: &[usize],
    offsets: &[usize],
    sizes: &[usize],
) -> Result<(), String> {
    let is_inside = offsets.len() == shape.len()
        && sizes.len() == shape.len()
        && shape
            .iter()
            .zip(offsets.iter().zip(sizes))
            .all(|(len, (offset, size))| offset.checked_add(*size).is_some_and(|end| end <= *len));
    if is_inside {
        return Ok(());
    }
    Err(format!(
        "the offsets {offsets:?} and sizes {sizes:?} are not inside the shape {shape:?}"
    ))
}

/// A region of a tensor in its storage: the dims that are walked over, and the run at each place.
struct Walk {
    base: usize,
    dims: Vec<(usize, usize)>,
    run: usize,
    /// The elements from the first to the last.
    span: usize,
    count: usize,
}

impl Layout<'_> {
    /// The bytes of the storage that a contiguous tensor is.
    ///
    /// # Errors
    /// They cannot be counted; as text.
    pub(crate) fn contiguous_range(&self) -> Result<Range<u64>, String> {
        let range = || {
            let count = num_elements(self.shape)?;
            if count == 0 {
                return Some(0..0);
            }
            let start = self.offset.checked_mul(self.item)?;
            let end = start.checked_add(count.checked_mul(self.item)?)?;
            Some(start as u64..end as u64)
        };
        range().ok_or_else(|| "its size is no number of bytes".to_string())
    }

    fn walk(&self, offsets: &[usize], sizes: &[usize]) -> Option<Walk> {
        let mut base = self.offset;
        let mut span = 1usize;
        for ((offset, size), stride) in offsets.iter().zip(sizes).zip(self.strides) {
            base = base.checked_add(offset.checked_mul(*stride)?)?;
            span = span.checked_add((size - 1).checked_mul(*stride)?)?;
        }
        base.checked_add(span)?.checked_mul(self.item)?;
        let count = num_elements(sizes)?;
        count.checked_mul(self.item)?;
        let dims = sizes.iter().copied().zip(self.strides.iter().copied());
        let mut dims: Vec<_> = dims.filter(|(size, _)| *size > 1).collect();
        let mut run = 1;
        while let Some((size, stride)) = dims.last().copied()
            && stride == run
        {
            run *= size;
            dims.pop();
        }
        Some(Walk {
            base,
            dims,
            run,
            span,
            count,
        })
    }

    /// Reads a region as row-major bytes. Only the bytes of the region are read, and those between
    /// them where that is faster.
    ///
    /// # Errors
    /// The region is not inside the tensor, or the tensor not inside its storage; as text.
    pub(crate) fn read(
        &self,
        storage: &FileRange,
        offsets: &[usize],
        sizes: &[usize],
    ) -> Result<Vec<u8>, String> {
        check_region(self.shape, offsets, sizes)?;
        if sizes.contains(&0) {
            return Ok(Vec::new());
        }
        let walk = self.walk(offsets, sizes);
        let walk = walk.ok_or_else(|| "its size is no number of bytes".to_string())?;
        let item = self.item;
        let end = ((walk.base + walk.span) * item) as u64;
        if end > storage.len() {
            return Err(format!(
                "it needs {end} bytes of a storage that has {}",
                storage.len()
            ));
        }
        let len = walk.count * item;
        if walk.count > walk.span && len > MOST_REPEATED {
            return Err(format!(
                "it repeats its elements {len} bytes long; save a copy that does not, or read parts"
            ));
        }
        let mut out = vec![0; len];
        let run = walk.run * item;
        let read = |buffer: &mut [u8], at: usize| {
            let filled = storage.fill(buffer, (at * item) as u64);
            filled.map_err(|error| error.to_string())
        };
        // What is between the runs may take as much memory as the result, but not much more.
        let is_dense = walk.span / 4 <= walk.count;
        if walk.dims.is_empty() || run >= LONG_RUN || !is_dense {
            let mut starts = Starts::new(&walk.dims);
            for part in out.chunks_exact_mut(run) {
                read(part, walk.base + starts.next_start())?;
            }
            return Ok(out);
        }
        let mut spanned = vec![0; walk.span * item];
        read(&mut spanned, walk.base)?;
        let mut starts = Starts::new(&walk.dims);
        for part in out.chunks_exact_mut(run) {
            let start = starts.next_start() * item;
            part.copy_from_slice(&spanned[start..start + run]);
        }
        Ok(out)
    }
}

/// The places of the runs, in row-major order.
struct Starts<'a> {
    dims: &'a [(usize, usize)],
    index: Vec<usize>,
    at: usize,
}

impl<'a> Starts<'a> {
    fn new(dims: &'a [(usize, usize)]) -> Self {
        Self {
            dims,
            index: vec![0; dims.len()],
            at: 0,
        }
    }

    fn next_start(&mut self) -> usize {
        let found = self.at;
        for (index, (size, stride)) in self.index.iter_mut().zip(self.dims).rev() {
            *index += 1;
            if *index < *size {
                self.at += stride;
                return found;
            }
            self.at -= (*size - 1) * stride;
            *index = 0;
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// One element at a time.
    fn expected(bytes: &[u8], layout: &Layout, offsets: &[usize], sizes: &[usize]) -> Vec<u8> {
        let mut found = Vec::new();
        for mut number in 0..num_elements(sizes).unwrap() {
            let mut at = layout.offset;
            for dim in (0..sizes.len()).rev() {
                at += (offsets[dim] + number % sizes[dim]) * layout.strides[dim];
                number /= sizes[dim];
            }
            found.extend(&bytes[at * layout.item..(at + 1) * layout.item]);
        }
        found
    }

    /// Regions that are read at once, by long runs, and by short runs that are far apart.
    #[test]
    fn regions_are_read_in_all_ways() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("storage");
        let bytes: Vec<u8> = (0..400_000).map(|_| fastrand::u8(..)).collect();
        fs::write(&path, &bytes).unwrap();
        let storage = FileRange::open(&path).unwrap();
        for (shape, strides, offset, sizes) in [
            // Rows of 80 kB.
            ([4, 20_000], [20_000, 1], 3, [3, 19_000]),
            // A few columns of long rows, and of a transposed tensor.
            ([40, 2_000], [2_000, 1], 0, [40, 3]),
            ([2_000, 40], [1, 2_000], 5, [1_500, 2]),
            ([2_000, 40], [1, 2_000], 5, [3, 39]),
            // Rows that overlap, and rows that repeat.
            ([50, 30], [7, 1], 11, [49, 30]),
            ([50, 30], [0, 2], 0, [50, 29]),
        ] {
            let layout = Layout {
                item: 4,
                shape: &shape,
                strides: &strides,
                offset,
            };
            for _ in 0..4 {
                let offsets = [0, 1].map(|dim| fastrand::usize(0..=shape[dim] - sizes[dim]));
                let found = layout.read(&storage, &offsets, &sizes).unwrap();
                assert!(
                    found == expected(&bytes, &layout, &offsets, &sizes),
                    "{shape:?}"
                );
            }
        }
    }

    #[test]
    fn sizes_that_are_no_sizes_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("storage");
        fs::write(&path, [0; 40]).unwrap();
        let storage = FileRange::open(&path).unwrap();
        let most = usize::MAX;
        for (shape, strides, offset, why) in [
            (
                [1 << 40, 1],
                [0, 1],
                0,
                "repeats its elements 4398046511104 bytes long",
            ),
            ([most, most], [0, 0], 0, "is no number of bytes"),
            ([2, 2], [most, most], 0, "is no number of bytes"),
            ([2, 2], [1, 1], most, "is no number of bytes"),
            (
                [2, 2],
                [2, 1],
                7,
                "it needs 44 bytes of a storage that has 40",
            ),
        ] {
            let layout = Layout {
                item: 4,
                shape: &shape,
                strides: &strides,
                offset,
            };
            let error = layout.read(&storage, &[0, 0], &shape).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
