//! Hybrid context parallelism (`parallel.max_tokens_per_rank`): documents of uneven lengths, each
//! on as many ranks as it needs.

use burn::prelude::Device;
use megaburn_collective::ProcessGroups;
use megaburn_models::DecoderConfig;
use megaburn_parallel::{ContextParallel, ContextShare, HybridContextParallel, ParallelError};

use super::{
    batch::Batch,
    collator::batch,
    packed_row::{Document, PackedRow},
};
use crate::{config::TrainConfig, error::TrainError};

/// This rank's part in hybrid context parallelism.
#[derive(Clone, Debug)]
pub(super) struct HybridContext {
    context: HybridContextParallel,
    rank: usize,
    /// The context-parallel groups of this rank: entry `i` has `2^i` ranks.
    groups: Vec<ContextParallel>,
    /// The batch of this rank in each pass of the step.
    passes: Vec<RankBatch>,
    /// Number of multi-token-prediction depths.
    mtp_depths: usize,
}

/// A rank's batch in a pass: a row of documents, and the index of the group that shares it.
#[derive(Clone, Debug)]
struct RankBatch {
    row: PackedRow,
    group: usize,
}

impl HybridContext {
    /// For the rank in `groups`; `None` if the run does not use hybrid context parallelism.
    ///
    /// # Errors
    /// A group of ranks cannot be created; the configuration was already checked.
    /// # Collective
    /// No communication.
    pub(super) fn new(
        config: &TrainConfig,
        model: &DecoderConfig,
        groups: &ProcessGroups,
    ) -> Result<Option<Self>, TrainError> {
        let layout = groups.layout();
        let all = &groups.dp_cp;
        let Some(context) = config.hybrid_context(&layout, model) else {
            return Ok(None);
        };
        let sizes = (0..)
            .map(|power| 1usize << power)
            .take_while(|size| *size <= all.size());
        let shared = |size: usize| -> Result<Option<ContextParallel>, TrainError> {
            let comm = config.way_of_documents(&layout, model, size);
            let start = all.rank() / size * size;
            if start + size > all.size() {
                // The number of ranks is not a power of two, and the last ones have no group of
                // this size.
                return Ok(None);
            }
            // Each group has its own communicator, even if it consists of all ranks: the existing
            // one carries gradients.
            let members = &all.members()[start..start + size];
            let group = all.subgroup(&format!("dynamic cp{size}"), members)?;
            Ok(Some(ContextParallel::new(&group, comm).map_err(refused)?))
        };
        let found: Result<Vec<_>, _> = sizes.map(shared).collect();
        let groups = found?.into_iter().flatten().collect();
        let passes = Vec::new();
        let mtp_depths = model.mtp_layers;
        Ok(Some(Self {
            context,
            rank: all.rank(),
            groups,
            passes,
            mtp_depths,
        }))
    }

    /// Assigns the documents of a global batch, which all ranks know, to ranks and passes.
    ///
    /// # Errors
    /// A document is too long for all ranks together.
    pub(super) fn assign(&mut self, documents: &[Document]) -> Result<(), TrainError> {
        let lens: Vec<usize> = documents.iter().map(Document::len).collect();
        let all = self.context.passes(&lens).map_err(refused)?;
        let mine = |shares: &Vec<ContextShare>| {
            let share = shares.iter().find(|share| share.ranks.contains(&self.rank));
            let ContextShare { ranks, sequences } = share.expect(
                "every rank has a part of each \
                pass",
            );
            let mut row = PackedRow::default();
            let mut tokens = 0;
            for index in sequences {
                let len = self.context.padded(lens[*index], ranks.len());
                row.put(documents[*index].clone(), len);
                tokens += len;
            }
            let len = self.context.row_len(tokens, ranks.len());
            RankBatch {
                row: row.fill(len),
                group: ranks.len().ilog2() as usize,
            }
        };
        self.passes = all.iter().map(mine).collect();
        if self.passes.is_empty() {
            // The samples contain nothing but ends of documents.
            let row = PackedRow::default().fill(self.context.row_len(0, 1));
            self.passes.push(RankBatch { row, group: 0 });
        }
        Ok(())
    }

    /// Number of passes of the step.
    pub(super) fn num_passes(&self) -> usize {
        self.passes.len()
    }

    /// The inputs of this rank in pass `index`.
    ///
    /// # Errors
    /// Does not fail for documents that were padded for their ranks.
    pub(super) fn batch(&self, index: usize, device: &Device) -> Result<Batch, TrainError> {
        let RankBatch { row, group } = &self.passes[index];
        let parallel = &self.groups[*group];
        let rows = std::slice::from_ref(row);
        let batch = batch(rows, parallel.zigzag(), true, self.mtp_depths, device)?;
        Ok(Batch {
            parallel: Some(parallel.clone()),
            ..batch
        })
    }
}

fn refused(error: ParallelError) -> TrainError {
    megaburn_models::ModelError::from(error).into()
}
