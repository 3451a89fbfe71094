//! Activation memory of the ranks of a pipeline.

use std::{collections::HashMap, ops::Range};

use megaburn_mesh::Layout;
use megaburn_models::{
    DecoderConfig,
    activation_memory::{ActivationMemory, Scores, StageEnds},
};
use megaburn_parallel::ContextComm;
use megaburn_pipeline::{PreparedSchedule, StageLayers};

use crate::{
    config::{Dtype, TrainConfig},
    error::TrainError,
};

/// The schedule of a step of this run.
///
/// # Errors
/// The layout does not split the batch, or there is no such schedule.
pub(super) fn schedule(
    config: &TrainConfig,
    layout: &Layout,
) -> Result<PreparedSchedule, TrainError> {
    let num_micro_batches = match config.parallel.max_tokens_per_rank {
        Some(_) => 1,
        None => config.train.num_micro_batches(layout.dp)?,
    };
    let schedule = config.parallel.schedule(layout.pp, num_micro_batches);
    Ok(schedule.prepare()?)
}

/// Peak bytes of activations on each rank of the pipeline with these stages.
pub(super) fn of_stages(
    config: &TrainConfig,
    layout: &Layout,
    model: &DecoderConfig,
    stages: &[Vec<StageLayers>],
    schedule: &PreparedSchedule,
    scores: Scores,
) -> Result<Vec<usize>, TrainError> {
    let of = activations(config, layout, model, scores)?;
    let mut chunks = Chunks {
        alike: model.alike_blocks(),
        of,
        known: HashMap::new(),
    };
    let ranks = stages.iter().enumerate();
    Ok(ranks
        .map(|(rank, stages)| chunks.peak(stages, schedule.peaks(rank)))
        .collect())
}

fn activations(
    config: &TrainConfig,
    layout: &Layout,
    model: &DecoderConfig,
    scores: Scores,
) -> Result<ActivationMemory, TrainError> {
    let comms = config.context_comms(layout, model)?;
    let is_shared = |comm: &ContextComm| !matches!(comm, ContextComm::P2p | ContextComm::AllGather);
    // With hybrid context parallelism a rank has one row per pass.
    let (seq_len, micro_batch, cp) = match config.parallel.max_tokens_per_rank {
        Some(tokens) => (tokens, 1, 1),
        None => (
            config.padded_seq_len(layout),
            config.train.micro_batch,
            layout.cp,
        ),
    };
    Ok(ActivationMemory {
        element: match config.train.dtype {
            Dtype::F32 => 4,
            Dtype::Bf16 | Dtype::F16 => 2,
        },
        tp: layout.tp,
        sequence_parallel: layout.sp,
        cp,
        shares_heads: cp > 1 && comms.iter().any(is_shared),
        etp: layout.etp,
        recompute: config.recompute.of_model(),
        scores,
        decoder_seq_len: config.data.decoder_seq_len,
        fused_loss: config.train.fused_linear_cross_entropy,
        ..ActivationMemory::new(model.clone(), seq_len, micro_batch)
    })
}

/// On what the memory of a chunk depends: its blocks, its ends, and its micro-batches in flight.
type ChunkKey = (Vec<usize>, [bool; 2], usize);

/// The memory of chunks, of which a pipeline has many that are alike.
struct Chunks {
    of: ActivationMemory,
    /// For each block, the first one like it.
    alike: Vec<usize>,
    known: HashMap<ChunkKey, usize>,
}

impl Chunks {
    /// The peak of activation memory of a rank with these chunks, which holds activations of as
    /// many micro-batches in each as one of `peaks` says.
    fn peak(&mut self, chunks: &[StageLayers], peaks: &[Vec<usize>]) -> usize {
        let mut most = 0_usize;
        for in_flight in peaks {
            let held = chunks
                .iter()
                .zip(in_flight)
                .filter(|(_, count)| **count > 0);
            most = most.max(held.map(|(chunk, count)| self.held(chunk, *count)).sum());
        }
        let again = chunks.iter().map(|chunk| self.again(chunk)).max();
        most + again.unwrap_or(0)
    }

    /// Bytes of the activations of `count` micro-batches in a chunk.
    fn held(&mut self, chunk: &StageLayers, count: usize) -> usize {
        let StageLayers {
            embedding,
            layers,
            loss,
        } = chunk;
        let of = &self.of;
        let ends = StageEnds {
            first: *embedding,
            last: *loss,
        };
        let blocks = self.blocks(layers);
        *self
            .known
            .entry((blocks, [*embedding, *loss], count))
            .or_insert_with(|| of.stage(layers.clone(), ends, count))
    }

    /// Bytes that backward holds in addition while it recomputes a part of a chunk.
    fn again(&mut self, StageLayers { layers, .. }: &StageLayers) -> usize {
        let of = &self.of;
        let blocks = self.blocks(layers);
        // No chunk holds anything of no micro-batch, so that the key is free for this.
        *self
            .known
            .entry((blocks, [false; 2], 0))
            .or_insert_with(|| of.again(layers.clone()))
    }

    /// The blocks of these layers, each by the first one like it. A chunk without layers is named by
    /// the layer before which it is.
    fn blocks(&self, layers: &Range<usize>) -> Vec<usize> {
        match layers.is_empty() {
            true => vec![usize::MAX, layers.start],
            false => self.alike[layers.clone()].to_vec(),
        }
    }
}
