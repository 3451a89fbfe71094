//! Compares what several ranks hold, and what a rank holds between two updates.

mod hashes;
#[cfg(test)]
mod tests;
mod unchanged;

use std::collections::BTreeMap;

use burn::module::Module;
use megaburn_collective::objects;
use serde::{Deserialize, Serialize};

use crate::{
    error::TrainError,
    state_name::StateName,
    trainer_core::{TrainerCore, first_times::Work},
};
use hashes::RangeHash;
pub(crate) use unchanged::Unchanged;

/// Two ranks that hold different copies of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Difference {
    ranks: [usize; 2],
    /// The position of the range among those of the second rank.
    position: usize,
    /// Whether more than half of all copies are those of the first rank.
    is_second_wrong: bool,
}

impl<M: Module> TrainerCore<M> {
    /// Compares what several ranks hold copies of; see
    /// [`Trainer::check_replicas`](crate::Trainer::check_replicas).
    ///
    /// # Errors
    /// Two ranks differ (the error names the tensor), or a device cannot be read.
    /// # Collective
    /// All ranks; a hash of each range of each tensor goes to rank 0.
    pub(crate) fn check_replicas(&self) -> Result<(), TrainError> {
        self.compared_state().map(drop)
    }

    /// As [`check_replicas`](Self::check_replicas). In addition, the next update compares what this
    /// rank holds with what it holds now.
    ///
    /// # Errors
    /// As [`check_replicas`](Self::check_replicas).
    /// # Collective
    /// As [`check_replicas`](Self::check_replicas).
    pub(crate) fn check_state(&mut self) -> Result<(), TrainError> {
        let state = self.compared_state()?;
        self.remember(state);
        Ok(())
    }

    /// The hashes of this rank's state, after all ranks have compared theirs and those of gradients.
    fn compared_state(&self) -> Result<Vec<RangeHash>, TrainError> {
        let _compiling = self.first_times.begin(Work::Replicas, &self.groups.world);
        let mut mine = self.state_hashes()?;
        let num_states = mine.len();
        // Gradients that are not finite may have other bits, and they changed nothing.
        if self.consecutive_skips == 0 {
            mine.extend(self.gradient_hashes()?);
        }
        self.compare(&mine)?;
        mine.truncate(num_states);
        Ok(mine)
    }

    fn compare(&self, mine: &[RangeHash]) -> Result<(), TrainError> {
        let world = &self.groups.world;
        let sent: Vec<(u64, u64)> = mine.iter().map(|range| (range.place, range.hash)).collect();
        let first = first_difference(&objects::gather(world, &sent)?);
        let Some(difference) = objects::broadcast(world, &first)? else {
            return Ok(());
        };
        // Rank 0 may have no part of the parameter, so the rank that differs names it.
        let [_, second] = difference.ranks;
        let name = (world.rank() == second).then(|| mine[difference.position].name.clone());
        let name = objects::gather(world, &name)?.into_iter().flatten().next();
        let name: Option<StateName> = objects::broadcast(world, &name)?;
        Err(TrainError::ReplicasDiffer {
            step: self.progress.step,
            tensor: name.expect("the second rank has named it"),
            ranks: difference.ranks,
            is_second_wrong: difference.is_second_wrong,
            is_own: difference.is_second_wrong && world.rank() == second,
        })
    }
}

/// The first range, in the order of a rank, of which ranks have different copies. Pairs are a place
/// and a hash. The first of the two ranks has the copy that most ranks have.
fn first_difference(all: &[Vec<(u64, u64)>]) -> Option<Difference> {
    let mut copies: BTreeMap<u64, Vec<(usize, usize, u64)>> = BTreeMap::new();
    for (rank, held) in all.iter().enumerate() {
        for (position, (place, hash)) in held.iter().enumerate() {
            copies
                .entry(*place)
                .or_default()
                .push((rank, position, *hash));
        }
    }
    let differences = copies.values().filter_map(|copies| difference_of(copies));
    differences.min_by_key(|difference| (difference.position, difference.ranks))
}

/// The difference between copies, given as rank, position and hash in the order of ranks.
fn difference_of(copies: &[(usize, usize, u64)]) -> Option<Difference> {
    let num = |hash: u64| copies.iter().filter(|copy| copy.2 == hash).count();
    let (_, _, first_hash) = copies.first()?;
    if num(*first_hash) == copies.len() {
        return None;
    }
    let most = copies.iter().find(|copy| 2 * num(copy.2) > copies.len());
    let (first, _, hash) = most.or(copies.first())?;
    let (second, position, _) = copies.iter().find(|copy| copy.2 != *hash)?;
    Some(Difference {
        ranks: [*first, *second],
        position: *position,
        is_second_wrong: most.is_some(),
    })
}
