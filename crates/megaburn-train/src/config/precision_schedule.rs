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

    /// The phase of a step: its first step, and its precision.
    pub(crate) fn phase_at(&self, step: u64) -> (u64, Self) {
        let phases = self.phases().into_iter();
        let mut begun = phases.filter(|(from, _)| *from <= step.max(1));
        begun.next_back().expect("the first phase begins at step 1")
    }

    /// The precision of a step.
    pub(crate) fn at_step(&self, step: u64) -> Self {
        self.phase_at(step).1
    }

    /// The last step of the phase of a step, unless it lasts until the end of the run.
    pub(crate) fn last_step_of_phase(&self, step: u64) -> Option<u64> {
        let mut starts = self.schedule.iter().map(|phase| phase.from_step);
        starts.find(|from| *from > step).map(|from| from - 1)
    }

    /// Whether a phase has one of these recipes.
    pub(super) fn uses(&self, is_one: impl Fn(PrecisionRecipe) -> bool) -> bool {
        is_one(self.recipe) || self.schedule.iter().any(|phase| is_one(phase.recipe))
    }

    /// Whether a phase quantises with one scale per matrix.
    pub(super) fn has_one_scale(&self) -> bool {
        let all = [PrecisionRecipe::Tensorwise, PrecisionRecipe::Delayed];
        self.uses(|recipe| all.contains(&recipe))
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
    /// Refuses a device that cannot quantise, if a phase quantises.
    pub(super) fn check_quantizing(&self, can_quantize: bool) -> Result<(), TrainError> {
        let rule = "\"bf16\" on this GPU: FP8 needs compute capability 8.9 or higher (Ada, Hopper)";
        self.check_phases(|phase| {
            let precision = &phase.precision;
            let is_possible = can_quantize || !precision.quantizes();
            require(is_possible, "precision.recipe", precision.recipe, rule)
        })
    }

    /// A note on the phases of the schedule that the run does not reach.
    pub(super) fn note_on_late_phases(&self) -> Option<String> {
        let steps = self.train.steps;
        let phases = self.precision.schedule.iter();
        let late = phases.filter(|phase| phase.from_step > steps);
        let late: Vec<String> = late.map(|phase| phase.from_step.to_string()).collect();
        (!late.is_empty()).then(|| {
            format!(
                "the run ends after step {steps} (train.steps): the phases of {KEY} from step {} \
                have no effect",
                late.join(", ")
            )
        })
    }

    /// Calls `check` with the configuration of each phase. An error about a later phase names the
    /// schedule, or the key that the phase has its value from.
    pub(super) fn check_phases(
        &self,
        check: impl Fn(&Self) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        for (from_step, precision) in self.precision.phases() {
            let of_phase = Self {
                precision,
                ..self.clone()
            };
            let mut schedule = self.precision.schedule.iter();
            let phase = schedule.find(|phase| phase.from_step == from_step);
            let sets_layers = phase.is_some_and(|phase| {
                phase.num_layers_at_start_in_bf16.is_some()
                    || phase.num_layers_at_end_in_bf16.is_some()
            });
            let is_of_phase = |key: &str| match key {
                "precision.recipe" => true,
                "precision.num_layers_at_start_in_bf16" | "precision.num_layers_at_end_in_bf16" => {
                    sets_layers
                }
                _ => false,
            };
            check(&of_phase).map_err(|error| match error {
                TrainError::Invalid { key, value, rule } if from_step > 1 && is_of_phase(key) => {
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
        let last = [1, 2, 3, 4, 6].map(|step| precision.last_step_of_phase(step));
        assert_eq!(last, [Some(2), Some(2), Some(4), Some(4), None]);
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

    /// A number of layers that a phase does not set is that of `[precision]`.
    #[test]
    fn an_inherited_number_of_layers_is_refused_by_its_own_key() {
        let text = "[precision]\nnum_layers_at_end_in_bf16 = 5
            [[precision.schedule]]\nfrom_step = 9\nrecipe = \"delayed\"\n";
        let error = loaded(text, "tp1").unwrap_err();
        let expected = "`precision.num_layers_at_end_in_bf16` is 5: it must be less than 4";
        assert!(error.contains(expected), "{error}");
    }

    /// On a GPU without FP8 only what quantises is refused, by its own key.
    #[rstest]
    #[case(
        "mxfp8",
        "bf16",
        "`precision.recipe` is mxfp8: it must be \"bf16\" on this GPU"
    )]
    #[case(
        "bf16",
        "delayed",
        "`precision.schedule` is a list with recipe delayed from step 9: it must be a list with recipe \
        \"bf16\" on this GPU"
    )]
    fn a_device_that_cannot_quantise_refuses_phases(
        #[case] first: &str,
        #[case] second: &str,
        #[case] message: &str,
    ) {
        let text = |first, second| {
            format!(
                "[precision]\nrecipe = \"{first}\"
                [[precision.schedule]]\nfrom_step = 9\nrecipe = \"{second}\"\n"
            )
        };
        let config = loaded(&text(first, second), "tp1").unwrap();
        config.check_quantizing(true).unwrap();
        let error = config.check_quantizing(false).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
        let config = loaded(&text("bf16", "bf16"), "tp1").unwrap();
        config.check_quantizing(false).unwrap();
    }
}
