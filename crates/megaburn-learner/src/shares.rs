//! Which items a rank reads, and what the ranks agree on before a step.

use std::{ops::Range, sync::Arc};

use burn::{data::dataloader::DataLoader, prelude::Device, tensor::TensorData};
use megaburn_collective::ProcessGroups;

use crate::error::LearnerError;

/// The items that data-parallel rank `rank` of `ranks` reads: an equal share in a row, and one of the
/// remaining items on each of the last ranks.
fn share(items: usize, rank: usize, ranks: usize) -> Range<usize> {
    items * rank / ranks..items * (rank + 1) / ranks
}

/// This rank's share of `loader`, on `device`.
///
/// # Errors
/// A rank would read nothing.
pub(crate) fn shared<I: 'static>(
    loader: Arc<dyn DataLoader<I>>,
    split: &'static str,
    groups: &ProcessGroups,
    device: &Device,
) -> Result<Arc<dyn DataLoader<I>>, LearnerError> {
    let items = loader.num_items();
    let ranks = groups.dp.size();
    if items < ranks {
        return Err(LearnerError::FewItems {
            split,
            items,
            ranks,
        });
    }
    let loader = if ranks == 1 {
        loader
    } else {
        let Range { start, end } = share(items, groups.dp.rank(), ranks);
        loader.slice(start, end)
    };
    Ok(loader.to_device(device))
}

/// What the ranks know before they compute a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Agreed {
    /// Number of items in the batches of all data-parallel ranks; 0 at the end of the data.
    pub(crate) items: u64,
    /// Number of data-parallel ranks that have a batch.
    pub(crate) batches: usize,
    /// Whether a rank was asked to stop.
    pub(crate) stop: bool,
}

/// Tells all ranks how many items this rank's batch has, and whether it was asked to stop.
///
/// # Errors
/// Ranks of a tensor-parallel group have batches of different sizes.
/// # Collective
/// All ranks; 16 bytes each.
pub(crate) fn agree(
    groups: &ProcessGroups,
    step: usize,
    items: u64,
    stop: bool,
) -> Result<Agreed, LearnerError> {
    let mine = TensorData::from([items as i64, i64::from(stop)]);
    let all = groups.world.all_gather(mine)?;
    let all = all.as_slice::<i64>().expect("it was sent as i64");
    let of = |rank: usize| all[2 * rank] as u64;
    let (mut total, mut batches) = (0, 0);
    for rank in 0..groups.world.size() {
        let at = groups.mesh.coords(rank);
        let first = groups.mesh.rank_at(0, at.cp, at.dp, at.pp);
        if of(first) != of(rank) {
            return Err(LearnerError::DifferentBatches {
                step,
                a: first,
                b: rank,
                items_a: of(first),
                items_b: of(rank),
            });
        }
        if rank == first {
            total += of(rank);
            batches += usize::from(of(rank) > 0);
        }
    }
    Ok(Agreed {
        items: total,
        batches,
        stop: all.chunks(2).any(|rank| rank[1] != 0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_all_items_once_and_differ_by_one_at_most() {
        for (items, ranks) in [(7, 3), (8, 4), (5, 5), (9, 2), (1, 1)] {
            let shares: Vec<_> = (0..ranks).map(|rank| share(items, rank, ranks)).collect();
            let read: Vec<usize> = shares.iter().cloned().flatten().collect();
            assert_eq!(read, (0..items).collect::<Vec<_>>());
            let lens: Vec<usize> = shares.iter().map(Range::len).collect();
            let (least, most) = (lens.iter().min(), lens.iter().max());
            assert!(most.unwrap() - least.unwrap() <= 1, "{lens:?}");
        }
    }
}
