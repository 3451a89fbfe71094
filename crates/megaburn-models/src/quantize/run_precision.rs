//! What a run computed in its own type although it quantised other products.

use megaburn_checkpoint::Checkpoint;
use serde_json::Value;

/// The precision of the last step of a run, as its checkpoint records it in `[precision]`. The
/// default is that of a run that quantised nothing, and of a checkpoint that no run wrote.
#[derive(Debug, Default)]
pub(super) struct RunPrecision {
    /// Number of first layers that were not quantised.
    start: usize,
    /// Number of last layers that were not quantised.
    end: usize,
    /// Whether routed experts were not quantised.
    keeps_experts: bool,
    /// Whether blocks had scales that are powers of two.
    pub(super) has_powers_of_two: bool,
}

impl RunPrecision {
    pub(super) fn of(checkpoint: &Checkpoint) -> Self {
        let said = &checkpoint.trainer()["config"]["precision"];
        Self::of_section(said, checkpoint.step())
    }

    fn of_section(said: &Value, step: u64) -> Self {
        let begun = |phase: &&Value| {
            let from = phase["from_step"].as_u64();
            from.is_some_and(|from| from <= step.max(1))
        };
        let mut phases = said["schedule"].as_array().into_iter().flatten();
        let phase = phases.rfind(begun).unwrap_or(&Value::Null);
        let own = |key: &str| match &phase[key] {
            Value::Null => &said[key],
            own => own,
        };
        let recipe = own("recipe").as_str().unwrap_or("bf16");
        if recipe == "bf16" {
            return Self::default();
        }
        let number = |key| own(key).as_u64().unwrap_or(0) as usize;
        let is_blockwise = recipe == "blockwise";
        Self {
            start: number("num_layers_at_start_in_bf16"),
            end: number("num_layers_at_end_in_bf16"),
            // Runs without the key quantised no experts.
            keeps_experts: said["experts_in_bf16"].as_bool().unwrap_or(true),
            has_powers_of_two: is_blockwise && said["power_of_two_scales"] != false,
        }
    }

    /// Whether the weight at `path` of a model of `layers` layers was not quantised, although others
    /// were.
    pub(super) fn keeps(&self, path: &str, layers: usize) -> bool {
        let index = path.split('.').nth(1).and_then(|index| index.parse().ok());
        let is_kept = |index: usize| {
            index < self.start || (layers.saturating_sub(self.end)..layers).contains(&index)
        };
        let is_expert = path.contains(".moe.experts.");
        index.is_some_and(is_kept) || self.keeps_experts && is_expert
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::json;

    use super::*;

    const DENSE: &str = "mlp.up";
    const EXPERT: &str = "moe.experts.1.up";

    #[rstest]
    #[case::no_run(Value::Null, 5, &[])]
    #[case::bf16(json!({"recipe": "bf16", "num_layers_at_start_in_bf16": 2}), 5, &[])]
    #[case::ends(
        json!({"recipe": "delayed", "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 2,
            "experts_in_bf16": false}),
        5, &[(0, DENSE), (0, EXPERT), (2, DENSE), (2, EXPERT), (3, DENSE), (3, EXPERT)]
    )]
    #[case::experts(
        json!({"recipe": "delayed", "experts_in_bf16": true}),
        5, &[(0, EXPERT), (1, EXPERT), (2, EXPERT), (3, EXPERT), (4, EXPERT)]
    )]
    #[case::older(
        json!({"recipe": "mxfp8"}),
        5, &[(0, EXPERT), (1, EXPERT), (2, EXPERT), (3, EXPERT), (4, EXPERT)]
    )]
    #[case::last_phase(
        json!({"recipe": "mxfp8", "experts_in_bf16": false, "num_layers_at_start_in_bf16": 1,
            "schedule": [
                {"from_step": 3, "recipe": "tensorwise", "num_layers_at_end_in_bf16": 1},
                {"from_step": 6, "recipe": "bf16"},
            ]}),
        5, &[(0, DENSE), (0, EXPERT), (3, DENSE), (3, EXPERT)]
    )]
    #[case::after_phases(
        json!({"recipe": "mxfp8", "schedule": [{"from_step": 3, "recipe": "bf16"}]}), 3, &[]
    )]
    fn the_last_steps_precision_says_what_was_kept(
        #[case] said: Value,
        #[case] step: u64,
        #[case] expected: &[(usize, &str)],
    ) {
        let precision = RunPrecision::of_section(&said, step);
        let mut kept = Vec::new();
        // The fifth block predicts several tokens; it is no layer.
        for index in 0..5 {
            let path = |part: &str| format!("blocks.{index}.{part}.weight");
            let parts = [DENSE, EXPERT].into_iter();
            kept.extend(
                parts
                    .filter(|part| precision.keeps(&path(part), 4))
                    .map(|part| (index, part)),
            );
        }
        assert_eq!(kept, expected);
    }

    #[rstest]
    #[case(json!({"recipe": "blockwise"}), true)]
    #[case(json!({"recipe": "blockwise", "power_of_two_scales": false}), false)]
    #[case(json!({"recipe": "tensorwise", "power_of_two_scales": true}), false)]
    fn only_blocks_have_powers_of_two(#[case] said: Value, #[case] expected: bool) {
        let precision = RunPrecision::of_section(&said, 1);
        assert_eq!(precision.has_powers_of_two, expected);
    }
}
