//! The binary tree along which ranks, or the members of a group, pass on what concerns all of them:
//! number 0 is its root, and the numbers below `i` are `2 i + 1` and `2 i + 2`.

/// The number above `of`; the root has none.
pub(crate) fn parent(of: usize) -> Option<usize> {
    (of > 0).then(|| (of - 1) / 2)
}

/// The numbers below `of` among `size`, at most two.
pub(crate) fn children(of: usize, size: usize) -> impl Iterator<Item = usize> {
    [2 * of + 1, 2 * of + 2]
        .into_iter()
        .filter(move |child| *child < size)
}

/// The numbers next to `of` among `size`, at most three.
pub(crate) fn neighbours(of: usize, size: usize) -> impl Iterator<Item = usize> {
    parent(of).into_iter().chain(children(of, size))
}

/// Whether `one` is next to `other`.
pub(crate) fn are_neighbours(one: usize, other: usize) -> bool {
    parent(one) == Some(other) || parent(other) == Some(one)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_hang_together_with_at_most_three_neighbours_and_few_steps() {
        for size in [1, 2, 3, 8, 1000, 1024] {
            for one in 0..size {
                let near: Vec<_> = neighbours(one, size).collect();
                assert!(near.len() <= 3, "{one}: {near:?}");
                for other in near {
                    assert!(are_neighbours(one, other) && are_neighbours(other, one));
                    assert!(neighbours(other, size).any(|back| back == one));
                }
                let steps = std::iter::successors(Some(one), |at| parent(*at)).count() - 1;
                assert!(
                    steps <= size.ilog2() as usize,
                    "{one} of {size}: {steps} steps"
                );
            }
        }
    }
}
