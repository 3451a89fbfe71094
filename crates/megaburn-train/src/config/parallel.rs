use megaburn_mesh::Layout;
use megaburn_optim::{ShardingConfig, ShardingLevel};
use megaburn_pipeline::ScheduleKind;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{CpComm, ineffective_keys::Condition, json_schema, ranges, require::require};
use crate::{device::Devices, error::TrainError};

/// `[parallel]`: how the run is split over ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(JsonSchema)]
pub struct ParallelConfig {
    /// Number of ranks, if neither a launcher nor `dp` determines it. Default: 4 threads on the
    /// CPU; on GPUs, as many as the model and the batch can be split over.
    #[schemars(extend("minimum" = 1, "maximum" = MAX_DEGREE))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ranks: Option<usize>,
    /// Degree of tensor parallelism (TP). Default: 2 if the ranks can be split that way, else 1.
    #[schemars(extend("minimum" = 1, "maximum" = MAX_DEGREE))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tp: Option<usize>,
    /// Degree of context parallelism (CP): the number of ranks that share each sequence.
    #[schemars(extend("minimum" = 1, "maximum" = MAX_DEGREE))]
    pub cp: usize,
    /// How context-parallel ranks exchange keys and values: `auto`, `p2p` (ring attention),
    /// `all_gather`, `a2a` (Ulysses) or `a2aN+p2p` (a2a over N neighbours, p2p across these
    /// groups); one method for all layers, or a list with one per layer. Used with `cp` above 1 or
    /// `max_tokens_per_rank`.
    #[schemars(schema_with = "json_schema::cp_comm")]
    pub cp_comm: Vec<CpComm>,
    /// Whether sequences are padded to a multiple of `2 * cp` (with sequence parallelism, one that
    /// tp also divides) instead of being refused. Used with `cp` above 1.
    pub cp_pad: bool,
    /// Hybrid context parallelism: each document is assigned to as many of the dp x cp ranks as it
    /// needs, a power of two. The value is the largest number of tokens that a rank has in a pass.
    /// It needs `data.documents` and `pp = 1`, and `train.micro_batch` has no effect. Default: all
    /// cp ranks share every row of documents.
    #[schemars(extend("minimum" = 1))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens_per_rank: Option<usize>,
    /// Degree of pipeline parallelism (PP).
    #[schemars(extend("minimum" = 1, "maximum" = MAX_DEGREE))]
    pub pp: usize,
    /// Degree of data parallelism (DP). Default: the number that uses all ranks.
    #[schemars(extend("minimum" = 1, "maximum" = MAX_DEGREE))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dp: Option<usize>,
    /// Degree of expert parallelism (EP).
    #[schemars(extend("minimum" = 1, "maximum" = MAX_DEGREE))]
    pub ep: usize,
    /// Degree of tensor parallelism inside an expert (ETP).
    #[schemars(extend("minimum" = 1, "maximum" = MAX_DEGREE))]
    pub etp: usize,
    /// Whether sequence parallelism (SP) is on; it needs `tp` above 1. Default: on if `tp` is above
    /// 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sp: Option<bool>,
    /// What is sharded over data-parallel ranks (the stage of ZeRO): 0 nothing; 1 optimizer state
    /// and masters; 2 also gradients; 3 also parameters: matrices whose shards no other ranks
    /// replicate are gathered only while a layer computes with them.
    #[schemars(extend("maximum" = 3, "x-rule" = "0 (nothing is sharded), 1 (optimizer state), 2 (gradients as well) or 3 (parameters too)"))]
    pub zero: u8,
    /// Number of neighbouring ranks that shard together, with copies across such groups (HSDP). It
    /// divides `dp * cp`. Used with `zero` above 0. Default: all data- and context-parallel ranks.
    #[schemars(extend("minimum" = 1, "maximum" = MAX_DEGREE))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub zero_ranks: Option<usize>,
    /// Elements of the gradients, or parameters, that are communicated in one bucket. Default: 40
    /// Mi (40 * 2^20), or 1 Mi per data- and context-parallel rank if that is more.
    #[schemars(extend("minimum" = 1))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bucket_size: Option<usize>,
    /// Whether communication between data-parallel ranks overlaps with compute: of gradients with
    /// backward, of parameters with forward.
    pub overlap: bool,
    /// In which order a pipeline computes: gpipe, 1f1b, interleaved, zb-h1 or zb-v. Default: 1f1b, with
    /// several `chunks` interleaved.
    #[schemars(extend("x-refused" = ["forward-only"], "x-rule" = "a training schedule: gpipe, 1f1b, interleaved, zb-h1 or zb-v"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schedule: Option<ScheduleKind>,
    /// Number of stages per pipeline rank (virtual stages). Used with `pp` above 1. Default: 2 with
    /// `interleaved` and `zb-v`, else 1.
    #[schemars(extend("minimum" = 1, "maximum" = MAX_DEGREE))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chunks: Option<usize>,
    /// Number of micro-batches that pass through a chunk before the next chunk follows, with
    /// `schedule = "interleaved"`. Default: the smallest number that the schedule allows.
    #[schemars(extend("minimum" = 1, "maximum" = MAX_DEGREE))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub micro_batch_group: Option<usize>,
    /// The layers of each stage in Megatron-LM's notation, such as `Et|(tt|)*3L`: `E` the
    /// embedding, `t` a layer, `m` a multi-token-prediction block, `L` the loss, `|` between
    /// stages, `*n` for repetition. It excludes the next four keys. Used with `pp` above 1.
    /// Default: layers are split evenly.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pipeline_layout: Option<String>,
    /// Number of layers of the first stage. Used with `pp` above 1. Default: as many as the other
    /// stages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_stage_layers: Option<usize>,
    /// Number of layers of the last stage. Used with `pp` above 1. Default: as many as the other
    /// stages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_stage_layers: Option<usize>,
    /// Whether the embedding counts as a layer when layers are split evenly. Used with `pp` above
    /// 1.
    pub count_embedding: bool,
    /// Whether the loss counts as a layer when layers are split evenly. Used with `pp` above 1.
    pub count_loss: bool,
}

impl Default for ParallelConfig {
    fn default() -> Self {
        Self {
            ranks: None,
            tp: None,
            cp: 1,
            cp_comm: vec![CpComm::Auto],
            cp_pad: false,
            max_tokens_per_rank: None,
            pp: 1,
            dp: None,
            ep: 1,
            etp: 1,
            sp: None,
            zero: 0,
            zero_ranks: None,
            bucket_size: None,
            overlap: true,
            schedule: None,
            chunks: None,
            micro_batch_group: None,
            pipeline_layout: None,
            first_stage_layers: None,
            last_stage_layers: None,
            count_embedding: false,
            count_loss: false,
        }
    }
}

/// What each stage of ZeRO shards.
const STAGES: [ShardingLevel; 4] = [
    ShardingLevel::None,
    ShardingLevel::Optimizer,
    ShardingLevel::Gradients,
    ShardingLevel::Parameters,
];

/// Number of rank threads if nothing determines it.
const THREADS: usize = 4;
/// The degrees that are tried for `tp` if it is not set.
const USUAL_TP: [usize; 2] = [2, 1];

/// Degrees up to this can be multiplied without overflow.
const MAX_DEGREE: u16 = u16::MAX;

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

    /// The section that a layout text describes. Without `dp`, the layout still fills the world of
    /// a launcher; without a launcher it takes as few ranks as the other degrees allow.
    ///
    /// # Errors
    /// The text is not a layout, or the layout is invalid.
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

    /// Checks that the ranks that hold copies of each other can be divided into groups of
    /// `zero_ranks`.
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

    /// What data-parallel ranks shard.
    pub(crate) fn sharding(&self) -> ShardingConfig {
        ShardingConfig::new(STAGES[usize::from(self.zero)])
            .with_ranks(self.zero_ranks)
            .with_bucket(self.bucket_size)
    }

    /// The layout on `world` ranks (`None`: there is no launcher that determines the number).
    ///
    /// # Errors
    /// The layout is invalid, or does not take `world` ranks.
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

    /// The layout on a host with `gpus` GPUs: with as many ranks as `dp` or `ranks` determine, else
    /// with the most that `fits` accepts.
    ///
    /// # Errors
    /// The layout is invalid, does not fit, or takes more GPUs than there are.
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

    /// The layout on `world` ranks, or on the product of the degrees if that is `None`.
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

    /// Sets the degrees that may be derived from the ranks to those of `layout`.
    pub(super) fn set_degrees(&mut self, layout: &Layout) {
        self.ranks = Some(layout.world_size());
        self.tp = Some(layout.tp);
        self.dp = Some(layout.dp);
        self.sp = Some(layout.sp);
    }

    /// Whether there is a number of ranks with which sequence parallelism is on.
    pub(super) fn may_split_sequences(&self) -> bool {
        self.sp.unwrap_or(self.tp != Some(1))
    }

    /// When keys of the section have an effect.
    pub(super) fn conditions(&self) -> Vec<Condition> {
        let is_hybrid = self.max_tokens_per_rank.is_some();
        vec![
            ("zero_ranks", self.zero > 0, "with parallel.zero above 0"),
            (
                "cp_comm",
                self.cp > 1 || is_hybrid,
                "with parallel.cp above 1, or parallel.max_tokens_per_rank",
            ),
            (
                "cp_pad",
                self.cp > 1 && !is_hybrid,
                "with parallel.cp above 1, without parallel.max_tokens_per_rank",
            ),
            (
                "schedule chunks micro_batch_group pipeline_layout first_stage_layers \
                 last_stage_layers count_embedding count_loss",
                self.pp > 1,
                "with parallel.pp above 1",
            ),
        ]
    }

    pub(super) fn validate(&self) -> Result<(), TrainError> {
        ranges::check("parallel", self)?;
        self.validate_pipeline()
    }
}

#[cfg(test)]
mod tests;
