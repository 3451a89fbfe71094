//! The keys of the configuration, by its schema.

use std::sync::LazyLock;

use serde_json::Value as Schema;

use super::json_schema;

/// The schema of the full configuration.
pub(super) static SCHEMA: LazyLock<Schema> = LazyLock::new(json_schema);

/// Every key, including sections, as a dotted path.
pub(super) fn keys() -> Vec<String> {
    fn walk(schema: &Schema, prefix: &str, keys: &mut Vec<String>) {
        for (name, inner) in schema["properties"].as_object().into_iter().flatten() {
            let key = join(prefix, name);
            walk(inner, &key, keys);
            keys.push(key);
        }
    }
    let mut keys = Vec::new();
    walk(&SCHEMA, "", &mut keys);
    keys
}

/// Whether a key is a section.
pub(super) fn is_section(key: &str) -> bool {
    keys().iter().any(|other| {
        other
            .strip_prefix(key)
            .is_some_and(|rest| rest.starts_with('.'))
    })
}

/// The path of a key in the section at the path `prefix`.
pub(super) fn join(prefix: &str, name: &str) -> String {
    if prefix.is_empty() {
        name.to_string()
    } else {
        format!("{prefix}.{name}")
    }
}

#[cfg(test)]
mod tests {
    use serde::de::DeserializeOwned;

    use super::*;

    // serde's error for an unknown field lists the actual fields of a section.
    fn fields<T: DeserializeOwned + std::fmt::Debug>() -> Vec<String> {
        let text = toml::from_str::<T>("no_such_field = 1")
            .unwrap_err()
            .to_string();
        let list = text
            .split("expected one of")
            .nth(1)
            .or(text.split("expected").nth(1))
            .unwrap();
        list.split('`')
            .skip(1)
            .step_by(2)
            .map(str::to_string)
            .collect()
    }

    #[test]
    fn the_schema_holds_every_field_of_every_section() {
        use megaburn_optim::{LionConfig, MuonConfig, SgdConfig};

        use crate::config::*;
        let sections = [
            ("", fields::<TrainConfig>()),
            ("run", fields::<RunConfig>()),
            ("model", fields::<ModelConfig>()),
            ("model.experts", fields::<ExpertsConfig>()),
            ("model.parts", fields::<ModelParts>()),
            ("model.latent", fields::<MlaConfig>()),
            ("model.rope_scaling", fields::<RopeScalingConfig>()),
            ("parallel", fields::<ParallelConfig>()),
            ("data", fields::<DataConfig>()),
            ("data.fim", fields::<FimConfig>()),
            ("data.masking", fields::<DataMaskingConfig>()),
            ("train", fields::<TrainingConfig>()),
            ("train.batch_ramp", fields::<BatchRampConfig>()),
            ("optimizer", fields::<OptimizerConfig>()),
            ("optimizer.sgd", fields::<SgdConfig>()),
            ("optimizer.lion", fields::<LionConfig>()),
            ("optimizer.muon", fields::<MuonConfig>()),
            ("moe", fields::<MoeTrainingConfig>()),
            ("recompute", fields::<RecomputeConfig>()),
            ("precision", fields::<PrecisionConfig>()),
            ("precision.fallback", fields::<PrecisionFallbackConfig>()),
            ("generate", fields::<GenerateConfig>()),
            ("log", fields::<LogConfig>()),
            ("alerts", fields::<AlertsConfig>()),
            ("profile", fields::<ProfileConfig>()),
        ];
        let mut real: Vec<String> = sections
            .into_iter()
            .flat_map(|(prefix, names)| names.into_iter().map(move |name| join(prefix, &name)))
            .collect();
        let mut known = keys();
        real.sort();
        known.sort();
        assert_eq!(known, real);
    }
}
