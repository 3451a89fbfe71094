//! Defaults that follow from other keys. They apply where the key itself is not set.

use toml::{Table, Value};

use super::{DatasetKind, TrainConfig};

/// Sets keys that are absent from `given`, the merged layers, and that follow from other keys.
pub(super) fn fill_in(config: &mut TrainConfig, given: &Table) {
    fill_in_dataset(config, given);
    let model = given.get("model").and_then(Value::as_table);
    let is_set = |key: &str| model.is_some_and(|model| model.contains_key(key));
    if !is_set("kv_heads") && config.model.has_all_kv_heads() {
        config.model.kv_heads = config.model.heads;
    }
    let family = config.model.family.template();
    if !is_set("tied") && family.is_encoder_decoder() {
        config.model.tied = family.tied;
    }
}

/// Sets the kind of samples that the model reads. It is called again after `model.init` has set the
/// model.
pub(super) fn fill_in_dataset(config: &mut TrainConfig, given: &Table) {
    let data = given.get("data").and_then(Value::as_table);
    let has_kind = data.is_some_and(|data| data.contains_key("dataset"));
    if !has_kind {
        config.data.dataset = DatasetKind::of(&config.model.template());
    }
    if !config.data.dataset.is_masked() {
        return;
    }
    let default = config.data.dataset.default_masking();
    let masking = config.data.masking.get_or_insert_with(|| default.clone());
    let given = data.and_then(|data| data.get("masking")?.as_table());
    let is_given = |key: &str| given.is_some_and(|given| given.contains_key(key));
    if !is_given("max_ngram") {
        masking.max_ngram = default.max_ngram;
    }
    if !is_given("geometric") {
        masking.geometric = default.geometric;
    }
}

#[cfg(test)]
mod tests {
    use megaburn_models::Family;

    use crate::config::{ConfigLayers, DataMaskingConfig, DatasetKind, TrainConfig};

    fn with(sets: &[&str]) -> TrainConfig {
        let layers = sets
            .iter()
            .try_fold(ConfigLayers::new(), |layers, set| layers.with_set(set));
        layers.and_then(ConfigLayers::load).unwrap()
    }

    #[test]
    fn a_published_encoder_reads_masked_samples() {
        let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/bert");
        let config = with(&[&format!("model.init={fixture}")]);
        assert_eq!(config.data.dataset, DatasetKind::Bert);
        assert!(config.data.masking.is_some());
    }

    #[test]
    fn spans_of_t5_are_longer_unless_keys_say_otherwise() {
        let of = |sets: &[&str]| {
            let all = [&["data.dataset=t5"], sets].concat();
            with(&all).data.masking.unwrap()
        };
        let t5 = DataMaskingConfig {
            max_ngram: 10,
            geometric: true,
            ..DataMaskingConfig::default()
        };
        assert_eq!(of(&[]), t5);
        let probability = 0.2;
        let rarer = DataMaskingConfig { probability, ..t5 };
        assert_eq!(of(&["data.masking.probability=0.2"]), rarer);
        let own = of(&["data.masking.max_ngram=3", "data.masking.geometric=false"]);
        assert_eq!(own, DataMaskingConfig::default());
    }

    #[test]
    fn a_fresh_t5_is_of_version_1_1() {
        let of = |sets: &[&str]| with(sets).model.decoder(64, 260);
        for family in ["model.family=t5", "model.family=mt5"] {
            let model = of(&[family]);
            assert!(!model.tied && model.activation.is_gated(), "{model:?}");
            assert_eq!(model.multipliers.logits_scaling, 1.0);
        }
        let first = of(&[
            "model.family=t5",
            "model.hidden=64",
            "model.tied=true",
            "model.parts.activation=relu",
            "model.parts.logits_scaling=8",
        ]);
        assert!(first.tied && !first.activation.is_gated());
        // 8 is the root of 64, the width, so the model has a name in Transformers.
        first.check_sayable().unwrap();
        assert!(of(&[]).tied);
    }

    #[test]
    fn every_family_can_be_chosen_by_its_name_alone() {
        for family in Family::BUILT_IN {
            let config = with(&[&format!("model.family={family}")]);
            config.model.decoder(64, 260).validate().unwrap();
        }
        for family in ["gpt2", "gpt_neox"] {
            let family = format!("model.family={family}");
            assert_eq!(with(&[&family, "model.heads=8"]).model.kv_heads, 8);
        }
        assert_eq!(with(&["model.family=llama"]).model.kv_heads, 2);
        let bert = with(&["model.family=bert", "model.heads=8"]);
        assert_eq!(bert.model.kv_heads, 8);
        assert_eq!(bert.data.dataset, DatasetKind::Bert);
        assert_eq!(bert.data.masking, Some(DataMaskingConfig::default()));
        let llama = with(&["model.parts.bidirectional=true"]);
        assert_eq!(llama.data.dataset, DatasetKind::Bert);
        assert_eq!(with(&[]).data.masking, None);
    }
}
