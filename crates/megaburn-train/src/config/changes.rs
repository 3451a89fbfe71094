//! Compares the configuration of a resumed run with the one that its checkpoint records.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    path::Path,
};

use megaburn_mesh::Layout;
use megaburn_models::DecoderConfig;
use serde::Serialize;
use serde_json::{Value, json};

use super::{
    ModelConfig, TrainConfig,
    keys::{KeyClass, class_of},
    removed::{drop_removed, why_removed},
};

/// A key whose value differs from the recorded one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Change {
    /// Dotted path of the key.
    pub key: String,
    /// The value that the checkpoint was trained with.
    pub old: String,
    /// The value that the run continues with.
    pub new: String,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} -> {}", self.key, self.old, self.new)
    }
}

/// A value as it is shown to people.
fn shown(value: &Value) -> String {
    match value {
        Value::Null => "none".to_string(),
        Value::String(text) => text.clone(),
        value => match value.as_f64() {
            Some(number) if number != 0.0 && number.abs() < 1e-3 => format!("{number:e}"),
            _ => value.to_string(),
        },
    }
}

/// The keys that differ between two records.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Changes {
    /// Keys of class `Identity`: with another value it is another run.
    pub(crate) identity: Vec<Change>,
    /// Keys whose new value changes the numbers of later steps.
    pub(crate) numeric: Vec<Change>,
}

impl TrainConfig {
    /// The record of this configuration in a checkpoint: every key, including those derived from
    /// the ranks, the tokenizer, the model or the number of steps.
    pub(crate) fn record(&self, layout: &Layout, model: &DecoderConfig) -> Value {
        let mut resolved = self.resolved(layout, model);
        resolved.optimizer.resolve_horizons(&self.train);
        resolved.model = ModelConfig {
            init: self.model.init.clone(),
            ..ModelConfig::of(model)
        };
        json!(resolved)
    }
}

/// Builds the record of a checkpoint that has none, from the run's `config.toml` and the
/// checkpoint's own model.
pub(crate) fn record_of_file(text: &str, model: &DecoderConfig) -> Option<Value> {
    let mut table = text.parse::<toml::Table>().ok()?;
    drop_removed(&mut table);
    let mut record = json!(table);
    // A file of another version may have keys that this version does not know.
    if let Ok(config) = table.try_into::<TrainConfig>() {
        let mut optimizer = config.optimizer;
        optimizer.resolve_horizons(&config.train);
        record["optimizer"] = json!(optimizer);
    }
    let init = record
        .get("model")
        .and_then(|model| model.get("init"))
        .cloned();
    record["model"] = json!(ModelConfig::of(model));
    if let Some(init) = init {
        record["model"]["init"] = init;
    }
    Some(record)
}

/// The prefix of the keys of `[model.parts]`.
const PARTS: &str = "model.parts.";

/// Compares two records key by key.
pub(crate) fn changes(saved: &Value, mine: &Value) -> Changes {
    let defaults = leaves(&json!(TrainConfig::default()));
    let saved = leaves(saved);
    let mine = leaves(mine);
    let mut found = Changes::default();
    let keys = saved
        .keys()
        .chain(mine.keys().filter(|key| !saved.contains_key(*key)));
    // A record older than `[model.parts]` has none of its keys. The model itself is compared too.
    let has_parts = saved.keys().any(|key| key.starts_with(PARTS));
    for key in keys.filter(|key| has_parts || !key.starts_with(PARTS)) {
        // A record older than the key: the version that wrote it behaved like the default.
        let old = saved.get(key).or_else(|| defaults.get(key));
        let old = old.unwrap_or(&Value::Null);
        let new = mine.get(key).unwrap_or(&Value::Null);
        let is_same = match key.as_str() {
            "model.init" => same_init(old, new),
            _ => same(old, new),
        };
        if is_same {
            continue;
        }
        let list = match class_of(key) {
            Some(KeyClass::Identity) => &mut found.identity,
            Some(KeyClass::Under(settings)) if !settings.iter().any(|it| it.is_in(&mine)) => {
                continue;
            }
            Some(KeyClass::Content | KeyClass::Neutral) => continue,
            None if why_removed(key).is_some() => continue,
            // A key of another version may have changed numbers.
            Some(KeyClass::Numeric | KeyClass::Under(_)) | None => &mut found.numeric,
        };
        list.push(Change {
            key: key.clone(),
            old: shown(old),
            new: shown(new),
        });
    }
    found.numeric.sort_by(|a, b| a.key.cmp(&b.key));
    found
}

/// The keys whose values differ between two records.
pub(super) fn differences(saved: &Value, mine: &Value) -> Vec<Change> {
    let [saved, mine] = [leaves(saved), leaves(mine)];
    let keys: BTreeSet<&String> = saved.keys().chain(mine.keys()).collect();
    let value = |record: &BTreeMap<String, Value>, key: &String| {
        record.get(key).cloned().unwrap_or(Value::Null)
    };
    let pairs = keys
        .into_iter()
        .map(|key| (key, value(&saved, key), value(&mine, key)));
    let differing = pairs.filter(|(_, old, new)| !same(old, new));
    let change = |(key, old, new): (&String, Value, Value)| Change {
        key: key.clone(),
        old: shown(&old),
        new: shown(&new),
    };
    differing.map(change).collect()
}

/// Whether two values of `model.init` name the same start: a run matches any of its checkpoints.
pub(crate) fn same_start(recorded: &str, given: &str) -> bool {
    let whole = |path: &Path| {
        path.canonicalize()
            .or_else(|_| std::path::absolute(path))
            .ok()
    };
    let recorded = Path::new(recorded);
    let given = Path::new(given);
    let of_run = |checkpoint: &Path| {
        let folder = checkpoint.parent()?;
        let is_checkpoint = folder.file_name()? == "checkpoints";
        folder.parent().filter(|_| is_checkpoint).and_then(whole)
    };
    recorded == given || whole(recorded) == whole(given) || of_run(recorded) == whole(given)
}

fn same_init(old: &Value, new: &Value) -> bool {
    match (old.as_str(), new.as_str()) {
        (Some(old), Some(new)) => same_start(old, new),
        (old, new) => old == new,
    }
}

/// Whether two values are equal; the integer 1 equals the float 1.0.
fn same(old: &Value, new: &Value) -> bool {
    old == new
        || old
            .as_f64()
            .is_some_and(|number| new.as_f64() == Some(number))
}

/// The values of a nested object by their dotted paths.
fn leaves(record: &Value) -> BTreeMap<String, Value> {
    fn walk(value: &Value, key: String, found: &mut BTreeMap<String, Value>) {
        match value {
            Value::Object(fields) => fields.iter().for_each(|(name, value)| {
                let dot = if key.is_empty() { "" } else { "." };
                walk(value, format!("{key}{dot}{name}"), found);
            }),
            Value::Null => {}
            value => drop(found.insert(key, value.clone())),
        }
    }
    let mut found = BTreeMap::new();
    walk(record, String::new(), &mut found);
    found
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::config::{ConfigLayers, schema};

    fn record(sets: &[&str]) -> Value {
        let layers = sets
            .iter()
            .try_fold(ConfigLayers::new(), |layers, set| layers.with_set(set));
        let config = layers.unwrap().load().unwrap();
        let model = config.model.decoder(config.data.seq_len, 260);
        config.record(&config.layout(None).unwrap(), &model)
    }

    fn told(changes: &[Change]) -> Vec<String> {
        changes.iter().map(Change::to_string).collect()
    }

    #[rstest]
    #[case("optimizer.clip_grad=0.5", "optimizer.clip_grad: 1.0 -> 0.5")]
    #[case("optimizer.beta1=0.8", "optimizer.beta1: 0.9 -> 0.8")]
    #[case("optimizer.eps=1e-6", "optimizer.eps: 1e-8 -> 1e-6")]
    #[case("train.dtype=bf16", "train.dtype: f32 -> bf16")]
    #[case("train.hidden_dropout=0.1", "train.hidden_dropout: 0.0 -> 0.1")]
    #[case("moe.z_loss=0.001", "moe.z_loss: 0.0 -> 0.001")]
    #[case("moe.capacity_factor=1.5", "moe.capacity_factor: none -> 1.5")]
    #[case(
        "optimizer.muon.tp_mode=blockwise",
        "optimizer.muon.tp_mode: duplicated -> blockwise"
    )]
    fn what_changes_numbers_is_listed(#[case] set: &str, #[case] expected: &str) {
        let found = changes(&record(&[]), &record(&[set]));
        assert_eq!(
            (told(&found.numeric), found.identity),
            (vec![expected.to_string()], vec![])
        );
        assert_eq!(
            changes(&record(&[set]), &record(&[set])),
            Changes::default()
        );
    }

    #[rstest]
    #[case("model.rope_theta=5e5", "model.rope_theta: 10000.0 -> 500000.0")]
    #[case("run.seed=5", "run.seed: 1234 -> 5")]
    #[case("optimizer.name=lion", "optimizer.name: adamw -> lion")]
    fn what_makes_another_run_is_told_apart(#[case] set: &str, #[case] expected: &str) {
        let found = changes(&record(&[]), &record(&[set]));
        assert_eq!(told(&found.identity), [expected]);
    }

    #[rstest]
    #[case(&["parallel.tp=1", "parallel.zero=1", "recompute.method=uniform", "run.dir=elsewhere"])]
    #[case(&["train.micro_batch=1", "train.log_interval=3", "generate.tokens=0"])]
    #[case(&["model.head_dim=32", "model.vocab=260", "optimizer.decay_steps=1200"])]
    fn what_changes_no_number_is_not_listed(#[case] sets: &[&str]) {
        assert_eq!(changes(&record(&[]), &record(sets)), Changes::default());
    }

    #[test]
    fn micro_batches_count_where_experts_are_balanced_over_them() {
        let moe = ["model.family=mixtral", "moe.aux_loss=0.01"];
        let found = changes(
            &record(&moe),
            &record(&[&moe[..], &["train.micro_batch=1"]].concat()),
        );
        assert_eq!(told(&found.numeric), ["train.micro_batch: 2 -> 1"]);
    }

    const RANK_CAPACITY: &[&str] = &[
        "model.family=mixtral",
        "moe.capacity_factor=1.5",
        "moe.capacity_scope=rank",
    ];
    const MUON: &[&str] = &["optimizer.name=muon"];
    const BLOCKWISE: &[&str] = &["optimizer.name=muon", "optimizer.muon.tp_mode=blockwise"];

    #[rstest]
    #[case(
        RANK_CAPACITY,
        "train.micro_batch=1",
        Some("train.micro_batch: 2 -> 1")
    )]
    #[case(RANK_CAPACITY, "parallel.tp=1", Some("parallel.tp: 2 -> 1"))]
    #[case(RANK_CAPACITY, "parallel.cp=2", Some("parallel.cp: 1 -> 2"))]
    // A rank's micro-batches consist of the same samples for any number of ranks.
    #[case(RANK_CAPACITY, "parallel.dp=1", None)]
    #[case(&["model.family=mixtral", "moe.capacity_factor=1.5"], "parallel.tp=1", None)]
    #[case(BLOCKWISE, "parallel.tp=1", Some("parallel.tp: 2 -> 1"))]
    #[case(BLOCKWISE, "parallel.dp=1", None)]
    #[case(MUON, "parallel.tp=1", None)]
    fn a_layout_counts_where_ranks_compute_with_what_they_have(
        #[case] sets: &[&str],
        #[case] other: &str,
        #[case] expected: Option<&str>,
    ) {
        let found = changes(&record(sets), &record(&[sets, &[other]].concat()));
        assert_eq!(told(&found.numeric), Vec::from_iter(expected));
        assert!(found.identity.is_empty());
    }

    /// `train --resume RUN --steps N` and the original command with `--steps N`.
    #[test]
    fn both_ways_to_train_on_for_more_steps_are_the_same() {
        let sets = [
            "optimizer.end_weight_decay=0.2",
            "optimizer.warmup_steps=10",
        ];
        let begun = sets
            .iter()
            .try_fold(ConfigLayers::new(), |layers, set| layers.with_set(set));
        let begun = begun.unwrap().with_set("train.steps=100").unwrap();
        let config = begun.clone().load().unwrap();
        let model = config.model.decoder(config.data.seq_len, 260);
        let file = config
            .resolved(&config.layout(None).unwrap(), &model)
            .to_toml();
        let resumed = ConfigLayers::new().with_text("config.toml", &file).unwrap();
        let longer = |layers: ConfigLayers| layers.with_set("train.steps=200").unwrap().load();
        let resumed = longer(resumed).unwrap();
        let repeated = longer(begun).unwrap();
        assert_eq!(resumed.optimizer, repeated.optimizer);
        let batches = resumed.train.batch_schedule().unwrap();
        let schedule = resumed.optimizer.lr_schedule(200, &batches);
        assert_eq!(schedule.decay_samples, batches.samples_after(200));
    }

    #[test]
    fn a_schedule_that_follows_the_steps_is_listed_with_them() {
        let found = changes(&record(&["train.steps=100"]), &record(&["train.steps=200"]));
        let expected = [
            "optimizer.decay_steps: 100 -> 200",
            "train.steps: 100 -> 200",
        ];
        assert_eq!(told(&found.numeric), expected);
    }

    #[test]
    fn a_record_from_before_a_key_has_its_default() {
        let mut old = record(&[]);
        old["optimizer"]
            .as_object_mut()
            .unwrap()
            .remove("clip_grad");
        assert_eq!(changes(&old, &record(&[])), Changes::default());
        let found = changes(&old, &record(&["optimizer.clip_grad=2"]));
        assert_eq!(told(&found.numeric), ["optimizer.clip_grad: 1.0 -> 2.0"]);
        old["optimizer"]["of_a_later_version"] = json!(3);
        let found = changes(&old, &record(&[]));
        assert_eq!(
            told(&found.numeric),
            ["optimizer.of_a_later_version: 3 -> none"]
        );
    }

    /// As an earlier version recorded it, in the checkpoint or in the run's `config.toml`.
    #[rstest]
    fn a_removed_key_changed_no_number(#[values("true", "false", "3", "\"x\"")] value: &str) {
        let set = ["optimizer.end_weight_decay=0.2"];
        let mut old = record(&set);
        old["parallel"]["overlap_moe"] = serde_json::from_str(value).unwrap();
        assert_eq!(changes(&old, &record(&set)), Changes::default());

        let config = ConfigLayers::new()
            .with_set(set[0])
            .unwrap()
            .load()
            .unwrap();
        let model = config.model.decoder(config.data.seq_len, 260);
        let file = config
            .resolved(&config.layout(None).unwrap(), &model)
            .to_toml();
        let section = format!("[parallel]\noverlap_moe = {value}\n");
        let file = file.replace("[parallel]\n", &section);
        assert!(file.contains(&section), "{file}");
        let file = record_of_file(&file, &model).unwrap();
        assert_eq!(changes(&file, &record(&set)), Changes::default());
    }

    #[test]
    fn the_resolved_file_is_a_record_too() {
        let config = ConfigLayers::new().load().unwrap();
        let model = config.model.decoder(config.data.seq_len, 260);
        let layout = config.layout(None).unwrap();
        let file = record_of_file(&config.resolved(&layout, &model).to_toml(), &model).unwrap();
        assert_eq!(changes(&file, &record(&[])), Changes::default());
        // Keys without a default appear in neither record.
        assert!(schema::keys().len() > leaves(&file).len());
    }

    #[test]
    fn a_run_stands_for_its_checkpoints() {
        let pinned = "runs/a/checkpoints/step-00000010";
        for given in ["runs/a", "./runs/a/", pinned] {
            assert!(same_start(pinned, given), "{given}");
        }
        for given in ["runs/b", "runs", "runs/a/checkpoints/step-00000020"] {
            assert!(!same_start(pinned, given), "{given}");
        }
    }
}
