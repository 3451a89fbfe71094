//! Boxes of row-major tensors: offsets and sizes.

use crate::strided::num_elements;

/// The offsets and sizes of a box.
pub(crate) type Region = (Vec<usize>, Vec<usize>);

/// What two boxes have in common; `None` if that is empty.
pub(crate) fn intersection(
    one: (&[usize], &[usize]),
    other: (&[usize], &[usize]),
) -> Option<Region> {
    let mut offsets = Vec::with_capacity(one.0.len());
    let mut sizes = Vec::with_capacity(one.0.len());
    for dim in 0..one.0.len() {
        let start = one.0[dim].max(other.0[dim]);
        let end = (one.0[dim] + one.1[dim]).min(other.0[dim] + other.1[dim]);
        if start >= end {
            return None;
        }
        offsets.push(start);
        sizes.push(end - start);
    }
    Some((offsets, sizes))
}

/// The offsets of a box inside of another that begins at `origin`.
pub(crate) fn relative(offsets: &[usize], origin: &[usize]) -> Vec<usize> {
    let dims = offsets.iter().zip(origin);
    dims.map(|(offset, origin)| offset - origin).collect()
}

/// Copies a box of its own into a tensor, at some offsets. All are row-major.
pub(crate) fn copy_into(
    tensor: &mut [u8],
    shape: &[usize],
    part: &[u8],
    offsets: &[usize],
    sizes: &[usize],
    item: usize,
) {
    let Some((last, outer)) = sizes.split_last() else {
        tensor.copy_from_slice(part);
        return;
    };
    let row = last * item;
    if row == 0 || num_elements(outer) == Some(0) {
        return;
    }
    let mut index = vec![0; outer.len()];
    for bytes in part.chunks_exact(row) {
        let dims = index.iter().chain(&[0]).zip(offsets).zip(shape);
        let at = dims.fold(0, |at, ((index, offset), len)| at * len + index + offset);
        tensor[at * item..at * item + row].copy_from_slice(bytes);
        for (index, size) in index.iter_mut().zip(outer).rev() {
            *index += 1;
            if *index < *size {
                break;
            }
            *index = 0;
        }
    }
}

/// Two of the boxes that overlap. All have elements.
pub(crate) fn overlapping(boxes: &[Region]) -> Option<(usize, usize)> {
    let num_dims = boxes.first()?.0.len();
    if num_dims == 0 {
        return (boxes.len() > 1).then_some((0, 1));
    }
    // Along the dim that is cut most, few boxes are at the same place.
    let num_starts = |dim: &usize| {
        let mut starts: Vec<usize> = boxes.iter().map(|(offsets, _)| offsets[*dim]).collect();
        starts.sort_unstable();
        starts.dedup();
        starts.len()
    };
    let dim = (0..num_dims).max_by_key(num_starts)?;
    let mut order: Vec<usize> = (0..boxes.len()).collect();
    order.sort_by_key(|index| boxes[*index].0[dim]);
    for (place, one) in order.iter().enumerate() {
        let (offsets, sizes) = &boxes[*one];
        let end = offsets[dim] + sizes[dim];
        for other in &order[place + 1..] {
            let (others, other_sizes) = &boxes[*other];
            if others[dim] >= end {
                break;
            }
            if intersection((offsets, sizes), (others, other_sizes)).is_some() {
                return Some((*one, *other));
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_copied_to_their_places() {
        let mut tensor = [0; 12];
        copy_into(&mut tensor, &[3, 4], &[1, 2, 3, 4], &[1, 2], &[2, 2], 1);
        assert_eq!(tensor, [0, 0, 0, 0, 0, 0, 1, 2, 0, 0, 3, 4]);
        let mut tensor = [0; 2];
        copy_into(&mut tensor, &[], &[8, 9], &[], &[], 2);
        assert_eq!(tensor, [8, 9]);
    }

    #[test]
    fn overlaps_are_found() {
        let grid = |step: usize| {
            let boxes = (0..16).map(|n| (vec![n / 4 * 2, n % 4 * step], vec![2, 3]));
            boxes.collect::<Vec<_>>()
        };
        assert_eq!(overlapping(&grid(3)), None);
        let (one, other) = overlapping(&grid(2)).unwrap();
        assert_eq!(one / 4, other / 4);
        assert_eq!(overlapping(&[(vec![], vec![])]), None);
    }
}
