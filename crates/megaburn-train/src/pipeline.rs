//! A rank's role in a pipeline.

use std::{collections::BTreeMap, sync::Arc};

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

/// The stages of a rank, its schedule, and the ranks with which it shares parameters. Without
/// pipeline parallelism this is a pipeline of one rank.
#[derive(Debug)]
pub struct Pipeline {
    parallel: ParallelConfig,
    neighbours: P2pGroups,
    chunks: Vec<StageLayers>,
    /// The pipeline rank that computes the loss.
    last: usize,
    shared: Vec<SharedParam>,
    hidden: usize,
    dtype: DType,
    /// The factor by which the residual stream of a rank is shorter than the sequence.
    splits: usize,
    /// The schedule of the last step.
    schedule: Option<Arc<Schedule>>,
}

/// A parameter that a stage of this rank and another stage use.
#[derive(Debug)]
struct SharedParam {
    path: &'static str,
    /// The ranks of this pipeline that hold copies of it, if it is not one rank.
    copies: Option<Group>,
}

impl Pipeline {
    /// The pipeline of the rank in `groups`, for a decoder.
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
        let shared = |layers: &StageLayers| model.shared_params(layers);
        Self::of_layers(parallel, model.layers, shared, dtype, groups).map(|pipeline| Self {
            hidden: model.hidden,
            ..pipeline
        })
    }

    /// The pipeline of the rank in `groups`, for a model of `num_layers` layers. `shared_params`
    /// names the parameters of a stage that other stages use too.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    /// # Collective
    /// No communication.
    pub(crate) fn of_layers(
        parallel: &ParallelConfig,
        num_layers: usize,
        shared_params: impl Fn(&StageLayers) -> Vec<&'static str>,
        dtype: Dtype,
        groups: &ProcessGroups,
    ) -> Result<Self, TrainError> {
        let dtype: FloatDType = dtype.into();
        let layout = groups.layout();
        let group = &groups.pp;
        let stages = parallel.schedule(layout.pp, 1).stages();
        let all = match layout.pp {
            1 => vec![StageLayers::whole(num_layers)],
            _ => parallel
                .layer_split()
                .stages(num_layers, stages.num_stages())?,
        };
        let (chunks, last) = match layout.pp {
            1 => (all.clone(), 0),
            _ => (
                stages.chunks_of(group.rank(), &all),
                stages.rank_of(stages.num_stages() - 1),
            ),
        };
        let rank_of = |stage| {
            if layout.pp == 1 {
                0
            } else {
                stages.rank_of(stage)
            }
        };
        let shared = shared_with(shared_params, &all, rank_of, groups)?;
        Ok(Self {
            parallel: parallel.clone(),
            neighbours: P2pGroups::new(group, stages)?,
            chunks,
            last,
            shared,
            hidden: 0,
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

    /// The parameters that several stages use: their gradients may arrive on this rank or on others.
    pub fn shared(&self) -> impl Iterator<Item = String> {
        self.shared.iter().map(|shared| shared.path.to_string())
    }

    /// Sums the gradients of the parameters that stages share.
    ///
    /// # Errors
    /// A failed collective.
    /// # Collective
    /// The ranks that share a parameter, one parameter after the other.
    pub fn all_reduce_tied(&self, grads: &mut GradientAccumulator) -> Result<(), TrainError> {
        for SharedParam { path, copies } in &self.shared {
            if let Some(group) = copies {
                grads.all_reduce_tied(path, group)?;
            }
        }
        Ok(())
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
        self.p2p_spec_of([seq_len / self.splits, samples, self.hidden], device)
    }

    /// The messages of this shape between stages.
    pub(crate) fn p2p_spec_of(&self, shape: [usize; 3], device: &Device) -> P2pSpec {
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
        while let Some((sequence, prompt)) = cache.next_prompt() {
            let spec = P2pSpec {
                shape: [prompt.len(), 1, self.hidden],
                ..self.p2p_spec([0, 0], device)
            };
            let mut reading = PromptExecutor {
                model,
                prompt: (sequence, &prompt),
                cache,
                device,
            };
            run(&self.forward_only(1)?, &spec, &mut reading)?;
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

/// The parameters that the stages of this rank share with other stages, in the same order on all
/// ranks. `stages` are those of the whole pipeline.
fn shared_with(
    shared_params: impl Fn(&StageLayers) -> Vec<&'static str>,
    stages: &[StageLayers],
    rank_of: impl Fn(usize) -> usize,
    groups: &ProcessGroups,
) -> Result<Vec<SharedParam>, TrainError> {
    let group = &groups.pp;
    let mut users: BTreeMap<&'static str, Vec<usize>> = BTreeMap::new();
    for (stage, layers) in stages.iter().enumerate() {
        for path in shared_params(layers) {
            users.entry(path).or_default().push(rank_of(stage));
        }
    }
    users.retain(|_, ranks| ranks.len() > 1 && ranks.contains(&group.rank()));
    let shared = users.into_iter().map(|(path, ranks)| {
        let mut members: Vec<usize> = ranks.iter().map(|&rank| group.members()[rank]).collect();
        members.sort_unstable();
        members.dedup();
        let name = path.split('.').next().unwrap_or(path);
        let copies = (members.len() > 1).then(|| groups.world.subgroup(name, &members));
        Ok(SharedParam {
            path,
            copies: copies.transpose()?,
        })
    });
    shared.collect()
}

/// Runs the prompt of a sequence through the stages of an encoder-decoder model.
struct PromptExecutor<'a> {
    model: &'a Decoder,
    prompt: (usize, &'a [u32]),
    cache: &'a mut DecoderCache,
    device: &'a Device,
}

impl StageExecutor for PromptExecutor<'_> {
    type Error = CollectiveError;

    fn forward(
        &mut self,
        pass: MicroBatchStep,
        x: Option<Tensor<3>>,
    ) -> Result<Output, CollectiveError> {
        let Self { model, cache, .. } = self;
        let x = model.read_prompt(pass.chunk, x, self.prompt, cache, self.device);
        Ok(if model.stages()[pass.chunk].loss {
            Output::Nothing
        } else {
            Output::Stream(x)
        })
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
