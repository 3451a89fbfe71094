//! All keys and the types of their values, derived from a configuration in which every key is set.

use std::sync::LazyLock;

use megaburn_pipeline::ScheduleKind;
use toml::{Table, Value};

use super::{
    BatchRampConfig, Dtype, ExpertsConfig, MlaConfig, RopeScalingConfig, TrainConfig,
    nearest::nearest_key, removed::why_removed,
};
use crate::TrainError;

static SCHEMA: LazyLock<Table> = LazyLock::new(|| {
    let mut config = TrainConfig::default();
    config.model.init = Some(String::new());
    config.model.head_dim = Some(1);
    config.model.window = Some(1);
    config.model.vocab = Some(1);
    config.model.rope_scaling = Some(RopeScalingConfig {
        mscale: Some(1.0),
        mscale_all_dim: Some(1.0),
        attention_factor: Some(1.0),
        ..RopeScalingConfig::default()
    });
    config.model.latent = Some(MlaConfig {
        q_lora_rank: Some(1),
        ..MlaConfig::default()
    });
    let experts = ExpertsConfig {
        ffn: Some(1),
        shared_ffn: Some(1),
        normalise: Some(true),
        groups: Some([1; 3]),
        ..ExpertsConfig::default()
    };
    config.model.experts = Some(experts);
    config.moe.capacity_factor = Some(1.0);
    config.parallel.ranks = Some(1);
    config.parallel.tp = Some(1);
    config.parallel.dp = Some(1);
    config.parallel.sp = Some(true);
    config.parallel.zero_ranks = Some(1);
    config.parallel.max_tokens_per_rank = Some(1);
    config.parallel.bucket_size = Some(1);
    config.parallel.schedule = Some(ScheduleKind::GPipe);
    config.parallel.chunks = Some(1);
    config.parallel.micro_batch_group = Some(1);
    config.parallel.pipeline_layout = Some(String::new());
    config.parallel.first_stage_layers = Some(1);
    config.parallel.last_stage_layers = Some(1);
    config.data.path = Some(String::new());
    config.generate.prompt = Some(String::new());
    config.train.batch_ramp = Some(BatchRampConfig::default());
    config.optimizer.warmup_samples = Some(1);
    config.optimizer.warmup_fraction = Some(1.0);
    config.optimizer.decay_steps = Some(1);
    config.optimizer.decay_samples = Some(1);
    config.optimizer.wsd_decay_steps = Some(1);
    config.optimizer.wsd_decay_samples = Some(1);
    config.optimizer.decoupled_lr = Some(1.0);
    config.optimizer.decoupled_min_lr = Some(1.0);
    config.optimizer.end_weight_decay = Some(1.0);
    config.optimizer.weight_decay_steps = Some(1);
    config.optimizer.loss_scale = Some(1.0);
    config.optimizer.muon.dtype = Some(Dtype::F32);
    Table::try_from(config).expect("a configuration is a table")
});

/// Every key, including sections, as a dotted path.
pub(super) fn keys() -> Vec<String> {
    fn walk(table: &Table, prefix: &str, keys: &mut Vec<String>) {
        for (name, value) in table {
            let key = join(prefix, name);
            if let Value::Table(inner) = value {
                walk(inner, &key, keys);
            }
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

/// Refuses a key that does not exist or was removed, and a value of another type. `origin` says
/// where the layer came from.
pub(super) fn check(layer: &Table, origin: &str) -> Result<(), TrainError> {
    check_table(layer, &SCHEMA, "", origin)
}

fn check_table(
    given: &Table,
    schema: &Table,
    prefix: &str,
    origin: &str,
) -> Result<(), TrainError> {
    for (name, found) in given {
        let key = join(prefix, name);
        let origin = origin.to_string();
        let Some(expected) = schema.get(name) else {
            if let Some(why) = why_removed(&key) {
                return Err(TrainError::RemovedKey { key, origin, why });
            }
            let nearest = nearest_key(&key);
            return Err(TrainError::UnknownKey {
                key,
                origin,
                nearest,
            });
        };
        let expected = match (expected, found) {
            (Value::Table(schema), Value::Table(given)) => {
                check_table(given, schema, &key, &origin)?;
                continue;
            }
            (Value::Integer(_), Value::Integer(number)) if *number >= 0 => continue,
            (Value::Float(_), Value::Integer(_) | Value::Float(_)) => continue,
            (Value::String(_), Value::String(_))
            | (Value::Boolean(_), Value::Boolean(_))
            | (Value::Array(_), Value::Array(_)) => continue,
            (Value::Integer(_), _) => "a whole number of 0 or more",
            (Value::Float(_), _) => "a number",
            (Value::Boolean(_), _) => "true or false",
            (Value::Table(_), _) => "a table",
            (Value::Array(_), _) => "a list in brackets",
            _ => "a string in quotes",
        };
        return Err(TrainError::WrongType {
            key,
            origin,
            expected,
            found: describe(found),
        });
    }
    Ok(())
}

fn describe(value: &Value) -> String {
    match value {
        Value::Array(_) => "an array".into(),
        Value::Table(_) => "a table".into(),
        _ => format!("the {} {value}", value.type_str()),
    }
}

fn join(prefix: &str, name: &str) -> String {
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
        use crate::config::*;
        let sections = [
            ("", fields::<TrainConfig>()),
            ("run", fields::<RunConfig>()),
            ("model", fields::<ModelConfig>()),
            ("model.experts", fields::<ExpertsConfig>()),
            ("model.latent", fields::<MlaConfig>()),
            ("model.rope_scaling", fields::<RopeScalingConfig>()),
            ("parallel", fields::<ParallelConfig>()),
            ("data", fields::<DataConfig>()),
            ("train", fields::<TrainingConfig>()),
            ("train.batch_ramp", fields::<BatchRampConfig>()),
            ("optimizer", fields::<OptimizerConfig>()),
            ("optimizer.sgd", fields::<SgdSection>()),
            ("optimizer.lion", fields::<LionSection>()),
            ("optimizer.muon", fields::<MuonSection>()),
            ("moe", fields::<MoeTrainingConfig>()),
            ("recompute", fields::<RecomputeConfig>()),
            ("generate", fields::<GenerateConfig>()),
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
