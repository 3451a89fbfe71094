//! Run configuration: typed TOML sections whose defaults make a first run of a small model.
//!
//! A configuration is built from layers, each overriding the ones before it: the defaults, files in
//! the order given, `--set KEY=VALUE`, and dedicated flags. See [`ConfigLayers`].
//!
//! ```
//! use megaburn_train::ConfigLayers;
//!
//! let config = ConfigLayers::new()
//!     .with_text("my.toml", "[train]\nsteps = 50")?
//!     .with_set("optimizer.lr=1e-3")?
//!     .load()?;
//! assert_eq!((config.train.steps, config.optimizer.lr), (50, 1e-3));
//! assert_eq!(config.layout(None)?.to_string(), "tp2-dp2-sp");
//! # Ok::<(), megaburn_train::TrainError>(())
//! ```

mod alerts;
mod attention;
mod batch_ramp;
mod changes;
mod context;
mod data;
mod data_order;
mod dataset;
mod device_types;
mod documents;
mod exits;
mod expert_blocks;
mod experts;
mod fim;
mod fine_tune;
mod follow;
mod fp8_moments;
mod ineffective_keys;
mod init;
mod json_schema;
mod keys;
mod layer_check;
mod layer_pattern;
mod layers;
mod limits;
mod log;
mod masking;
mod mla;
mod model;
mod model_parts;
mod moe;
mod mtp;
mod nearest;
mod notes;
mod on_spike;
mod optimizer;
mod optimizer_kind;
mod optimizer_name;
mod own_model;
mod packing;
mod parallel;
mod param_groups;
mod part_names;
mod pipeline;
mod precision;
mod precision_fallback;
mod precision_layouts;
mod precision_schedule;
mod profile;
mod ranges;
mod recompute;
mod reference;
mod removed;
mod require;
mod retention;
mod rope;
mod run_dir;
mod schedule;
mod schedule_at;
mod schema;
mod sections;
mod sources;
mod tokenizer;
mod training;
mod validate;
mod validate_against_layout;
mod value;

use megaburn_kernels::AttentionKernel;
use megaburn_mesh::Layout;
use megaburn_models::DecoderConfig;
pub use megaburn_optim::{Dtype, StateDtype};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use alerts::AlertsConfig;
pub use batch_ramp::BatchRampConfig;
pub use changes::Change;
pub(crate) use changes::{Changes, changes, record_of_file};
pub use context::CpComm;
pub use data::DataConfig;
pub(crate) use data::TEST;
pub use data_order::DataOrder;
pub use dataset::DatasetKind;
pub use experts::ExpertsConfig;
pub use fim::FimConfig;
pub use ineffective_keys::IneffectiveKey;
pub(crate) use init::InitFrom;
pub use json_schema::json_schema;
pub use layer_pattern::LayerPattern;
pub use layers::ConfigLayers;
pub(crate) use layers::{key_and_value, merge, nested, parse, read_file};
pub use log::LogConfig;
pub use masking::DataMaskingConfig;
pub use mla::MlaConfig;
pub use model::ModelConfig;
pub(crate) use model::parts_unknown_to_megatron;
pub use model_parts::ModelParts;
pub use moe::{BiasUpdate, MoeTrainingConfig};
pub use nearest::setting_of_flag;
pub(crate) use nearest::{nearest_key, nearest_of};
pub use on_spike::OnSpike;
pub use optimizer::{LrDecayStyle, OptimizerConfig};
pub use optimizer_name::OptimizerName;
pub(crate) use own_model::{RUN_SECTIONS, own_changes};
pub use packing::Packing;
pub use parallel::ParallelConfig;
pub use param_groups::ParamGroupConfig;
pub use part_names::{ActivationName, NormName, PositionsName, QkNormName};
pub use precision::{
    AmaxCompute, Fp8Format, PrecisionConfig, PrecisionPhaseConfig, PrecisionRecipe,
};
pub use precision_fallback::PrecisionFallbackConfig;
pub use profile::ProfileConfig;
pub use recompute::{RecomputeConfig, RecomputeMethod, RecomputeModule};
pub use reference::reference;
pub(crate) use removed::drop_removed;
pub(crate) use require::require;
pub use rope::{RopeScalingConfig, RopeScalingKind};
pub use schedule_at::ScheduleAt;
pub use sections::{GenerateConfig, RunConfig};
pub(crate) use sources::MixBy;
pub use sources::SourceConfig;
pub use tokenizer::Tokenizer;
pub use training::TrainingConfig;
pub(crate) use value::bad_value;

use crate::{device::Devices, error::TrainError};

/// Everything that determines what a run computes. The default trains a byte-level Llama of 0.8
/// million parameters on four ranks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(JsonSchema)]
pub struct TrainConfig {
    /// `[run]`: the folder of the run, its seed and its devices.
    pub run: RunConfig,
    /// `[model]`: the family and the sizes of the model.
    pub model: ModelConfig,
    /// `[parallel]`: how the run is split over ranks.
    pub parallel: ParallelConfig,
    /// `[data]`: the training data and its tokenizer.
    pub data: DataConfig,
    /// `[train]`: batches, intervals, time limits and the number of steps.
    pub train: TrainingConfig,
    /// `[optimizer]`: the optimizer, its schedules, clipping and loss scaling.
    pub optimizer: OptimizerConfig,
    /// `[moe]`: how experts are trained.
    pub moe: MoeTrainingConfig,
    /// `[recompute]`: which activations backward recomputes instead of keeping them.
    pub recompute: RecomputeConfig,
    /// `[precision]`: whether the linear layers of attention and MLPs multiply matrices in FP8 or
    /// FP4.
    pub precision: PrecisionConfig,
    /// `[generate]`: the sample generated at the end.
    pub generate: GenerateConfig,
    /// `[log]`: the metrics of a run in the formats of other programs, next to `metrics.jsonl`.
    pub log: LogConfig,
    /// `[alerts]`: a command or a webhook that hears of what happens to a run. What they do, and
    /// whether they fail, never changes the run.
    pub alerts: AlertsConfig,
    /// `[profile]`: the steps whose work is recorded: what each rank's host and GPU did in them, as
    /// a trace for Perfetto and as a table.
    pub profile: ProfileConfig,
}

impl TrainConfig {
    /// The layout of this run on `world` ranks (`None`: there is no launcher that determines the
    /// number), after checking that the model, the sequence and the batch can be split that way.
    ///
    /// # Errors
    /// The layout is invalid, does not take `world` ranks or does not split the model; the error
    /// has the numbers.
    pub fn layout(&self, world: Option<usize>) -> Result<Layout, TrainError> {
        let layout = self.parallel.layout(world)?;
        self.validate_for(&layout).map(|()| layout)
    }

    /// The layout of this run on the devices of this host. `world` is the number of ranks that a
    /// launcher started.
    ///
    /// On GPUs without a launcher, `parallel.dp` or `parallel.ranks` (a layout sets one or both)
    /// determine the number of ranks; without them it is the largest number of GPUs over which the
    /// model and the batch can be split.
    ///
    /// # Errors
    /// As [`layout`](Self::layout); also a layout with more ranks than there are GPUs, with the
    /// numbers.
    pub fn layout_on(&self, devices: Devices, world: Option<usize>) -> Result<Layout, TrainError> {
        match (devices, world) {
            (Devices::Cuda { gpus }, None) => self
                .parallel
                .layout_on_gpus(gpus, |layout| self.validate_for(layout)),
            _ => self.layout(world),
        }
    }

    /// The attention kernel of this run on the devices of this host.
    ///
    /// # Errors
    /// The requested kernel does not support this model's attention.
    pub fn attention_on(&self, devices: Devices) -> Result<AttentionKernel, TrainError> {
        let on_gpu = devices != Devices::Cpu;
        let head_dims = self.model.head_dims();
        attention::resolved(self.train.attention, on_gpu, self.train.dtype, head_dims)
    }

    /// Tokens of one step over all ranks, once the batch ramp is over.
    pub fn tokens_per_step(&self) -> usize {
        self.train.global_batch * self.data.seq_lens().into_iter().sum::<usize>()
    }

    /// The configuration as TOML with every default spelled out. It reads back to the same
    /// configuration.
    ///
    /// # Panics
    /// An integer above `i64::MAX`, which only code can set: TOML has no such numbers.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("every integer is at most i64::MAX")
    }

    /// This configuration with the values that were derived from the ranks, the tokenizer or the
    /// model: what actually ran. Schedules that follow `train.steps` are not fixed, because a run
    /// may be extended.
    pub fn resolved(&self, layout: &Layout, model: &DecoderConfig) -> Self {
        let mut resolved = self.clone();
        resolved.parallel.set_degrees(layout);
        resolved.model.head_dim = Some(model.head_dim);
        resolved.model.vocab = Some(model.vocab);
        resolved
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::exit::Exit;

    fn with(sets: &[&str]) -> Result<TrainConfig, TrainError> {
        sets.iter()
            .try_fold(ConfigLayers::new(), |layers, set| layers.with_set(set))?
            .load()
    }

    #[test]
    fn an_empty_file_is_the_newcomers_run() {
        let config = ConfigLayers::new()
            .with_text("empty.toml", "")
            .unwrap()
            .load()
            .unwrap();
        assert_eq!(config, TrainConfig::default());
        assert_eq!(config.layout(None).unwrap().to_string(), "tp2-dp2-sp");
        assert_eq!(config.tokens_per_step(), 1024);
    }

    #[rstest]
    #[case(&[])]
    #[case(&["run.seed=7", "data.path=\"a 'quoted' \\\"path\\\"\"", "optimizer.lr=0.1", "model.vocab=260"])]
    #[case(&["model.rope_scaling.factor=32.0", "parallel.dp=2", "parallel.sp=false", "optimizer.min_lr=0"])]
    #[case(&["train.batch_ramp.samples=24", "train.check_replicas_interval=3", "optimizer.decay_samples=2400"])]
    #[case(&["optimizer.warmup_fraction=0.29", "optimizer.lr_decay_style=\"wsd\"", "optimizer.wsd_decay_steps=4"])]
    #[case(&["optimizer.eps=1.2345678901234567e-17", "generate.prompt=\"\\n\\u0000é\""])]
    fn the_resolved_text_reads_back_to_the_same_configuration(#[case] sets: &[&str]) {
        let config = with(sets).unwrap();
        let text = config.to_toml();
        let again = ConfigLayers::new()
            .with_text("config.toml", &text)
            .unwrap()
            .load()
            .unwrap();
        assert_eq!(again, config, "{text}");
    }

    #[rstest]
    #[case(&["train.global_batch=6", "train.micro_batch=2"], "`train.global_batch` is 6: it must be a multiple of train.micro_batch 2 x dp 2 = 4")]
    #[case(&["model.heads=6", "model.head_dim=16", "model.kv_heads=2", "parallel.tp=4"], "attention heads 6 is not divisible by tp 4")]
    #[case(&["data.seq_len=127"], "sequence length 127 is not divisible")]
    #[case(&["parallel.tp=3"], "choose another layout, or a multiple of 3 ranks; no launcher sets")]
    fn a_layout_that_does_not_split_the_run_is_refused(
        #[case] sets: &[&str],
        #[case] message: &str,
    ) {
        let error = with(sets).unwrap().layout(None).unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
        assert_eq!(error.exit(), Exit::BadInput);
    }

    #[rstest]
    #[case(1, &[], "tp1")]
    #[case(2, &[], "tp2-sp")]
    #[case(3, &[], "tp2-sp")]
    #[case(4, &[], "tp2-dp2-sp")]
    #[case(6, &[], "tp2-dp2-sp")]
    #[case(8, &[], "tp2-dp4-sp")]
    #[case(3, &["train.global_batch=12"], "dp3")]
    #[case(8, &["parallel.tp=1"], "dp4")]
    #[case(8, &["parallel.tp=4"], "tp4-dp2-sp")]
    #[case(8, &["parallel.dp=1"], "tp2-sp")]
    #[case(1, &["parallel.dp=1"], "tp1")]
    #[case(8, &["parallel.ranks=2"], "tp2-sp")]
    fn on_gpus_a_run_takes_as_many_as_it_can_be_split_over(
        #[case] gpus: usize,
        #[case] sets: &[&str],
        #[case] layout: &str,
    ) {
        let found = with(sets)
            .unwrap()
            .layout_on(Devices::Cuda { gpus }, None)
            .unwrap();
        assert_eq!(found.to_string(), layout);
    }

    #[rstest]
    #[case(
        "tp2-dp2",
        "layout `tp2-dp2` needs 4 GPUs, one per rank, but this host has 3"
    )]
    #[case("tp3", "attention heads 4 is not divisible by tp 3")]
    fn a_layout_that_the_gpus_do_not_carry_is_refused(#[case] layout: &str, #[case] message: &str) {
        let config = ConfigLayers::new()
            .with_layout(layout)
            .unwrap()
            .load()
            .unwrap();
        let error = config
            .layout_on(Devices::Cuda { gpus: 3 }, None)
            .unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
        assert_eq!(error.exit(), Exit::BadInput);
    }

    #[test]
    fn the_commented_file_spells_out_exactly_the_defaults_and_names_every_key() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/llama-tiny.toml");
        let text = std::fs::read_to_string(path).unwrap();
        let spelled: toml::Table = text.parse().unwrap();
        // The file differs from the defaults only in the name of its folder.
        let mut default = TrainConfig::default();
        default.run.dir = "runs/llama-tiny".into();
        assert_eq!(spelled, default.to_toml().parse().unwrap());
        let config = ConfigLayers::new().with_file(path).unwrap().load().unwrap();
        assert_eq!(config, default);
        for key in schema::keys() {
            let name = key.rsplit('.').next().unwrap();
            let named = text.lines().any(|line| {
                let line = line.trim_start_matches("# ");
                line.starts_with(&format!("{name} = ")) || line == format!("[{key}]")
            });
            assert!(named, "configs/llama-tiny.toml does not mention {key}");
        }
    }
}
