use serde::{Deserialize, Serialize};

use crate::{
    error::PipelineError,
    kind::ScheduleKind,
    order::{Orders, interleaved, orders},
    schedule::Schedule,
    stages::{Placement, Stages},
    transfers,
};

/// The most micro-batches times stages of a schedule: 128 ranks with 8 chunks and 1024
/// micro-batches.
const MOST_PASSES: usize = 1 << 20;

/// Parameters from which a schedule is built.
///
/// ```
/// use megaburn_pipeline::{ScheduleConfig, ScheduleKind};
///
/// let schedule = ScheduleConfig::new(ScheduleKind::Interleaved, 4, 8).with_num_chunks(2).build()?;
/// assert_eq!(schedule.stages.num_stages(), 8);
/// assert_eq!(schedule.prove()?.peak_activations, [11, 9, 7, 5]);
/// # Ok::<(), megaburn_pipeline::PipelineError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScheduleConfig {
    /// The kind of schedule.
    pub kind: ScheduleKind,
    /// The number of ranks in the pipeline.
    pub num_ranks: usize,
    /// The number of stages per rank. `None`: 2 for interleaved and zb-v, else 1.
    #[serde(default)]
    pub num_chunks: Option<usize>,
    /// The number of micro-batches of a step.
    pub num_micro_batches: usize,
    /// How many micro-batches go through a chunk before the next chunk starts; interleaved only
    /// (Megatron-LM's `--microbatch-group-size-per-virtual-pipeline-stage`). `None`: the smallest
    /// legal size, which is `num_ranks` if that divides the micro-batches.
    #[serde(default)]
    pub group_size: Option<usize>,
    /// How stages are assigned to ranks. `None`: a vee for zb-v, else a loop. Only gpipe and
    /// forward-only have the choice, the latter so that a model placed for zb-v can be evaluated.
    #[serde(default)]
    pub placement: Option<Placement>,
}

impl ScheduleConfig {
    /// A schedule of `num_micro_batches` over `num_ranks`, with the defaults of its kind.
    pub fn new(kind: ScheduleKind, num_ranks: usize, num_micro_batches: usize) -> Self {
        let num_chunks = None;
        let group_size = None;
        let placement = None;
        Self {
            kind,
            num_ranks,
            num_chunks,
            num_micro_batches,
            group_size,
            placement,
        }
    }

    /// Sets the number of stages per rank.
    pub fn with_num_chunks(mut self, num_chunks: usize) -> Self {
        self.num_chunks = Some(num_chunks);
        self
    }

    /// Sets the number of micro-batches in a group.
    pub fn with_group_size(mut self, group_size: usize) -> Self {
        self.group_size = Some(group_size);
        self
    }

    /// Sets the assignment of stages to ranks.
    pub fn with_placement(mut self, placement: Placement) -> Self {
        self.placement = Some(placement);
        self
    }

    /// The stages that the schedule is for.
    pub fn stages(&self) -> Stages {
        Stages {
            num_ranks: self.num_ranks,
            num_chunks: self.num_chunks.unwrap_or(self.kind.default_num_chunks()),
            placement: self.placement.unwrap_or(self.kind.default_placement()),
        }
    }

    /// The size of the micro-batch groups of an interleaved schedule.
    ///
    /// # Errors
    /// The requested size is not legal.
    pub fn group_size(&self) -> Result<usize, PipelineError> {
        interleaved::group_size(self.group_size, self.num_ranks, self.num_micro_batches)
    }

    /// Builds the schedule and proves it ([`Schedule::prove`]).
    ///
    /// # Errors
    /// The kind has no schedule of these sizes.
    pub fn build(&self) -> Result<Schedule, PipelineError> {
        let (orders, stages) = self.orders()?;
        let schedule = Schedule {
            kind: self.kind,
            stages,
            num_micro_batches: self.num_micro_batches,
            ranks: transfers::with_transfers(orders, stages)?,
        };
        schedule.prove()?;
        Ok(schedule)
    }

    /// The order in which each rank computes, and the stages.
    ///
    /// # Errors
    /// The kind has no schedule of these sizes.
    pub(crate) fn orders(&self) -> Result<(Orders, Stages), PipelineError> {
        self.check()?;
        let stages = self.stages();
        let group_size = match self.kind {
            ScheduleKind::Interleaved => self.group_size()?,
            // Groups of this size bound the inputs that a rank stores by the number of ranks.
            _ => stages.num_ranks,
        };
        let orders = orders(self.kind, stages, self.num_micro_batches, group_size);
        Ok((orders, stages))
    }

    /// Checks whether such a schedule exists, without building it.
    ///
    /// # Errors
    /// The kind has no schedule of these sizes.
    pub fn check(&self) -> Result<(), PipelineError> {
        let Stages {
            num_ranks,
            num_chunks,
            ..
        } = self.stages();
        let sizes = [
            (num_ranks, "ranks"),
            (num_chunks, "chunks"),
            (self.num_micro_batches, "micro-batches"),
        ];
        if let Some((_, what)) = sizes.into_iter().find(|(size, _)| *size == 0) {
            return Err(PipelineError::Zero { what });
        }
        let passes = num_ranks
            .checked_mul(num_chunks)
            .and_then(|n| n.checked_mul(self.num_micro_batches));
        if passes.is_none_or(|passes| passes > MOST_PASSES) {
            return Err(PipelineError::TooLarge { most: MOST_PASSES });
        }
        self.check_kind()?;
        self.group_size
            .map_or(Ok(()), |_| self.group_size().map(drop))
    }

    /// Checks that the kind supports the requested chunks, placement and groups, for any number of
    /// ranks and micro-batches.
    ///
    /// # Errors
    /// The kind does not support them.
    pub fn check_kind(&self) -> Result<(), PipelineError> {
        let Self {
            kind, group_size, ..
        } = *self;
        let Stages {
            num_chunks,
            placement,
            ..
        } = self.stages();
        let rule = match kind {
            ScheduleKind::OneForwardOneBackward if num_chunks > 1 => {
                "it has 1 chunk per rank; for more, use interleaved"
            }
            ScheduleKind::ZbH1 if num_chunks > 1 => "it has 1 chunk per rank; zb-v has 2",
            ScheduleKind::ZbV if num_chunks != 2 => {
                "it has 2 chunks per rank, the second on the \
                way back"
            }
            ScheduleKind::Interleaved if num_chunks < 2 => {
                "it has 2 or more chunks per rank; for 1, use 1f1b"
            }
            _ => "",
        };
        if !rule.is_empty() {
            return Err(PipelineError::Chunks {
                kind,
                num_chunks,
                rule,
            });
        }
        let has_choice = matches!(kind, ScheduleKind::GPipe | ScheduleKind::ForwardOnly);
        if !has_choice && placement != kind.default_placement() {
            return Err(PipelineError::Placement {
                kind,
                placement: placement.name(),
            });
        }
        match group_size {
            Some(0) => Err(PipelineError::Zero {
                what: "micro-batches per group",
            }),
            Some(group_size) if kind != ScheduleKind::Interleaved => {
                Err(PipelineError::NoGroups { kind, group_size })
            }
            _ => Ok(()),
        }
    }
}
