//! `[[precision.schedule]]`: recipes that follow each other in a run.

use megaburn_models::decoder::Precision;

use super::{
    TrainConfig,
    precision::{PrecisionConfig, PrecisionPhaseConfig, PrecisionRecipe},
    require::require,
};
use crate::error::TrainError;

/// The key of the list, for messages.
const KEY: &str = "precision.schedule";

impl PrecisionConfig {
    /// The phases of a run: the first step of each, and its precision without a schedule.
    pub(crate) fn phases(&self) -> Vec<(u64, Self)> {
        let base = Self {
            schedule: Vec::new(),
            ..self.clone()
        };
        let later = self.schedule.iter().map(|phase| {
            let start = phase.num_layers_at_start_in_bf16;
            let end = phase.num_layers_at_end_in_bf16;
            let precision = Self {
                recipe: phase.recipe,
                num_layers_at_start_in_bf16: start.unwrap_or(base.num_layers_at_start_in_bf16),
                num_layers_at_end_in_bf16: end.unwrap_or(base.num_layers_at_end_in_bf16),
                ..base.clone()
            };
            (phase.from_step, precision)
        });
        let mut phases = vec![(1, base.clone())];
        phases.extend(later);
        phases
    }

    /// The precision of a step.
    pub(crate) fn at_step(&self, step: u64) -> Self {
        let phases = self.phases().into_iter();
        let mut begun = phases.filter(|(from, _)| *from <= step.max(1));
        let (_, precision) = begun.next_back().expect("the first phase begins at step 1");
        precision
    }

    /// Whether a phase has one of these recipes.
    pub(super) fn uses(&self, is_one: impl Fn(PrecisionRecipe) -> bool) -> bool {
        is_one(self.recipe) || self.schedule.iter().any(|phase| is_one(phase.recipe))
    }

    /// Whether a phase quantises something.
    pub(crate) fn quantizes(&self) -> bool {
        self.uses(|recipe| recipe != PrecisionRecipe::Bf16)
    }

    /// The precision that a model is built with: all layers that a phase quantises can be quantised.
    /// The trainer sets their precision in each phase.
    pub fn of_all_phases(&self) -> Precision {
        let phases = self.phases();
        let of_models = phases.iter().map(|(_, precision)| precision.of_model());
        let quantised = of_models.filter(|precision| precision.linear.is_some());
        let joined = quantised.reduce(|a, b| Precision {
            linear: a.linear,
            start: a.start.min(b.start),
            end: a.end.min(b.end),
            experts_in_bf16: a.experts_in_bf16,
        });
        joined.unwrap_or_default()
    }

    /// Refuses a schedule that is not in the order of steps.
    pub(super) fn validate(&self) -> Result<(), TrainError> {
        let mut last = 1;
        for PrecisionPhaseConfig { from_step, .. } in &self.schedule {
            let rule = match last {
                1 => {
                    "a list of phases with from_step 2 or more: precision.recipe is the recipe of \
                    step 1"
                        .to_string()
                }
                last => format!(
                    "a list of phases in the order of their steps: from_step {} or more after \
                    {last}",
                    last + 1
                ),
            };
            let value = format!("a list with from_step {from_step}");
            require(*from_step > last, KEY, value, rule)?;
            last = *from_step;
        }
        Ok(())
    }
}

impl TrainConfig {
    /// Calls `check` with the configuration of each phase. An error about a later phase names the
    /// schedule.
    pub(super) fn check_phases(
        &self,
        check: impl Fn(&Self) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        for (from_step, precision) in self.precision.phases() {
            let of_phase = Self {
                precision,
                ..self.clone()
            };
            check(&of_phase).map_err(|error| match error {
                TrainError::Invalid { key, value, rule } if from_step > 1 => {
                    let name = key.strip_prefix("precision.").unwrap_or(key);
                    TrainError::Invalid {
                        key: KEY,
                        value: format!("a list with {name} {value} from step {from_step}"),
                        rule: format!("a list with {name} {rule}"),
                    }
                }
                error => error,
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use crate::config::{ConfigLayers, PrecisionRecipe, TrainConfig};

    fn loaded(text: &str, layout: &str) -> Result<TrainConfig, String> {
        let layers = ConfigLayers::new().with_text("p.toml", text);
        let layers = layers.and_then(|layers| layers.with_layout(layout));
        let checked = layers.and_then(|layers| {
            let config = layers.load()?;
            config.layout(None)?;
            Ok(config)
        });
        checked.map_err(|error| error.to_string())
    }

    #[rstest]
    #[case(
        "from_step = 1\nrecipe = \"mxfp8\"",
        "a list with from_step 1: it must be a list of phases with from_step 2 or more"
    )]
    #[case(
        "from_step = 9\nrecipe = \"mxfp8\"\n[[precision.schedule]]\nfrom_step = 9\nrecipe = \"bf16\"",
        "a list with from_step 9: it must be a list of phases in the order of their steps: from_step 10 or more after 9"
    )]
    #[case("from_step = 9\nrecipe = \"fp8\"", "unknown variant `fp8`")]
    #[case("from_step = 9", "missing field `recipe`")]
    #[case(
        "from_step = 9\nrecipe = \"bf16\"\nmargin = 3",
        "unknown field `margin`"
    )]
    #[case(
        "from_step = 9\nrecipe = \"blockwise\"",
        "`precision.schedule` is a list with recipe blockwise from step 9: it must be a list with \
        recipe \"tensorwise\" or \"delayed\" with this model and tp 2"
    )]
    #[case(
        "from_step = 9\nrecipe = \"delayed\"\nnum_layers_at_end_in_bf16 = 4",
        "`precision.schedule` is a list with num_layers_at_end_in_bf16 4 from step 9: it must be a list \
        with num_layers_at_end_in_bf16 less than 4"
    )]
    fn a_schedule_that_cannot_be_is_refused(#[case] phase: &str, #[case] message: &str) {
        let text = format!("[[precision.schedule]]\n{phase}\n");
        let error = loaded(&text, "tp2-sp").unwrap_err();
        assert!(error.contains(message), "{error}");
    }

    #[test]
    fn each_step_has_the_precision_of_its_phase() {
        let text = "[precision]\nnum_layers_at_end_in_bf16 = 2\n
            [[precision.schedule]]\nfrom_step = 3\nrecipe = \"delayed\"\n
            [[precision.schedule]]\nfrom_step = 5\nrecipe = \"mxfp8\"
            num_layers_at_start_in_bf16 = 1\nnum_layers_at_end_in_bf16 = 0\n
            [[precision.schedule]]\nfrom_step = 6\nrecipe = \"bf16\"";
        let precision = loaded(text, "tp1").unwrap().precision;
        use PrecisionRecipe::{Bf16, Delayed, Mxfp8};
        let expected = [Bf16, Bf16, Bf16, Delayed, Delayed, Mxfp8, Bf16, Bf16];
        for (step, recipe) in expected.into_iter().enumerate() {
            assert_eq!(precision.at_step(step as u64).recipe, recipe, "{step}");
        }
        let layers_of = |step| {
            let of_step = precision.at_step(step).of_model();
            let quantised = |block: &usize| of_step.of_block(*block, 4).is_some();
            (0..4).filter(quantised).collect::<Vec<_>>()
        };
        assert_eq!(
            [2, 4, 5].map(layers_of),
            [vec![], vec![0, 1], vec![1, 2, 3]]
        );
        let all = precision.of_all_phases();
        assert!((0..4).all(|block| all.of_block(block, 4).is_some()));
    }
}
