use megaburn_mesh::Layout;
use megaburn_optim::{ShardingConfig, ShardingLevel};
use megaburn_pipeline::ScheduleKind;
use serde::{Deserialize, Serialize};

use super::{CpComm, rules::require};
use crate::{TrainError, device::Devices};

/// `[parallel]`: how the run is split over ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ParallelConfig {
    /// Ranks to start where neither a launcher nor `dp` says how many there are. Default: 4 threads
    /// on the CPU; on GPUs, as many of them as the model and the batch can be split over.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ranks: Option<usize>,
    /// Tensor-parallel degree. Default: 2 where the ranks can be split so, else 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tp: Option<usize>,
    /// Context-parallel degree.
    pub cp: usize,
    /// How ranks that share sequences exchange keys and values: auto, p2p, all_gather, a2a, or
    /// a2aN+p2p; one for all layers, or one a layer.
    pub cp_comm: Vec<CpComm>,
    /// Whether sequences that context-parallel ranks do not divide are padded.
    pub cp_pad: bool,
    /// Tokens of a pass on each rank at most, where documents are dealt out to as many data- and
    /// context-parallel ranks as each needs. Default: rows of documents are shared by all cp ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens_per_rank: Option<usize>,
    /// Pipeline-parallel degree.
    pub pp: usize,
    /// Data-parallel degree. Default: what fills the ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dp: Option<usize>,
    /// Expert-parallel degree.
    pub ep: usize,
    /// Tensor-parallel degree inside an expert.
    pub etp: usize,
    /// Sequence parallelism. Default: on if tp > 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sp: Option<bool>,
    /// What data-parallel ranks keep only a share of (ZeRO's stages): 0 nothing, 1 the optimizer's state,
    /// 2 gradients as well, 3 parameters too.
    pub zero: u8,
    /// Ranks that share it out, neighbours; so many by so many hold copies. Default: all data- and
    /// context-parallel ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub zero_ranks: Option<usize>,
    /// Gradients, or parameters, that data-parallel ranks send at once. Default: the larger of 40 million
    /// and a million for each of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bucket_size: Option<usize>,
    /// Whether they are sent while ranks compute: gradients during backward, parameters during forward.
    pub overlap: bool,
    /// In which order a pipeline computes: gpipe, 1f1b, interleaved, zb-h1 or zb-v. Default: 1f1b, with
    /// several `chunks` interleaved.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schedule: Option<ScheduleKind>,
    /// Stages that each rank of a pipeline has. Default: 2 with interleaved and zb-v, else 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chunks: Option<usize>,
    /// Micro-batches that go through a chunk before the next one has its turn, with interleaved. Default:
    /// as few as can be.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub micro_batch_group: Option<usize>,
    /// What each stage has, in Megatron-LM's notation: `Et|(tt|)*3L`. Default: as many layers each as can
    /// be.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pipeline_layout: Option<String>,
    /// Layers of the first stage. Default: as many as the others have.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_stage_layers: Option<usize>,
    /// Layers of the last stage. Default: as many as the others have.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_stage_layers: Option<usize>,
    /// Whether the embedding takes the place of a layer where layers are split evenly.
    pub count_embedding: bool,
    /// Whether the loss does.
    pub count_loss: bool,
}

impl Default for ParallelConfig {
    fn default() -> Self {
        let ranks = None;
        let tp = None;
        let dp = None;
        let sp = None;
        let zero_ranks = None;
        let bucket_size = None;
        let cp = 1;
        let pp = 1;
        let ep = 1;
        let etp = 1;
        let zero = 0;
        let overlap = true;
        let (schedule, chunks, micro_batch_group, pipeline_layout) = Default::default();
        let (first_stage_layers, last_stage_layers) = Default::default();
        Self {
            ranks,
            tp,
            cp,
            cp_comm: vec![CpComm::Auto],
            cp_pad: false,
            max_tokens_per_rank: None,
            pp,
            dp,
            ep,
            etp,
            sp,
            zero,
            zero_ranks,
            bucket_size,
            overlap,
            schedule,
            chunks,
            micro_batch_group,
            pipeline_layout,
            first_stage_layers,
            last_stage_layers,
            count_embedding: false,
            count_loss: false,
        }
    }
}

/// What the stages of ZeRO share out.
const STAGES: [ShardingLevel; 4] = [
    ShardingLevel::None,
    ShardingLevel::Optimizer,
    ShardingLevel::Gradients,
    ShardingLevel::Parameters,
];

/// Rank threads that nobody said a number of.
const THREADS: usize = 4;
/// What `tp` is tried as where it is not set.
const USUAL_TP: [usize; 2] = [2, 1];

/// Degrees up to this multiply without overflow.
const MAX_DEGREE: usize = u16::MAX as usize;

impl ParallelConfig {
    /// The keys of which a layout text says nothing.
    pub(super) const BESIDE_LAYOUT: [&str; 15] = [
        "cp_comm",
        "cp_pad",
        "max_tokens_per_rank",
        "zero",
        "zero_ranks",
        "bucket_size",
        "overlap",
        "schedule",
        "chunks",
        "micro_batch_group",
        "pipeline_layout",
        "first_stage_layers",
        "last_stage_layers",
        "count_embedding",
        "count_loss",
    ];

    /// The section that a layout text stands for. A text without `dp` still fills the world of a
    /// launcher; without one it takes as few ranks as the other degrees allow.
    ///
    /// # Errors
    /// A text that is no layout, or a layout that cannot be.
    pub fn from_layout(text: &str) -> Result<Self, TrainError> {
        let layout: Layout = text.parse()?;
        let Layout {
            tp,
            cp,
            pp,
            dp,
            ep,
            etp,
            sp,
        } = layout;
        let dp = text
            .split('-')
            .any(|part| part.starts_with("dp"))
            .then_some(dp);
        Ok(Self {
            ranks: Some(layout.world_size()),
            tp: Some(tp),
            cp,
            pp,
            dp,
            ep,
            etp,
            sp: Some(sp),
            ..Self::default()
        })
    }

    /// Whether the ranks that hold copies of each other can share them as `zero_ranks` says.
    pub(super) fn shares(&self, layout: &Layout) -> Result<(), TrainError> {
        let Some(ranks) = self.zero_ranks.filter(|_| self.zero > 0) else {
            return Ok(());
        };
        let copies = layout.dp * layout.cp;
        let rule = format!("a divisor of {copies}, the data- and context-parallel ranks");
        require(
            copies.is_multiple_of(ranks),
            "parallel.zero_ranks",
            ranks,
            rule,
        )
    }

    /// What data-parallel ranks share out between them.
    pub(crate) fn sharding(&self) -> ShardingConfig {
        ShardingConfig::new(STAGES[usize::from(self.zero)])
            .with_ranks(self.zero_ranks)
            .with_bucket(self.bucket_size)
    }

    /// The layout on `world` ranks (`None`: no launcher says how many).
    ///
    /// # Errors
    /// A layout that cannot be, or that does not take `world` ranks.
    pub fn layout(&self, world: Option<usize>) -> Result<Layout, TrainError> {
        let world = match (self.dp, world) {
            (_, Some(world)) => Some(world),
            (Some(_), None) => None,
            (None, None) => {
                let ranks = self.ranks.unwrap_or(THREADS);
                return self.on(Some(ranks)).map_err(|error| match error {
                    TrainError::Layout(source) => TrainError::Ranks { ranks, source },
                    error => error,
                });
            }
        };
        self.on(world)
    }

    /// The layout where `gpus` GPUs are there for the taking: with as many ranks as `dp` or `ranks`
    /// say, else with the most that `fits` has nothing against.
    ///
    /// # Errors
    /// A layout that cannot be, does not fit, or takes more GPUs than there are.
    pub(super) fn layout_on_gpus(
        &self,
        gpus: usize,
        fits: impl Fn(&Layout) -> Result<(), TrainError>,
    ) -> Result<Layout, TrainError> {
        let fitting = |layout: Layout| fits(&layout).map(|()| layout);
        if self.dp.is_none() && self.ranks.is_none() {
            let found = self.on(Some(gpus)).and_then(fitting);
            let fewer = |_: &TrainError| {
                (1..gpus)
                    .rev()
                    .find_map(|ranks| self.on(Some(ranks)).and_then(fitting).ok())
            };
            return found.or_else(|error| fewer(&error).ok_or(error));
        }
        let mut found = self.layout(None)?;
        if self.tp.is_none() && found.world_size() > gpus {
            found = Self {
                tp: Some(1),
                ..self.clone()
            }
            .layout(None)?;
        }
        Devices::Cuda { gpus }.hold(&found)?;
        fitting(found)
    }

    /// The layout on `world` ranks, or on as many as its degrees make.
    fn on(&self, world: Option<usize>) -> Result<Layout, TrainError> {
        self.validate()?;
        let with_tp = |tp: usize| {
            let Self {
                cp, pp, ep, etp, ..
            } = *self;
            let mut text = format!("tp{tp}-cp{cp}-pp{pp}-ep{ep}-etp{etp}");
            if self.sp.unwrap_or(tp > 1) {
                text.push_str("-sp");
            }
            if let Some(dp) = self.dp {
                text.push_str(&format!("-dp{dp}"));
            }
            Layout::parse(&text, world).map_err(TrainError::from)
        };
        match self.tp {
            Some(tp) => with_tp(tp),
            None => USUAL_TP
                .into_iter()
                .map(with_tp)
                .reduce(Result::or)
                .expect("it is not empty"),
        }
    }

    pub(super) fn validate(&self) -> Result<(), TrainError> {
        let degree = |key, value| {
            let rule = format!("from 1 to {MAX_DEGREE}");
            require((1..=MAX_DEGREE).contains(&value), key, value, rule)
        };
        degree("parallel.ranks", self.ranks.unwrap_or(1))?;
        degree("parallel.tp", self.tp.unwrap_or(1))?;
        degree("parallel.cp", self.cp)?;
        degree("parallel.pp", self.pp)?;
        degree("parallel.dp", self.dp.unwrap_or(1))?;
        degree("parallel.ep", self.ep)?;
        degree("parallel.etp", self.etp)?;
        degree("parallel.zero_ranks", self.zero_ranks.unwrap_or(1))?;
        let stages = "0 (nothing is shared out), 1 (optimizer state), 2 (gradients as well) or 3 (parameters too)";
        require(
            usize::from(self.zero) < STAGES.len(),
            "parallel.zero",
            self.zero,
            stages,
        )?;
        let most = self.max_tokens_per_rank.unwrap_or(1);
        require(most > 0, "parallel.max_tokens_per_rank", most, "at least 1")?;
        let size = self.bucket_size.unwrap_or(1);
        require(size > 0, "parallel.bucket_size", size, "at least 1")?;
        self.validate_pipeline()
    }
}

#[cfg(test)]
mod tests;
