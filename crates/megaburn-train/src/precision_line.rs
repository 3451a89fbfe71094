//! The lines of the console that say which layers multiply quantised matrices and which do not.

use burn::tensor::Device;
use megaburn_kernels::{SmallFloat, is_emulated};
use megaburn_models::DecoderConfig;
use megaburn_report::{
    console::human_number,
    metrics::{FallbackMetrics, LayerQuantization, MatrixQuantization, PrecisionMetrics},
};

use crate::{
    config::{Dtype, PrecisionConfig, TrainConfig},
    trainer::Trainer,
};

/// The number of layers about which there are lines of their own.
const FEW: usize = 3;

/// The linear layers that are computed in `train.dtype` from a step on, because they fell back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeldLayers {
    pub(crate) layers: usize,
    /// The last step in which one of them is.
    pub(crate) until_step: u64,
}

/// The console's description of the quantised products of a run that starts or resumes.
pub(crate) fn describe_start(config: &TrainConfig, trainer: &Trainer) -> Option<String> {
    let model = trainer.model_config();
    let step = trainer.progress().step + 1;
    describe(
        (config, model),
        trainer.device(),
        step,
        trainer.held_layers(),
    )
}

/// The description of a run's quantised products in a step, and of later changes; `None` if it has
/// none.
fn describe(
    (config, model): (&TrainConfig, &DecoderConfig),
    device: &Device,
    step: u64,
    held: Option<HeldLayers>,
) -> Option<String> {
    if !config.precision.quantizes() {
        return None;
    }
    let phases = config.precision.phases().into_iter();
    let later = phases.filter(|(from, _)| *from > step);
    let later = later.map(|(from, precision)| format!("; {} from step {from}", precision.recipe));
    let now = describe_phase(config, &config.precision.at_step(step), model, device);
    let dtype = config.train.dtype;
    let held = held.map(|HeldLayers { layers, until_step }| {
        format!(
            "; {layers} linear layers have fallen back to {dtype}, up to step {until_step} at the \
            longest: remove precision.fallback to quantise them at once"
        )
    });
    Some(now + &held.unwrap_or_default() + &later.collect::<String>())
}

/// The description of the phase that a step begins, except the first step of a run.
pub(crate) fn describe_change(
    (config, model): (&TrainConfig, &DecoderConfig),
    device: &Device,
    step: u64,
) -> Option<String> {
    let phases = config.precision.phases();
    let (_, precision) = phases.iter().skip(1).find(|(from, _)| *from == step)?;
    let what = describe_phase(config, precision, model, device);
    Some(format!("from step {step} {what}"))
}

fn describe_phase(
    config: &TrainConfig,
    precision: &PrecisionConfig,
    model: &DecoderConfig,
    device: &Device,
) -> String {
    let Some(recipe) = precision.quantization() else {
        return format!("in {}: nothing is quantised", config.train.dtype);
    };
    let of_model = precision.of_model();
    let blocks = model.num_blocks();
    let is_quantised = |block: &usize| of_model.of_block(*block, model.layers).is_some();
    let quantised = (0..blocks).filter(is_quantised).count();
    let formats = match recipe.gradients {
        SmallFloat::E5m2 => "e4m3, gradients in e5m2",
        SmallFloat::E4m3 => "e4m3",
        SmallFloat::E2m1 => "e2m1",
    };
    let emulated = match is_emulated(&recipe, device) {
        true => ", emulated in f32",
        false => "",
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
    format!(
        "{}: {parts} of {quantised} of {blocks} layers in {formats}{emulated}; all else in {}, such \
        as embedding, output projection{experts}",
        precision.recipe, config.train.dtype,
    )
}

/// What the console says about a step's precision: layers that fall back or no longer do, and the
/// largest shares that were lost.
pub(crate) fn describe_step(
    config: &TrainConfig,
    step: u64,
    found: &PrecisionMetrics,
) -> Vec<String> {
    let dtype = config.train.dtype;
    let lost_too_much = found.fallbacks.iter().filter(|it| it.matrix.is_some());
    let begun = share_lines(dtype, step, &lost_too_much.collect::<Vec<_>>());
    let ended = match found.ended_fallbacks.as_slice() {
        [] => None,
        [layer] => Some(format!("{layer} no longer falls back to {dtype}")),
        layers if layers.len() <= FEW => Some(format!(
            "{} no longer fall back to {dtype}",
            layers.join(", ")
        )),
        layers => Some(format!(
            "{} layers no longer fall back to {dtype}",
            layers.len()
        )),
    };
    let lost = [
        largest(found, "saturated", |matrix| matrix.saturated),
        largest(found, "underflowed", |matrix| matrix.underflowed),
    ];
    let begun = begun.into_iter();
    begun
        .chain(spike_line(dtype, step, found))
        .chain(ended)
        .chain(lost.into_iter().flatten())
        .collect()
}

/// The lines about layers that fall back because of what a matrix lost: one for all of them if they
/// are not few.
fn share_lines(dtype: Dtype, step: u64, fallbacks: &[&FallbackMetrics]) -> Vec<String> {
    let why = |fallback: &FallbackMetrics| {
        let [value, bound] = [fallback.value, fallback.bound].map(percent);
        let matrix = fallback.matrix.as_deref().unwrap_or_default();
        let cause = &fallback.cause;
        format!("{value} of its {matrix} {cause} in step {step}, more than {bound}")
    };
    if fallbacks.len() <= FEW {
        let line = |fallback: &&FallbackMetrics| {
            let FallbackMetrics {
                layer, until_step, ..
            } = fallback;
            let why = why(fallback);
            format!("{layer} is computed in {dtype} up to step {until_step}: {why}")
        };
        return fallbacks.iter().map(line).collect();
    }
    let until = fallbacks.iter().map(|it| it.until_step).max();
    let most = fallbacks.iter().max_by(|a, b| {
        let [of_a, of_b] = [a, b].map(|it| it.value / it.bound);
        of_a.total_cmp(&of_b).then(a.value.total_cmp(&b.value))
    });
    let line = until.zip(most).map(|(until, most)| {
        format!(
            "{} layers are computed in {dtype}, up to step {until} at the longest; {} lost most: {}",
            fallbacks.len(),
            most.layer,
            why(most)
        )
    });
    line.into_iter().collect()
}

/// The line after a spike of the loss, if layers fell back because of it.
fn spike_line(dtype: Dtype, step: u64, found: &PrecisionMetrics) -> Option<String> {
    let of_spike: Vec<&FallbackMetrics> = found
        .fallbacks
        .iter()
        .filter(|it| it.matrix.is_none())
        .collect();
    let FallbackMetrics { value, bound, .. } = of_spike.first()?;
    let until = of_spike.iter().map(|it| it.until_step).max()?;
    let layers = of_spike.len();
    Some(format!(
        "{layers} layers are computed in {dtype}, up to step {until} at the longest: the loss of step \
        {step} is {value:.4}, more than {bound:.4}"
    ))
}

/// The matrix with the largest share of lost elements, if layers were measured and lost some.
fn largest(
    found: &PrecisionMetrics,
    what: &str,
    share: fn(&MatrixQuantization) -> f64,
) -> Option<String> {
    let matrices = found.layers.iter().flat_map(|(layer, matrices)| {
        let LayerQuantization {
            input,
            weight,
            gradient,
        } = matrices;
        let all = [("input", input), ("weight", weight), ("gradient", gradient)];
        let of =
            move |(matrix, found): (_, &Option<_>)| Some((layer, matrix, share(found.as_ref()?)));
        all.into_iter().filter_map(of)
    });
    let largest = matrices.max_by(|a, b| a.2.total_cmp(&b.2));
    let (layer, matrix, share) = largest.filter(|(_, _, share)| *share > 0.0)?;
    let share = percent(share);
    Some(format!(
        "at most {share} of a matrix {what}: the {matrix} of {layer}"
    ))
}

fn percent(share: f64) -> String {
    format!("{}%", human_number(100.0 * share))
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
        Some("tensorwise: attention and MLPs of 3 of 4 layers in e4m3, gradients in e5m2, emulated \
            in f32; all else in bf16, such as embedding, output projection")
    )]
    #[case(
        &["precision.recipe=blockwise", "model.family=mixtral"],
        Some("blockwise: attention and routed experts of 4 of 4 layers in e4m3, emulated in f32; all \
            else in f32, such as embedding, output projection and routers")
    )]
    #[case(
        &[
            "precision.recipe=blockwise",
            "model.family=mixtral",
            "precision.experts_in_bf16=true",
        ],
        Some("blockwise: attention of 4 of 4 layers in e4m3, emulated in f32; all else in f32, \
            such as embedding, output projection, routers and routed experts")
    )]
    #[case(
        &["precision.recipe=nvfp4", "precision.num_layers_at_end_in_bf16=1"],
        Some("nvfp4: attention and MLPs of 3 of 4 layers in e2m1, emulated in f32; all else in \
            f32, such as embedding, output projection")
    )]
    #[case(
        &["precision.schedule=[{from_step=9,recipe=\"mxfp8\"}, {from_step=12,recipe=\"bf16\"}]"],
        Some("in f32: nothing is quantised; mxfp8 from step 9; bf16 from step 12")
    )]
    fn the_layers_and_the_formats_are_said(#[case] sets: &[&str], #[case] expected: Option<&str>) {
        let layers = sets
            .iter()
            .try_fold(ConfigLayers::new(), |layers, set| layers.with_set(set));
        let config = layers.unwrap().load().unwrap();
        let model = config.fresh_model(260);
        let found = describe((&config, &model), &Device::flex(), 1, None);
        assert_eq!(found.as_deref(), expected);
    }

    #[test]
    fn layers_that_have_fallen_back_are_said_at_a_resume() {
        let config = ConfigLayers::new().with_set("precision.recipe=tensorwise");
        let config = config.unwrap().load().unwrap();
        let held = HeldLayers {
            layers: 5,
            until_step: 90,
        };
        let model = config.fresh_model(260);
        let found = describe((&config, &model), &Device::flex(), 7, Some(held)).unwrap();
        let expected = "projection; 5 linear layers have fallen back to f32, up to step 90 at the \
            longest: remove precision.fallback to quantise them at once";
        assert!(found.ends_with(expected), "{found}");
    }

    #[test]
    fn changes_are_said_at_their_step() {
        let schedule = "precision.schedule=[{from_step=9,recipe=\"mxfp8\"}]";
        let config = ConfigLayers::new().with_set(schedule).unwrap();
        let config = config.load().unwrap();
        let model = config.fresh_model(260);
        let [before, at] =
            [8, 9].map(|step| describe_change((&config, &model), &Device::flex(), step));
        assert_eq!(before, None);
        let at = at.unwrap();
        assert!(
            at.starts_with("from step 9 mxfp8: attention and MLPs of 4 of 4"),
            "{at}"
        );
    }

    #[test]
    fn fallbacks_and_the_largest_shares_are_said() {
        let config = ConfigLayers::new().load().unwrap();
        let matrix = |saturated, underflowed| {
            Some(MatrixQuantization {
                saturated,
                underflowed,
                amax: 2.0,
            })
        };
        let layer = |input, gradient| LayerQuantization {
            input,
            weight: None,
            gradient,
        };
        let found = PrecisionMetrics {
            recipe: "delayed".into(),
            layers: [
                ("a".into(), layer(matrix(0.25, 0.0), matrix(0.0, 0.125))),
                ("b".into(), layer(matrix(0.125, 0.0), None)),
            ]
            .into(),
            fallbacks: vec![
                FallbackMetrics {
                    layer: "a".into(),
                    matrix: Some("input".into()),
                    cause: "saturated".into(),
                    value: 0.25,
                    bound: 0.01,
                    until_step: 30,
                },
                FallbackMetrics {
                    layer: "b".into(),
                    matrix: None,
                    cause: "loss".into(),
                    value: 4.0,
                    bound: 3.5,
                    until_step: 30,
                },
                FallbackMetrics {
                    layer: "c".into(),
                    matrix: None,
                    cause: "loss".into(),
                    value: 4.0,
                    bound: 3.5,
                    until_step: 25,
                },
            ],
            ended_fallbacks: vec!["c".into()],
        };
        let expected = [
            "a is computed in f32 up to step 30: 25.0% of its input saturated in step 20, more than \
            1.00%",
            "2 layers are computed in f32, up to step 30 at the longest: the loss of step 20 is \
            4.0000, more than 3.5000",
            "c no longer falls back to f32",
            "at most 25.0% of a matrix saturated: the input of a",
            "at most 12.5% of a matrix underflowed: the gradient of a",
        ];
        assert_eq!(describe_step(&config, 20, &found), expected);
        // Many layers have one line.
        let many = |layer: &str| FallbackMetrics {
            layer: layer.into(),
            value: if layer == "b" { 0.5 } else { 0.25 },
            ..found.fallbacks[0].clone()
        };
        let names = ["a", "b", "c", "d"];
        let found = PrecisionMetrics {
            fallbacks: names.map(many).into(),
            ended_fallbacks: names.map(String::from).into(),
            ..PrecisionMetrics::default()
        };
        let expected = [
            "4 layers are computed in f32, up to step 30 at the longest; b lost most: 50.0% of its \
            input saturated in step 20, more than 1.00%",
            "4 layers no longer fall back to f32",
        ];
        assert_eq!(describe_step(&config, 20, &found), expected);
    }
}
