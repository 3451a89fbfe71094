//! Which random numbers of the run the quantised layers draw.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use megaburn_collective::Group;
use megaburn_kernels::RandomNumbers;
use megaburn_mesh::Zigzag;

use crate::{stretches::stretches, tokens::TokenBlock};

/// Which tokens of the run the layers of a model see in the current forward pass; it keys stochastic
/// rounding. The model says it before it applies layers, also where backward applies them again.
/// Clones share it.
///
/// Layers without this information draw the same numbers in each pass.
#[derive(Clone, Debug, Default)]
pub struct CurrentTokens(Arc<Mutex<Option<TokenBlock>>>);

impl CurrentTokens {
    /// Begins a pass over a micro-batch; `None` outside of training.
    pub fn set(&self, block: Option<TokenBlock>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = block;
    }

    fn get(&self) -> Option<TokenBlock> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Which rows of a micro-batch's matrices a rank holds.
#[derive(Clone, Debug)]
pub(super) struct HeldRows {
    /// The rank's chunks of each sequence.
    pub(super) context: Zigzag,
    /// The rank and the size of the group over which those chunks are split further.
    pub(super) shard: [usize; 2],
    /// The micro-batch.
    pub(super) current: CurrentTokens,
}

impl HeldRows {
    /// All rows of the chunks.
    pub(super) fn of_chunks(context: Zigzag, current: CurrentTokens) -> Self {
        Self {
            context,
            shard: [0, 1],
            current,
        }
    }

    /// The rows of this rank's shard, with sequence parallelism over a group.
    pub(super) fn of_shard(self, group: Option<&Group>) -> Self {
        let shard = group.map_or([0, 1], |group| [group.rank(), group.size()]);
        Self { shard, ..self }
    }

    /// The numbers of the current micro-batch, of which this rank holds `rows` rows.
    pub(super) fn numbers(&self, layer: RandomNumbers, rows: usize) -> RandomNumbers {
        let block = self.current.get();
        let step = block.map_or(0, |block| block.step);
        let first_sample = block.map_or(0, |block| block.first_sample);
        let [rank, shards] = self.shard;
        let all = rows * shards * self.context.ranks();
        let held = rank * rows..(rank + 1) * rows;
        let stretch = |(rows, start): (Range<usize>, usize)| start..start + rows.len();
        let held = stretches(self.context.ranges(all), held);
        let held: Vec<_> = held.into_iter().map(stretch).collect();
        // Samples are at least as many as micro-batches, so that no two of a step overlap.
        let before = first_sample as u64 * all as u64;
        layer.with_step(step).with_rows(held, before)
    }
}
