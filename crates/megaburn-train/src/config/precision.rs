//! The precision of products, `[precision]`.

use std::fmt;

use megaburn_kernels::{Nvfp4, QuantizationRecipe, Scaling, SmallFloat};
use megaburn_models::decoder::Precision;
use megaburn_parallel::LinearPrecision;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ineffective_keys::Condition, precision_fallback::PrecisionFallbackConfig};

/// `[precision]`: whether the linear layers of attention and MLPs multiply matrices in FP8 or FP4.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(JsonSchema)]
pub struct PrecisionConfig {
    /// How matrices are quantised before they are multiplied (Megatron-LM's `--fp8-recipe`): `bf16`
    /// (not at all), `tensorwise`, `delayed`, `blockwise` or `mxfp8`; `nvfp4` (`--fp4-recipe`).
    pub recipe: PrecisionRecipe,
    /// The FP8 formats (`--fp8-format`): `hybrid` or `e4m3`. Default, as in Transformer Engine:
    /// `hybrid` with `tensorwise` and `delayed`, `e4m3` with `blockwise` and `mxfp8`. With `nvfp4` all
    /// matrices are in E2M1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format: Option<Fp8Format>,
    /// Whether scales are rounded to powers of two, so that scaling itself rounds nothing. Default, as
    /// in Transformer Engine: `true` with `blockwise`, else `false`. The scales of `mxfp8` always are
    /// powers of two.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power_of_two_scales: Option<bool>,
    /// The number of first layers that are not quantised (`--num-layers-at-start-in-bf16`, which
    /// Megatron-LM uses with `--first-last-layers-bf16`).
    pub num_layers_at_start_in_bf16: usize,
    /// The number of last layers that are not quantised (`--num-layers-at-end-in-bf16`). Blocks of
    /// multi-token prediction do not count.
    pub num_layers_at_end_in_bf16: usize,
    /// Whether the routed experts of mixtures of experts are not quantised. By default they are:
    /// the tokens of each expert, its weights and its gradients have scales of their own.
    pub experts_in_bf16: bool,
    /// Whether sequence parallelism gathers shards of the sequence in FP8, a byte an element, with
    /// `tensorwise` and `delayed`: half of what is sent, and kept for backward, in bf16. No number
    /// changes. If it is `false`, shards are gathered in `train.dtype` and quantised then.
    pub fp8_sequence_gather: bool,
    /// The number of steps whose largest magnitudes determine a scale with `delayed`
    /// (`--fp8-amax-history-len`, which is 1 by default there and 1024 in Transformer Engine).
    #[schemars(extend("minimum" = 1))]
    pub amax_history_len: usize,
    /// Which of these steps determines the scale with `delayed` (`--fp8-amax-compute-algo`): the
    /// largest (`max`, Transformer Engine's default) or the last (`most_recent`, Megatron-LM's).
    pub amax_compute: AmaxCompute,
    /// Scales are divided by two to this power with `delayed` (`--fp8-margin`), as room for
    /// magnitudes that grow from step to step.
    #[schemars(extend("minimum" = 0, "maximum" = 16))]
    pub margin: u32,
    /// Whether gradients are rounded stochastically with `nvfp4`, so that their expected value stays
    /// (Transformer Engine's `NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING=0`).
    pub stochastic_rounding: bool,
    /// Whether `nvfp4` multiplies the matrices of weight gradients by a random Hadamard matrix, 16
    /// tokens at a time, which spreads outliers (`NVTE_NVFP4_DISABLE_RHT=0`).
    pub random_hadamard: bool,
    /// Whether blocks of 16 by 16 elements of weights share a scale with `nvfp4`, so that both passes
    /// compute with the same numbers, instead of 16 neighbours
    /// (`NVTE_NVFP4_DISABLE_2D_QUANTIZATION=0`).
    pub two_dimensional_weights: bool,
    /// Whether ranks that shard optimizer state or parameters (`parallel.zero`) send each other
    /// quantised weights in FP8 instead of `train.dtype` (`--fp8-param-gather`): those that have one
    /// scale in the next step. No number of the training changes. Needs `train.dtype = "bf16"`, and
    /// f32 masters that are stored in f32.
    pub fp8_param_gather: bool,
    /// Steps between measurements of what quantisation loses, for `metrics.jsonl`: for each matrix of
    /// each quantised layer, the shares of elements that saturate and underflow, and the largest
    /// magnitude; 0 measures never.
    pub log_interval: u64,
    /// Other recipes from some steps on, as `[[precision.schedule]]` tables with `from_step`, `recipe`
    /// and, if they differ, `num_layers_at_start_in_bf16` and `num_layers_at_end_in_bf16`. Until the
    /// first of them, `recipe` is used.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub schedule: Vec<PrecisionPhaseConfig>,
    /// `[precision.fallback]`: when a layer is computed in `train.dtype` for some steps.
    pub fallback: PrecisionFallbackConfig,
}

impl Default for PrecisionConfig {
    fn default() -> Self {
        Self {
            recipe: PrecisionRecipe::Bf16,
            format: None,
            power_of_two_scales: None,
            num_layers_at_start_in_bf16: 0,
            num_layers_at_end_in_bf16: 0,
            experts_in_bf16: false,
            fp8_sequence_gather: true,
            amax_history_len: 1024,
            amax_compute: AmaxCompute::Max,
            margin: 0,
            fp8_param_gather: false,
            log_interval: 0,
            schedule: Vec::new(),
            fallback: PrecisionFallbackConfig::default(),
            stochastic_rounding: true,
            random_hadamard: true,
            two_dimensional_weights: true,
        }
    }
}

/// `[[precision.schedule]]`: another recipe from a step on, until the next one of the list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[derive(JsonSchema)]
pub struct PrecisionPhaseConfig {
    /// The first step that is computed with it. The first step of a run is step 1.
    #[schemars(extend("minimum" = 2))]
    pub from_step: u64,
    /// As `precision.recipe`.
    pub recipe: PrecisionRecipe,
    /// As `precision.num_layers_at_start_in_bf16`, which is the default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_layers_at_start_in_bf16: Option<usize>,
    /// As `precision.num_layers_at_end_in_bf16`, which is the default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_layers_at_end_in_bf16: Option<usize>,
}

/// How the matrices of linear layers are quantised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[derive(JsonSchema)]
pub enum PrecisionRecipe {
    /// Not at all: products are computed in `train.dtype`.
    #[default]
    Bf16,
    /// One scale per matrix, from its own largest magnitude.
    Tensorwise,
    /// One scale per matrix, from its largest magnitudes in the steps before.
    Delayed,
    /// One scale for 128 neighbours, and for 128 by 128 elements of weights (DeepSeek-V3).
    Blockwise,
    /// One power of two for 32 neighbours (OCP Microscaling).
    Mxfp8,
    /// Four bits, one scale in E4M3 for 16 neighbours, and one in f32 per matrix (NVFP4).
    Nvfp4,
}

impl fmt::Display for PrecisionRecipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bf16 => "bf16",
            Self::Tensorwise => "tensorwise",
            Self::Delayed => "delayed",
            Self::Blockwise => "blockwise",
            Self::Mxfp8 => "mxfp8",
            Self::Nvfp4 => "nvfp4",
        })
    }
}

/// The FP8 formats of a recipe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[derive(JsonSchema)]
pub enum Fp8Format {
    /// Inputs and weights in E4M3, gradients in E5M2, which has a wider range.
    Hybrid,
    /// All matrices in E4M3.
    E4m3,
}

impl fmt::Display for Fp8Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Hybrid => "hybrid",
            Self::E4m3 => "e4m3",
        })
    }
}

/// The step whose largest magnitude determines a delayed scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[derive(JsonSchema)]
pub enum AmaxCompute {
    /// The largest of all steps that are kept.
    Max,
    /// The last step.
    MostRecent,
}

impl PrecisionConfig {
    /// The precision of the model, without the schedule.
    pub fn of_model(&self) -> Precision {
        Precision {
            linear: self.quantization().map(|recipe| {
                LinearPrecision::new(recipe)
                    .with_delayed(self.recipe == PrecisionRecipe::Delayed)
                    .with_fp8_sequence_gather(self.fp8_sequence_gather)
            }),
            start: self.num_layers_at_start_in_bf16,
            end: self.num_layers_at_end_in_bf16,
            experts_in_bf16: self.experts_in_bf16,
        }
    }

    /// The formats, by the recipe if they are not set.
    pub(crate) fn resolved_format(&self) -> Fp8Format {
        let has_blocks = [PrecisionRecipe::Blockwise, PrecisionRecipe::Mxfp8];
        let usual = match has_blocks.contains(&self.recipe) {
            true => Fp8Format::E4m3,
            false => Fp8Format::Hybrid,
        };
        self.format.unwrap_or(usual)
    }

    /// The definition of the recipe; `None` if nothing is quantised.
    pub(crate) fn quantization(&self) -> Option<QuantizationRecipe> {
        let scaling = match self.recipe {
            PrecisionRecipe::Bf16 => return None,
            PrecisionRecipe::Tensorwise | PrecisionRecipe::Delayed => Scaling::Tensor,
            PrecisionRecipe::Blockwise => Scaling::Blocks,
            PrecisionRecipe::Mxfp8 => Scaling::Microscaling,
            PrecisionRecipe::Nvfp4 => {
                return Some(QuantizationRecipe::nvfp4(Nvfp4 {
                    stochastic_rounding: self.stochastic_rounding,
                    random_hadamard: self.random_hadamard,
                    two_dimensional_weights: self.two_dimensional_weights,
                }));
            }
        };
        let is_blockwise = scaling == Scaling::Blocks;
        Some(QuantizationRecipe {
            scaling,
            forward: SmallFloat::E4m3,
            gradients: match self.resolved_format() {
                Fp8Format::Hybrid => SmallFloat::E5m2,
                Fp8Format::E4m3 => SmallFloat::E4m3,
            },
            power_of_two_scales: self.power_of_two_scales.unwrap_or(is_blockwise),
        })
    }

    /// When keys of the section have an effect.
    pub(super) fn conditions(&self, has_experts: bool, splits_sequences: bool) -> Vec<Condition> {
        use PrecisionRecipe::{Bf16, Delayed, Mxfp8, Nvfp4, Tensorwise};
        let is_quantised = self.quantizes();
        let has_scales = self.uses(|recipe| ![Bf16, Mxfp8].contains(&recipe));
        let is_delayed = self.uses(|recipe| recipe == Delayed);
        let is_nvfp4 = self.uses(|recipe| recipe == Nvfp4);
        vec![
            (
                "format num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 log_interval \
                 fallback.max_underflow_share fallback.loss_spike",
                is_quantised,
                "with precision.recipe other than \"bf16\"",
            ),
            (
                "experts_in_bf16",
                is_quantised && has_experts,
                "with precision.recipe other than \"bf16\" and a model that has experts",
            ),
            (
                "fp8_sequence_gather",
                splits_sequences && self.uses(|recipe| [Tensorwise, Delayed].contains(&recipe)),
                "with precision.recipe = \"tensorwise\" or \"delayed\" and sequence parallelism \
                 (parallel.sp)",
            ),
            (
                "power_of_two_scales",
                has_scales,
                "with precision.recipe = \"tensorwise\", \"delayed\" or \"blockwise\"",
            ),
            (
                "amax_compute margin fallback.max_saturated_share",
                is_delayed,
                "with precision.recipe = \"delayed\"",
            ),
            (
                "amax_history_len",
                is_delayed && self.amax_compute == AmaxCompute::Max,
                "with precision.recipe = \"delayed\" and precision.amax_compute = \"max\"",
            ),
            (
                "fallback.interval",
                self.fallback.has_bounds(),
                "with precision.fallback.max_saturated_share or max_underflow_share",
            ),
            (
                "fallback.duration_steps",
                self.fallback.is_set(),
                "with precision.fallback.max_saturated_share, max_underflow_share or loss_spike",
            ),
            (
                "stochastic_rounding random_hadamard two_dimensional_weights",
                is_nvfp4,
                "with precision.recipe = \"nvfp4\"",
            ),
        ]
    }
}
