//! The memory of the rank of each pipeline stage.
//!
//! Parameters, gradients, optimizer state and activations are [`MemoryEstimate`]'s. What a GPU
//! needs in addition is in `buffers_bytes`:
//!
//! - the gradients of one block's activations, which backward holds next to these: a share of what
//!   the block keeps;
//! - the gradient of the largest parameter, which is complete in f32 before it is reduced, if
//!   gradients are sharded or are reduced while the only micro-batch of a step frees activations;
//! - the second copy of quantised weights, a byte each;
//! - what the pools of the allocator reserve in addition to tensors: 3% and a page, which is as
//!   large as the largest tensor: the logits, or the gradient of the largest parameter.
//!
//! Outside of these pools, in `runtime_bytes`, are the CUDA context and the libraries, 1 GiB, and
//! NCCL's buffers, 384 MiB for each group of ranks.
//!
//! What a rank never holds at the same time is in `reused_bytes`, and not in the total:
//!
//! - with one micro-batch in a step, gradients are created while backward frees activations: the
//!   smaller of the two;
//! - backward of the head and the loss frees the logits before that of a block begins: the smaller
//!   of the logits and of what backward of a block needs in addition.

use std::collections::HashMap;

use megaburn_mesh::{Axis, Layout};
use megaburn_models::{
    activation_memory::{ActivationMemory, Scores},
    decoder::Recompute,
};
use megaburn_pipeline::{PreparedSchedule, StageLayers};
use megaburn_train::{
    TrainConfig,
    config::{Dtype, PrecisionRecipe},
    estimate::{MemoryEstimate, RankParams},
};
use serde::Serialize;

use crate::{
    calibration::{ALLOCATOR, BLOCK_GRADIENTS, COMMUNICATOR, CUDA_CONTEXT},
    error::PlanError,
    params::StageParams,
    rank::Rank,
};

/// Bytes that the rank of a pipeline stage holds at the same time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StageMemory {
    /// The pipeline stage.
    pub stage: usize,
    /// Parameters in the type that layers compute with.
    pub parameters_bytes: usize,
    /// Accumulated gradients.
    pub gradients_bytes: usize,
    /// Masters and moments.
    pub optimizer_bytes: usize,
    /// Activations that are kept for backward.
    pub activations_bytes: usize,
    /// What kernels, reductions and the allocator need in addition.
    pub buffers_bytes: usize,
    /// What the CUDA context, the libraries and NCCL need.
    pub runtime_bytes: usize,
    /// What is needed only once, since gradients and activations, or backward of the loss and of
    /// blocks, take it one after the other.
    pub reused_bytes: usize,
    /// The most that tensors take, without what the pools of the allocator reserve in addition.
    pub tensors_bytes: usize,
    /// All of these together.
    pub total_bytes: usize,
    /// What the GPU has in addition; negative if it does not have enough.
    pub headroom_bytes: i64,
}

impl StageMemory {
    /// Whether the GPU has enough memory.
    pub fn fits(&self) -> bool {
        self.headroom_bytes >= 0
    }
}

/// What the rank of a stage holds for its micro-batches, whatever ZeRO shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    /// Activations that are kept for backward.
    activations: usize,
    /// What the largest block keeps without recomputation.
    block: usize,
    /// What backward recomputes of a block or a group of blocks: a part of `activations`.
    again: usize,
    /// What the head and the loss keep for a micro-batch.
    loss: usize,
    /// The logits of a micro-batch, unless the loss is fused.
    logits: usize,
}

/// Whether attention keeps its scores on a GPU: fused kernels need 16 bits.
pub(crate) fn scores(config: &TrainConfig) -> Scores {
    let is_composed = config.train.dtype == Dtype::F32
        || config.train.attention == megaburn_kernels::AttentionKernel::Reference;
    if is_composed {
        Scores::Kept
    } else {
        Scores::Never
    }
}

impl Rank<'_> {
    /// What the rank of each stage holds for its micro-batches. It does not depend on ep and
    /// `parallel.zero`, and on dp only by the schedule.
    ///
    /// # Errors
    /// The layout does not split the model or the batch.
    pub(crate) fn held(&self, schedule: &PreparedSchedule) -> Result<Vec<Held>, PlanError> {
        let Self { config, layout, .. } = self;
        let scores = scores(config);
        let activations =
            MemoryEstimate::activations(config, layout, self.model, schedule, scores)?;
        let of = self.activation_memory();
        let plain = ActivationMemory {
            recompute: Recompute::default(),
            ..of.clone()
        };
        let mut kept = HashMap::new();
        let mut kept_by = |index| {
            let of_block = || plain.layer(index);
            *kept.entry(self.alike(index)).or_insert_with(of_block)
        };
        let stages = activations.into_iter().zip(self.stages());
        Ok(stages
            .map(|(activations, chunks)| {
                let chunks_with_blocks = chunks.iter().filter(|chunk| !chunk.layers.is_empty());
                let blocks = chunks_with_blocks.map(|chunk| kept_by(chunk.layers.start));
                let block = blocks.max().unwrap_or(0);
                let again = chunks.iter().map(|chunk| of.again(chunk.layers.clone()));
                let has_loss = chunks.iter().any(|chunk| chunk.loss);
                let logits = self.element * self.tokens(false).on_rank * self.vocab();
                let has_logits = has_loss && !self.config.train.fused_linear_cross_entropy;
                Held {
                    activations,
                    block,
                    again: again.max().unwrap_or(0),
                    loss: if has_loss { of.loss() } else { 0 },
                    logits: if has_logits { logits as usize } else { 0 },
                }
            })
            .collect())
    }

    /// The memory of the rank of each stage.
    pub(crate) fn memory(&self, params: &StageParams, held: &[Held]) -> Vec<StageMemory> {
        let of_params = params.map(|params| params.bytes(self.config, &self.layout));
        let stages = held.iter().zip(of_params).enumerate();
        stages
            .map(|(stage, (held, of_params))| {
                let estimate = MemoryEstimate {
                    activations: held.activations,
                    ..of_params
                };
                self.stage_memory(stage, &estimate, params.of(stage), held)
            })
            .collect()
    }

    fn stage_memory(
        &self,
        stage: usize,
        estimate: &MemoryEstimate,
        params: &RankParams,
        held: &Held,
    ) -> StageMemory {
        let of_block = (BLOCK_GRADIENTS * held.block as f64) as usize;
        let mut reused = held.loss.min(held.again + of_block);
        if self.micro_batches == 1 {
            reused += estimate
                .gradients
                .min(estimate.activations.saturating_sub(reused));
        }
        let is_reduced = self.layout.dp * self.layout.cp > 1;
        let while_freed = self.config.parallel.zero > 1 || self.micro_batches == 1;
        let whole = if is_reduced && while_freed {
            self.gradient * params.largest() as f64
        } else {
            0.0
        };
        let copies = match self.config.precision.recipe {
            PrecisionRecipe::Bf16 => 0.0,
            _ => self.quantized_elements(&self.stages()[stage]),
        };
        let of_tensors = estimate.total() + of_block - reused;
        let of_tensors = of_tensors as f64 + whole + copies;
        let page = (self.gradient * params.largest() as f64).max(held.logits as f64);
        let reserved = (of_tensors * (1.0 + ALLOCATOR) + page) as usize;
        let runtime = (CUDA_CONTEXT + self.num_groups() * COMMUNICATOR) as usize;
        let total = reserved + runtime;
        StageMemory {
            stage,
            parameters_bytes: estimate.parameters,
            gradients_bytes: estimate.gradients,
            optimizer_bytes: estimate.optimizer,
            activations_bytes: estimate.activations,
            buffers_bytes: reserved + reused - estimate.total(),
            runtime_bytes: runtime,
            reused_bytes: reused,
            tensors_bytes: of_tensors as usize,
            total_bytes: total,
            headroom_bytes: self.machine.gpu.memory_bytes as i64 - total as i64,
        }
    }

    /// The activation memory of this rank.
    fn activation_memory(&self) -> ActivationMemory {
        let tokens = self.tokens(true);
        ActivationMemory {
            element: self.element as usize,
            tp: self.layout.tp,
            sequence_parallel: self.layout.sp,
            cp: self.context_ranks(),
            etp: self.layout.etp,
            recompute: self.config.recompute.of_model(),
            scores: scores(self.config),
            decoder_seq_len: self.config.data.decoder_seq_len,
            fused_loss: self.config.train.fused_linear_cross_entropy,
            ..ActivationMemory::new(
                self.model.clone(),
                tokens.seq_len as usize,
                tokens.sequences as usize,
            )
        }
    }

    /// The elements of the matrices of these chunks that are quantised.
    fn quantized_elements(&self, chunks: &[StageLayers]) -> f64 {
        let blocks = chunks.iter().flat_map(|chunk| chunk.layers.clone());
        let mut known = HashMap::new();
        let quantized = blocks.filter(|index| self.is_quantized(*index));
        let weights = quantized.map(|index| {
            let of_block = || self.weights_of(index);
            *known.entry(self.alike(index)).or_insert_with(of_block)
        });
        weights.sum()
    }

    /// The number of groups of ranks that communicate on GPUs.
    fn num_groups(&self) -> u64 {
        let Layout {
            tp,
            cp,
            pp,
            ep,
            etp,
            ..
        } = self.layout;
        let replicas = self.layout.dp * cp;
        let has_experts = self.model.experts.is_some();
        let edp = self.layout.degree(Axis::Edp);
        let degrees = [
            tp,
            cp,
            replicas,
            pp,
            if has_experts { ep * etp } else { 1 },
            if has_experts { edp } else { 1 },
        ];
        degrees.into_iter().filter(|degree| *degree > 1).count() as u64
    }
}
