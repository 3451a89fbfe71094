//! A rank's role in a pipeline.

use std::sync::Arc;

use burn::{
    prelude::Device,
    tensor::{DType, FloatDType, Tensor},
};
use megaburn_collective::{CollectiveError, Group, Lane, ProcessGroups, tensors};
use megaburn_models::{Decoder, DecoderConfig, decoder::DecoderCache, generate::Next};
use megaburn_optim::GradientAccumulator;
use megaburn_pipeline::{
    MicroBatchStep, Output, P2pGroups, P2pSpec, PipelineError, Schedule, ScheduleConfig,
    ScheduleKind, StageExecutor, StageLayers, run,
};

use crate::{
    config::{Dtype, ParallelConfig},
    error::TrainError,
};

/// The stages of a rank, its schedule, and the rank with which it shares a matrix. Without pipeline
/// parallelism this is a pipeline of one rank.
#[derive(Debug)]
pub struct Pipeline {
    parallel: ParallelConfig,
    neighbours: P2pGroups,
    chunks: Vec<StageLayers>,
    /// The pipeline rank that computes the loss.
    last: usize,
    /// Whether this rank has the first or the last stage and both use the embedding: because it is
    /// tied, or because multi-token prediction reads it in the last stage.
    is_shared: bool,
    /// The two ranks of this pipeline that hold copies of the embedding, if it is not one rank.
    copies: Option<Group>,
    hidden: usize,
    dtype: DType,
    /// The factor by which the residual stream of a rank is shorter than the sequence.
    splits: usize,
    /// The schedule of the last step.
    schedule: Option<Arc<Schedule>>,
}

/// The matrix that the first and the last stage may share.
const EMBEDDING: &str = "embedding.weight";

impl Pipeline {
    /// The pipeline of the rank in `groups`.
    ///
    /// # Errors
    /// The model has too few layers, or the requested split of the layers is not possible.
    /// # Collective
    /// No communication.
    pub fn new(
        parallel: &ParallelConfig,
        model: &DecoderConfig,
        dtype: Dtype,
        groups: &ProcessGroups,
    ) -> Result<Self, TrainError> {
        let dtype: FloatDType = dtype.into();
        let layout = groups.layout();
        let group = &groups.pp;
        let stages = parallel.schedule(layout.pp, 1).stages();
        let (chunks, ends) = match layout.pp {
            1 => (vec![StageLayers::whole(model.layers)], [0, 0]),
            _ => {
                let all = parallel
                    .layer_split()
                    .stages(model.layers, stages.num_stages())?;
                let last = stages.rank_of(stages.num_stages() - 1);
                (
                    stages.chunks_of(group.rank(), &all),
                    [stages.rank_of(0), last],
                )
            }
        };
        let is_copied = model.tied || model.mtp_layers > 0;
        let is_shared = is_copied && layout.pp > 1 && ends.contains(&group.rank());
        let shares = is_shared && ends[0] != ends[1];
        let mut members = ends.map(|rank| group.members()[rank]);
        members.sort_unstable();
        let copies = shares
            .then(|| groups.world.subgroup("embedding", &members))
            .transpose()?;
        Ok(Self {
            parallel: parallel.clone(),
            neighbours: P2pGroups::new(group, stages)?,
            chunks,
            last: ends[1],
            is_shared,
            copies,
            hidden: model.hidden,
            dtype: dtype.into(),
            splits: layout.cp * if layout.sp { layout.tp } else { 1 },
            schedule: None,
        })
    }

    fn group(&self) -> &Group {
        self.neighbours.group()
    }

    /// The layers of each chunk of this rank.
    pub fn chunks(&self) -> &[StageLayers] {
        &self.chunks
    }

    /// The parameter that two stages use: its gradient may arrive on this rank or on another.
    pub fn shared(&self) -> Option<String> {
        self.is_shared.then(|| EMBEDDING.to_string())
    }

    /// Sums the gradients of the parameter that stages share.
    ///
    /// # Errors
    /// A failed collective.
    /// # Collective
    /// The ranks that share it.
    pub fn all_reduce_tied(&self, grads: &mut GradientAccumulator) -> Result<(), TrainError> {
        match &self.copies {
            Some(group) => Ok(grads.all_reduce_tied(EMBEDDING, group)?),
            None => Ok(()),
        }
    }

    /// The schedule of a training step with `num_micro_batches` micro-batches.
    ///
    /// # Errors
    /// There is no such schedule.
    pub fn training(&mut self, num_micro_batches: usize) -> Result<Arc<Schedule>, PipelineError> {
        let last = self
            .schedule
            .take()
            .filter(|last| last.num_micro_batches == num_micro_batches);
        let schedule = match last {
            Some(schedule) => schedule,
            None => Arc::new(
                self.parallel
                    .schedule(self.group().size(), num_micro_batches)
                    .build()?,
            ),
        };
        Ok(self.schedule.insert(schedule).clone())
    }

    /// The schedule of `num_micro_batches` micro-batches without backward.
    ///
    /// # Errors
    /// There is no such schedule.
    pub fn forward_only(&self, num_micro_batches: usize) -> Result<Schedule, PipelineError> {
        let of = self
            .parallel
            .schedule(self.group().size(), num_micro_batches)
            .stages();
        let kind = ScheduleKind::ForwardOnly;
        ScheduleConfig::new(kind, self.group().size(), num_micro_batches)
            .with_num_chunks(of.num_chunks)
            .with_placement(of.placement)
            .build()
    }

    /// The messages between stages, for micro-batches `[seq_len, samples]`.
    pub fn p2p_spec(&self, tokens: [usize; 2], device: &Device) -> P2pSpec {
        let [seq_len, samples] = tokens;
        let shape = [seq_len / self.splits, samples, self.hidden];
        let neighbours = self.neighbours.clone();
        let dtype = self.dtype;
        P2pSpec {
            neighbours,
            shape,
            dtype,
            device: device.clone().inner(),
        }
    }

    /// [`Decoder::next_logits`] over the stages of all pipeline ranks.
    ///
    /// # Errors
    /// A failed collective.
    /// # Collective
    /// The ranks of the pipeline and of their tensor-parallel groups.
    pub(crate) fn next_logits(
        &self,
        model: &Decoder,
        next: &Next<'_>,
        cache: &mut DecoderCache,
        device: &Device,
    ) -> Result<Tensor<3>, TrainError> {
        if self.group().size() == 1 {
            return Ok(model.next_logits(next, cache, device));
        }
        let rows = model.num_rows(next, cache);
        let spec = P2pSpec {
            shape: [rows, 1, self.hidden],
            ..self.p2p_spec([0, 0], device)
        };
        let mut reading = GenerateExecutor {
            model,
            next,
            cache,
            device,
            logits: None,
        };
        run(&self.forward_only(1)?, &spec, &mut reading)?;
        let logits = match reading.logits {
            Some(logits) => logits.cast(DType::F32),
            None => {
                cache.advance(next);
                let shape = [next.len(), 1, model.config().vocab];
                Tensor::empty(shape, (device, DType::F32))
            }
        };
        Ok(tensors::broadcast(logits, self.last, self.group(), Lane::InOrder)?.wait())
    }
}

/// Runs the next tokens of some sequences through the stages.
struct GenerateExecutor<'a> {
    model: &'a Decoder,
    next: &'a Next<'a>,
    cache: &'a mut DecoderCache,
    device: &'a Device,
    logits: Option<Tensor<3>>,
}

impl StageExecutor for GenerateExecutor<'_> {
    type Error = CollectiveError;

    fn forward(
        &mut self,
        pass: MicroBatchStep,
        x: Option<Tensor<3>>,
    ) -> Result<Output, CollectiveError> {
        let Self {
            model,
            next,
            cache,
            device,
            ..
        } = self;
        let x = model.next_stream(pass.chunk, x, next, cache, device);
        if !model.stages()[pass.chunk].loss {
            return Ok(Output::Stream(x));
        }
        self.logits = Some(model.logits_from_stream(x, next, cache));
        Ok(Output::Nothing)
    }
}
