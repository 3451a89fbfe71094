//! The precision of products, `[precision]`.

use std::fmt;

use burn::tensor::Device;
use megaburn_kernels::{QuantizationRecipe, Scaling, SmallFloat, can_quantize};
use megaburn_mesh::Layout;
use megaburn_models::{DecoderConfig, decoder::Precision};
use megaburn_parallel::LinearPrecision;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    TrainConfig, ineffective_keys::Condition, precision_fallback::PrecisionFallbackConfig,
    require::require,
};
use crate::error::TrainError;

/// `[precision]`: whether the linear layers of attention and MLPs multiply matrices in FP8.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(JsonSchema)]
pub struct PrecisionConfig {
    /// How matrices are quantised before they are multiplied (Megatron-LM's `--fp8-recipe`): `bf16`
    /// (not at all), `tensorwise`, `delayed`, `blockwise` or `mxfp8`.
    pub recipe: PrecisionRecipe,
    /// The FP8 formats (`--fp8-format`): `hybrid` or `e4m3`. Default, as in Transformer Engine:
    /// `hybrid` with `tensorwise` and `delayed`, `e4m3` with `blockwise` and `mxfp8`.
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
            amax_history_len: 1024,
            amax_compute: AmaxCompute::Max,
            margin: 0,
            log_interval: 0,
            schedule: Vec::new(),
            fallback: PrecisionFallbackConfig::default(),
        }
    }
}

/// `[[precision.schedule]]`: another recipe from a step on, until the next one of the list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[derive(JsonSchema)]
pub struct PrecisionPhaseConfig {
    /// The first step that is computed with it. The first step of a run is step 1.
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
}

impl fmt::Display for PrecisionRecipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bf16 => "bf16",
            Self::Tensorwise => "tensorwise",
            Self::Delayed => "delayed",
            Self::Blockwise => "blockwise",
            Self::Mxfp8 => "mxfp8",
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
                LinearPrecision::new(recipe).with_delayed(self.recipe == PrecisionRecipe::Delayed)
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

    /// Refuses a device that cannot quantise.
    ///
    /// # Errors
    /// Something is quantised, and the device is a GPU without the instructions.
    pub(crate) fn check_device(&self, device: &Device) -> Result<(), TrainError> {
        if !self.quantizes() || can_quantize(device) {
            return Ok(());
        }
        Err(TrainError::Invalid {
            key: "precision.recipe",
            value: self.recipe.to_string(),
            rule: "\"bf16\" on this GPU: FP8 needs compute capability 8.9 or higher (Ada, Hopper)"
                .into(),
        })
    }

    /// When keys of the section have an effect.
    pub(super) fn conditions(&self, has_experts: bool) -> Vec<Condition> {
        use PrecisionRecipe::{Bf16, Delayed, Mxfp8};
        let is_quantised = self.quantizes();
        let has_scales = self.uses(|recipe| ![Bf16, Mxfp8].contains(&recipe));
        let is_delayed = self.uses(|recipe| recipe == Delayed);
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
        ]
    }
}

impl TrainConfig {
    /// Refuses a recipe whose blocks a layout would cut, because the layout would then compute other
    /// numbers than one rank; and numbers of layers that the model does not have.
    pub(super) fn check_precision(
        &self,
        layout: &Layout,
        model: &DecoderConfig,
    ) -> Result<(), TrainError> {
        self.check_phases(|phase| phase.check_recipe(layout, model))
    }

    fn check_recipe(&self, layout: &Layout, model: &DecoderConfig) -> Result<(), TrainError> {
        let PrecisionConfig {
            recipe,
            num_layers_at_start_in_bf16: start,
            num_layers_at_end_in_bf16: end,
            ..
        } = self.precision;
        let Some(quantization) = self.precision.quantization() else {
            return Ok(());
        };
        let layers = model.layers;
        for (key, num, left) in [
            ("precision.num_layers_at_start_in_bf16", start, layers),
            (
                "precision.num_layers_at_end_in_bf16",
                end,
                layers.saturating_sub(start),
            ),
        ] {
            let rule = format!("less than {left}, or none of {layers} layers is quantised");
            require(num < left, key, num, rule)?;
        }
        let rule = "\"bf16\" with parallel.max_tokens_per_rank: the ranks that share a document, and \
            its scales, change from document to document";
        let is_dealt = self.parallel.max_tokens_per_rank.is_some();
        require(!is_dealt, "precision.recipe", recipe, rule)?;
        let Some(block) = quantization.block_len() else {
            return Ok(());
        };
        let tensor = "\"tensorwise\" or \"delayed\"";
        let Layout { tp, cp, .. } = *layout;
        self.check_expert_blocks(layout, model, block)?;
        let features = features(model).into_iter().filter(|_| tp > 1);
        let mut cut = features.map(|(what, unit, units)| (what, (units / tp).max(1) * unit));
        if let Some((what, own)) = cut.find(|(_, own)| !own.is_multiple_of(block)) {
            let rule = format!(
                "{tensor} with this model and tp {tp}: {block} features share a scale, and each rank \
                would have {own} of {what}, which is no multiple of {block}"
            );
            return require(false, "precision.recipe", recipe, rule);
        }
        // Ranks with latents and sequence parallelism also split the tokens of replicated layers.
        let splits_rows = layout.sp && model.latent.is_some();
        if cp == 1 && !splits_rows {
            return Ok(());
        }
        let rule = format!(
            "{tensor} with packed documents (data.documents) over cp {cp}: {block} tokens share a \
            scale, and the chunks of documents would cut them"
        );
        require(
            !(self.data.documents && cp > 1),
            "precision.recipe",
            recipe,
            rule,
        )?;
        let chunks = if cp > 1 { 2 * cp } else { 1 };
        let parts = if splits_rows { chunks * tp } else { chunks };
        let tokens = self.padded_seq_len(layout) * self.train.micro_batch / parts;
        let rule = format!(
            "{tensor} with this data.seq_len, train.micro_batch and layout: {block} tokens of a \
            micro-batch share a scale, and it is split into parts of {tokens}, which is no multiple \
            of {block}"
        );
        require(
            tokens.is_multiple_of(block),
            "precision.recipe",
            recipe,
            rule,
        )
    }
}

/// The dimensions that tensor parallelism splits: the name, the features of a unit, and the number
/// of units.
fn features(model: &DecoderConfig) -> Vec<(&'static str, usize, usize)> {
    let DecoderConfig {
        heads,
        kv_heads,
        head_dim,
        ffn,
        ..
    } = *model;
    let has_mlp = (0..model.num_blocks()).any(|index| model.layer_experts(index).is_none());
    let shared = model
        .experts
        .as_ref()
        .and_then(|experts| experts.shared_ffn);
    let mut all = match &model.latent {
        Some(latent) => vec![
            (
                "queries",
                latent.qk_nope_head_dim + latent.qk_rope_head_dim,
                heads,
            ),
            (
                "keys and values",
                latent.qk_nope_head_dim + latent.v_head_dim,
                heads,
            ),
            ("values", latent.v_head_dim, heads),
        ],
        None => vec![("queries", head_dim, heads), ("keys", head_dim, kv_heads)],
    };
    all.extend(has_mlp.then_some(("model.ffn", 1, ffn)));
    all.extend(shared.map(|ffn| ("model.experts.shared_ffn", 1, ffn)));
    all
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use crate::config::ConfigLayers;

    fn checked(sets: &[&str], layout: &str) -> String {
        let layers = ConfigLayers::new().with_layout(layout).unwrap();
        let layers = sets
            .iter()
            .try_fold(layers, |layers, set| layers.with_set(set));
        let checked = layers.and_then(|layers| layers.load()?.layout(None));
        checked
            .err()
            .map(|error| error.to_string())
            .unwrap_or_default()
    }

    #[rstest]
    #[case(&["precision.recipe=fp8"], "tp1", "precision.recipe")]
    #[case(&["precision.recipe=nvfp4"], "tp1", "precision.recipe")]
    #[case(&["precision.format=e5m2"], "tp1", "precision.format")]
    #[case(&["precision.amax_history_len=0"], "tp1", "`precision.amax_history_len` is 0: it must be at least 1")]
    #[case(&["precision.margin=17"], "tp1", "`precision.margin` is 17: it must be from 0 to 16")]
    #[case(
        &["precision.recipe=delayed", "precision.num_layers_at_start_in_bf16=5"],
        "tp1",
        "`precision.num_layers_at_start_in_bf16` is 5: it must be less than 4, or none of 4 layers"
    )]
    #[case(
        &[
            "precision.recipe=mxfp8",
            "precision.num_layers_at_start_in_bf16=2",
            "precision.num_layers_at_end_in_bf16=2",
        ],
        "tp1",
        "`precision.num_layers_at_end_in_bf16` is 2: it must be less than 2, or none of 4 layers"
    )]
    #[case(
        &["precision.recipe=blockwise"],
        "tp2-sp",
        "`precision.recipe` is blockwise: it must be \"tensorwise\" or \"delayed\" with this model and \
        tp 2: 128 features share a scale, and each rank would have 64 of queries, which is no multiple \
        of 128"
    )]
    #[case(
        &["precision.recipe=mxfp8", "train.micro_batch=1"],
        "cp8",
        "it is split into parts of 8, which is no multiple of 32"
    )]
    #[case(
        &["precision.recipe=mxfp8", "data.documents=true", "data.document_multiple=8"],
        "cp2",
        "with packed documents (data.documents) over cp 2"
    )]
    #[case(
        &["precision.recipe=tensorwise", "data.documents=true", "parallel.max_tokens_per_rank=256"],
        "cp2",
        "\"bf16\" with parallel.max_tokens_per_rank"
    )]
    #[case(
        &["precision.recipe=mxfp8", "model.family=mixtral"],
        "tp2-sp",
        "precision.experts_in_bf16 = true, with experts over cp 1, tp 2, ep 1 and etp 1: 32 tokens of an \
        expert share a scale"
    )]
    #[case(
        &["precision.recipe=blockwise", "model.family=mixtral", "model.experts.ffn=128"],
        "dp2-etp2",
        "and etp 2: 128 features share a scale, and each rank would have 64 of an expert's"
    )]
    fn what_cannot_be_quantised_is_refused_by_its_key(
        #[case] sets: &[&str],
        #[case] layout: &str,
        #[case] message: &str,
    ) {
        let error = checked(sets, layout);
        assert!(error.contains(message), "{error}");
    }

    #[rstest]
    #[case(&["precision.recipe=blockwise"], "dp2")]
    #[case(&["precision.recipe=mxfp8"], "tp2-sp")]
    #[case(&["precision.recipe=mxfp8"], "cp2")]
    #[case(&["precision.recipe=tensorwise"], "tp4-sp")]
    #[case(&["precision.recipe=delayed"], "cp4")]
    #[case(&["precision.recipe=mxfp8", "model.family=mixtral"], "tp2-ep2-sp")]
    #[case(&["precision.recipe=mxfp8", "model.family=mixtral", "precision.experts_in_bf16=true"], "tp2-sp")]
    #[case(&["precision.recipe=tensorwise", "model.family=mixtral"], "tp2-cp2-sp")]
    fn what_layouts_do_not_cut_is_accepted(#[case] sets: &[&str], #[case] layout: &str) {
        assert_eq!(checked(sets, layout), "");
    }
}
