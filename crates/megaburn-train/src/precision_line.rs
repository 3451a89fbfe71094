//! The line of the console that says which layers multiply quantised matrices and which do not.

use megaburn_kernels::SmallFloat;
use megaburn_models::DecoderConfig;

use crate::config::TrainConfig;

/// The console's description of a run's quantised products; `None` if it has none.
pub(crate) fn describe(config: &TrainConfig, model: &DecoderConfig) -> Option<String> {
    let recipe = config.precision.quantization()?;
    let precision = config.precision.of_model();
    let blocks = model.num_blocks();
    let is_quantised = |block: &usize| precision.of_block(*block, model.layers).is_some();
    let quantised = (0..blocks).filter(is_quantised).count();
    let formats = match recipe.gradients {
        SmallFloat::E5m2 => "e4m3, gradients in e5m2",
        _ => "e4m3",
    };
    let are_quantised = !precision.experts_in_bf16;
    let experts = match model.experts {
        Some(_) if are_quantised => " and routers",
        Some(_) => ", routers and routed experts",
        None => "",
    };
    let has_mlp = |block| match model.layer_experts(block) {
        None => true,
        Some(experts) => experts.shared_ffn.is_some(),
    };
    let has_experts = model.experts.is_some() && are_quantised;
    let parts = match ((0..blocks).any(has_mlp), has_experts) {
        (true, true) => "attention, MLPs and routed experts",
        (true, false) => "attention and MLPs",
        (false, true) => "attention and routed experts",
        (false, false) => "attention",
    };
    Some(format!(
        "{}: {parts} of {quantised} of {blocks} layers in {formats}; all else in {}, such \
        as embedding, output projection{experts}",
        config.precision.recipe, config.train.dtype,
    ))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::config::ConfigLayers;

    #[rstest]
    #[case(&[], None)]
    #[case(
        &["precision.recipe=tensorwise", "precision.num_layers_at_end_in_bf16=1", "train.dtype=bf16"],
        Some("tensorwise: attention and MLPs of 3 of 4 layers in e4m3, gradients in e5m2; all else in \
            bf16, such as embedding, output projection")
    )]
    #[case(
        &["precision.recipe=blockwise", "model.family=mixtral"],
        Some("blockwise: attention and routed experts of 4 of 4 layers in e4m3; all else in f32, such \
            as embedding, output projection and routers")
    )]
    #[case(
        &[
            "precision.recipe=blockwise",
            "model.family=mixtral",
            "precision.experts_in_bf16=true",
        ],
        Some("blockwise: attention of 4 of 4 layers in e4m3; all else in f32, such as \
            embedding, output projection, routers and routed experts")
    )]
    fn the_layers_and_the_formats_are_said(#[case] sets: &[&str], #[case] expected: Option<&str>) {
        let layers = sets
            .iter()
            .try_fold(ConfigLayers::new(), |layers, set| layers.with_set(set));
        let config = layers.unwrap().load().unwrap();
        let model = config.fresh_model(260);
        assert_eq!(describe(&config, &model).as_deref(), expected);
    }
}
