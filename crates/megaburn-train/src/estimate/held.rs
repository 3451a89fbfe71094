//! Activation memory of the ranks of a pipeline.

use megaburn_mesh::Layout;
use megaburn_models::{
    DecoderConfig,
    activation_memory::{ActivationMemory, Scores, StageEnds},
};
use megaburn_parallel::ContextComm;
use megaburn_pipeline::{Action, Op, StageLayers};

use crate::{
    config::{Dtype, TrainConfig},
    error::TrainError,
};

/// Peak bytes of activations on each rank of the pipeline with these stages.
pub(super) fn of_stages(
    config: &TrainConfig,
    layout: &Layout,
    model: &DecoderConfig,
    stages: &[Vec<StageLayers>],
    scores: Scores,
) -> Result<Vec<usize>, TrainError> {
    let of = activations(config, layout, model, scores)?;
    let num_micro_batches = match config.parallel.max_tokens_per_rank {
        Some(_) => 1,
        None => config.train.num_micro_batches(layout.dp)?,
    };
    let schedule = config
        .parallel
        .schedule(layout.pp, num_micro_batches)
        .build()?;
    let ranks = stages.iter().zip(&schedule.ranks);
    Ok(ranks
        .map(|(chunks, actions)| peak(&of, chunks, actions))
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

/// The peak of activation memory while a rank runs `actions` on its `chunks`.
fn peak(of: &ActivationMemory, chunks: &[StageLayers], actions: &[Action]) -> usize {
    let mut in_flight = vec![0; chunks.len()];
    let mut most = 0;
    for Action { op, chunk, .. } in actions {
        match op {
            Op::Forward => in_flight[*chunk] += 1,
            Op::Backward | Op::BackwardWeight => in_flight[*chunk] -= 1,
            _ => continue,
        }
        let held = chunks
            .iter()
            .zip(&in_flight)
            .filter(|(_, count)| **count > 0);
        let held = held.map(
            |(
                StageLayers {
                    embedding,
                    layers,
                    loss,
                },
                count,
            )| {
                let ends = StageEnds {
                    first: *embedding,
                    last: *loss,
                };
                of.stage(layers.clone(), ends, *count)
            },
        );
        most = most.max(held.sum());
    }
    let again = chunks
        .iter()
        .map(|chunk| of.again(chunk.layers.clone()))
        .max();
    most + again.unwrap_or(0)
}
