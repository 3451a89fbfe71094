//! Gives ranks their shares of the data, and lets the ranks agree on a step before they compute it.

use std::{ops::Range, sync::Arc};

use burn::{data::dataloader::DataLoader, prelude::Device, tensor::TensorData};
use megaburn_collective::ProcessGroups;

use crate::{error::LearnerError, output::RankOutput};

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

/// The batches of all ranks in a step.
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
    // A rank that stops may have no batch.
    if all.chunks(2).any(|rank| rank[1] != 0) {
        return Ok(Agreed {
            items: 0,
            batches: 0,
            stop: true,
        });
    }
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
        stop: false,
    })
}

/// Number of steps of an epoch in which losses are compared. Ranks that read different batches show
/// in one of them, and later steps need not wait for their losses.
const COMPARED_STEPS: usize = 10;

/// The most by which losses of the same batch may differ on the ranks of a tensor-parallel group.
const TOLERANCE: f64 = 1e-3;

/// Compares the losses of the ranks of the tensor-parallel group. `in_epoch` is the number of the
/// step in its epoch, from 0.
///
/// # Errors
/// They differ.
/// # Collective
/// The ranks of tp, in the first steps of an epoch; 8 bytes each.
pub(crate) fn check_losses(
    groups: &ProcessGroups,
    step: usize,
    in_epoch: usize,
    output: Option<&impl RankOutput>,
) -> Result<(), LearnerError> {
    let tp = &groups.tp;
    if tp.size() == 1 || in_epoch >= COMPARED_STEPS {
        return Ok(());
    }
    let loss = output.and_then(RankOutput::loss);
    let loss = loss.map_or(f64::NAN, |loss| loss.into_scalar::<f64>());
    let all = tp.all_gather(TensorData::from([loss]))?;
    let all = all.as_slice::<f64>().expect("it was sent as f64");
    let differs = |b: &f64| (b - all[0]).abs() > TOLERANCE * all[0].abs();
    match all.iter().position(differs) {
        None => Ok(()),
        Some(at) => Err(LearnerError::DifferentLosses {
            step,
            a: tp.members()[0],
            b: tp.members()[at],
            loss_a: all[0],
            loss_b: all[at],
        }),
    }
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
