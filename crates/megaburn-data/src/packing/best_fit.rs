//! Best-fit decreasing.

use std::collections::BTreeMap;
use std::iter::successors;

use crate::{error::DataError, index_cache::reserved};

/// The end of a chain.
const NONE: u32 = u32::MAX;

/// Bins of items. An item is the number of a size.
#[derive(Debug)]
pub(super) struct Bins {
    /// The first item of each bin.
    firsts: Vec<u32>,
    /// The item after each one in its bin.
    nexts: Vec<u32>,
}

impl Bins {
    /// Packs items of these sizes, which must decrease and be from 1 to `capacity`. An item goes
    /// into the bin with the least room that has enough for it, or into a new one. Of several bins
    /// with equal room it goes into the one that was changed last.
    ///
    /// The time is `O(n log capacity)`. Memory is 4 bytes for each item and 12 for each bin, of
    /// which 8 are temporary, and up to twice that while vectors grow.
    ///
    /// # Errors
    /// There is not enough memory.
    pub(super) fn best_fit(
        sizes: impl Iterator<Item = u32>,
        num_items: u32,
        capacity: u32,
    ) -> Result<Self, DataError> {
        let mut firsts = Vec::new();
        let mut nexts = reserved(num_items.into())?;
        nexts.resize(num_items as usize, NONE);
        // The last item of each bin.
        let mut lasts: Vec<u32> = Vec::new();
        // Bins with equal room are a stack: `rooms` has the one on top, `belows` the one below each.
        let mut rooms: BTreeMap<u32, u32> = BTreeMap::new();
        let mut belows = Vec::new();
        for (item, size) in (0..num_items).zip(sizes) {
            let (bin, room) = match rooms.range_mut(size..).next() {
                Some((&room, top)) => {
                    let bin = *top;
                    match belows[bin as usize] {
                        NONE => drop(rooms.remove(&room)),
                        below => *top = below,
                    }
                    let last = &mut lasts[bin as usize];
                    nexts[*last as usize] = item;
                    *last = item;
                    (bin, room)
                }
                None => {
                    // There are no more bins than items.
                    let bin = firsts.len() as u32;
                    firsts.push(item);
                    lasts.push(item);
                    belows.push(NONE);
                    (bin, capacity)
                }
            };
            if room > size {
                belows[bin as usize] = rooms.insert(room - size, bin).unwrap_or(NONE);
            }
        }
        Ok(Self { firsts, nexts })
    }

    /// Sorts the bins by a key of their first items.
    pub(super) fn sort_by_first<K: Ord>(&mut self, mut key: impl FnMut(u32) -> K) {
        self.firsts.sort_unstable_by_key(|item| key(*item));
    }

    pub(super) fn len(&self) -> usize {
        self.firsts.len()
    }

    /// The items of a bin, in the order in which they were packed.
    pub(super) fn get(&self, bin: usize) -> impl Iterator<Item = u32> + '_ {
        successors(Some(self.firsts[bin]), |item| {
            let next = self.nexts[*item as usize];
            (next != NONE).then_some(next)
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Best-fit decreasing that looks at every bin for every item.
    fn reference(sizes: &[u32], capacity: u32) -> Vec<Vec<u32>> {
        let mut bins: Vec<(u32, Vec<u32>)> = Vec::new();
        for (item, size) in sizes.iter().enumerate() {
            // The last bin of the list was changed last.
            let fits = |(at, (room, _)): &(usize, &(u32, Vec<u32>))| {
                (*room >= *size).then_some((*room, std::cmp::Reverse(*at)))
            };
            let best = bins.iter().enumerate().filter_map(|bin| fits(&bin)).min();
            let (room, mut items) = match best {
                Some((_, std::cmp::Reverse(at))) => bins.remove(at),
                None => (capacity, Vec::new()),
            };
            items.push(item as u32);
            bins.push((room - size, items));
        }
        let mut bins: Vec<_> = bins.into_iter().map(|(_, items)| items).collect();
        bins.sort();
        bins
    }

    proptest! {
        #[test]
        fn bins_are_those_of_the_reference(
            (capacity, mut sizes) in prop_oneof![1u32..12, 1u32..200].prop_flat_map(|capacity| {
                (Just(capacity), prop::collection::vec(1..=capacity, 0..300))
            })
        ) {
            sizes.sort_unstable_by(|a, b| b.cmp(a));
            let mut bins =
                Bins::best_fit(sizes.iter().copied(), sizes.len() as u32, capacity).unwrap();
            let found: Vec<Vec<u32>> = (0..bins.len()).map(|bin| bins.get(bin).collect()).collect();
            prop_assert_eq!(found.len(), bins.len());
            prop_assert_eq!(found, reference(&sizes, capacity));
            bins.sort_by_first(|item| u32::MAX - item);
            let firsts = (0..bins.len()).map(|bin| bins.get(bin).next().unwrap());
            prop_assert!(firsts.is_sorted_by(|a, b| a > b));
        }
    }
}
