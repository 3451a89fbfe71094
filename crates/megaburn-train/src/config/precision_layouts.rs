//! Which recipes of `[precision]` a model and a layout can be trained with.

use megaburn_mesh::Layout;
use megaburn_models::DecoderConfig;

use super::{PrecisionConfig, PrecisionRecipe, TrainConfig, require::require};
use crate::error::TrainError;

impl PrecisionConfig {
    /// Refuses a format, scales or experts that NVFP4 does not have.
    fn check_nvfp4(&self, model: &DecoderConfig) -> Result<(), TrainError> {
        if self.recipe != PrecisionRecipe::Nvfp4 {
            return Ok(());
        }
        let of = "left out with precision.recipe = \"nvfp4\"";
        if let Some(format) = self.format {
            let rule = format!("{of}: all matrices are in E2M1");
            require(false, "precision.format", format, rule)?;
        }
        if let Some(powers) = self.power_of_two_scales {
            let rule = format!("{of}: its scales are numbers of E4M3, times one in f32");
            require(false, "precision.power_of_two_scales", powers, rule)?;
        }
        let in_bf16 = self.experts_in_bf16;
        require(
            in_bf16 || model.experts.is_none(),
            "precision.experts_in_bf16",
            in_bf16,
            "true with precision.recipe = \"nvfp4\", which routed experts do not have",
        )
    }
}

impl TrainConfig {
    /// Refuses a recipe whose blocks a layout would cut, because the layout would then compute other
    /// numbers than one rank; keys that contradict the recipe; and numbers of layers that the model
    /// does not have.
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
        self.precision.check_nvfp4(model)?;
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
    #[case(
        &["precision.recipe=nvfp4", "model.family=mixtral"],
        "tp1",
        "`precision.experts_in_bf16` is false: it must be true with precision.recipe = \"nvfp4\""
    )]
    #[case(&["precision.recipe=fp8"], "tp1", "precision.recipe")]
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
        &["precision.recipe=nvfp4", "precision.format=e4m3"],
        "tp1",
        "`precision.format` is e4m3: it must be left out with precision.recipe = \"nvfp4\": all"
    )]
    #[case(
        &["precision.recipe=nvfp4", "precision.power_of_two_scales=false"],
        "tp1",
        "`precision.power_of_two_scales` is false: it must be left out with precision.recipe = \"nvfp4\""
    )]
    #[case(
        &["precision.recipe=nvfp4", "model.head_dim=24"],
        "tp4",
        "16 features share a scale, and each rank would have 24 of queries"
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
    #[case(&["precision.recipe=nvfp4"], "tp4-sp")]
    #[case(&["precision.recipe=nvfp4"], "cp4")]
    #[case(&["precision.recipe=tensorwise"], "tp4-sp")]
    #[case(&["precision.recipe=delayed"], "cp4")]
    fn what_layouts_do_not_cut_is_accepted(#[case] sets: &[&str], #[case] layout: &str) {
        assert_eq!(checked(sets, layout), "");
    }
}
