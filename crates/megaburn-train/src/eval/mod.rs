//! The loss of a model on named data sets, without training: `megaburn eval`.

mod set_loss;

use std::{path::Path, sync::Arc};

use megaburn_collective::{Group, Phase, ProcessGroups, Progress, RankEnv};
use megaburn_data::{Corpus, DataError};
use toml::{Table, Value};

use crate::{
    config::{ConfigLayers, DatasetKind, InitFrom, SourceConfig, TrainConfig},
    data::RunData,
    device::choose_gemm,
    error::TrainError,
    monitor::Monitor,
    ranks::run_prepared,
    run_folder::config_of,
    start::{agree_on, settle},
    trainer::Trainer,
};
pub use set_loss::SetLoss;

/// The keys of a run that decide what its loss means. They are taken over from the run that a
/// checkpoint belongs to.
const OF_RUN: [[&str; 2]; 5] = [
    ["data", "seq_len"],
    ["data", "documents"],
    ["data", "eod_mask_loss"],
    ["data", "tokenizer"],
    ["train", "dtype"],
];
/// The size of a global batch before the layout is known: a number that many degrees divide.
const ANY_BATCH: i64 = 55_440;

/// The layers of a configuration that evaluates the model at `path` (a run, a checkpoint, or a
/// folder of Hugging Face or torchtitan) on `sets`. Layers that are added to it override it.
///
/// # Errors
/// There is no data set, two have the same name, or the run's configuration cannot be read.
pub fn eval_layers(path: &str, sets: &[SourceConfig]) -> Result<ConfigLayers, TrainError> {
    let invalid = |value: String, rule: &str| TrainError::Invalid {
        key: "--data",
        value,
        rule: rule.into(),
    };
    if sets.is_empty() {
        return Err(invalid("absent".into(), "given at least once"));
    }
    for (index, set) in sets.iter().enumerate() {
        if sets[..index].iter().any(|other| other.name() == set.name()) {
            let rule = "a list of data sets with different names: write NAME=FILE";
            return Err(invalid(format!("{:?} twice", set.name()), rule));
        }
    }
    let mut layers = ConfigLayers::new().with_fresh(true).with_init(path)?;
    if let Some(layer) = of_run(path)? {
        layers = layers.with_layer(layer, "the configuration of the run".into())?;
    }
    let list = sets
        .iter()
        .map(|set| Table::try_from(set).map(Value::Table));
    let list = list.collect::<Result<Vec<_>, _>>();
    let list = list.map_err(|error| invalid(error.to_string(), "a list of data sets"))?;
    let data = Table::from_iter([
        ("valid".to_string(), Value::Array(list)),
        // A run needs training data. This one is made of nothing, and not read.
        ("path".to_string(), Value::String("mock:ascending".into())),
    ]);
    let train = Table::from_iter([
        ("global_batch".to_string(), ANY_BATCH.into()),
        ("eval_batches".to_string(), i64::from(u32::MAX).into()),
    ]);
    let optimizer = Table::from_iter([("name".to_string(), Value::String("sgd".into()))]);
    let layer = Table::from_iter([
        ("data".to_string(), Value::Table(data)),
        ("train".to_string(), Value::Table(train)),
        ("optimizer".to_string(), Value::Table(optimizer)),
    ]);
    layers.with_layer(layer, "`megaburn eval`".into())
}

/// The settings of the run that a path belongs to, as a layer: the path is the run, its folder of
/// checkpoints or one of them.
fn of_run(path: &str) -> Result<Option<Table>, TrainError> {
    let path = Path::new(path);
    let file = path
        .ancestors()
        .take(3)
        .map(config_of)
        .find(|file| file.is_file());
    let Some(file) = file else { return Ok(None) };
    let text = std::fs::read_to_string(&file).map_err(|source| TrainError::Read {
        path: file.clone(),
        source,
    })?;
    let run: Table = text.parse().map_err(|source| TrainError::Toml {
        origin: format!("`{}`", file.display()),
        source,
    })?;
    let mut layer = Table::new();
    for [section, key] in OF_RUN {
        let value = run.get(section).and_then(|section| section.get(key));
        // The run's copy of its tokenizer is found by the path of the model.
        let is_own = key == "tokenizer" && value.and_then(Value::as_str) != Some("byte");
        if let (Some(value), false) = (value, is_own) {
            let table = layer
                .entry(section.to_string())
                .or_insert_with(|| Value::Table(Table::new()));
            if let Value::Table(table) = table {
                table.insert(key.to_string(), value.clone());
            }
        }
    }
    Ok(Some(layer))
}

/// Computes the losses of the model and data sets of [`eval_layers`] under the layout of `config`.
/// Nothing is trained and nothing is written, but for the cache of a large text.
///
/// Each data set is read once from its start, in samples of `data.seq_len` tokens that continue each
/// other; what is left after the last full sample is not predicted.
///
/// # Errors
/// A layout, model, device or data set that cannot be used; the root cause if several ranks failed.
/// # Collective
/// All ranks of a launcher, if there is one; otherwise they are threads of this process.
pub fn evaluate(mut config: TrainConfig) -> Result<Vec<SetLoss>, TrainError> {
    let env = RankEnv::from_env()?;
    let devices = config.run.device.find()?;
    let layout = config.layout_on(devices, env.as_ref().map(|env| env.world_size))?;
    let device = devices.of_this_process(&layout, env.as_ref())?;
    devices.find_libraries_of(config.attention_on(devices)?)?;
    if config.data.dataset != DatasetKind::Gpt {
        return Err(TrainError::Invalid {
            key: "PATH",
            value: "a model of masked sentences".into(),
            rule: "a model that predicts the next token: others have no perplexity of a text"
                .into(),
        });
    }
    choose_gemm(&device, config.train.tf32, config.train.tune_products);
    // A pipeline is full with a micro-batch for each stage.
    let micro_batches = layout.pp * config.parallel.chunks.unwrap_or(1);
    config.train.global_batch = config.train.micro_batch * layout.dp * micro_batches;
    let group = config.group_options();
    let config = Arc::new(config);
    let prepare = |progress: &Progress| {
        let start = config.start(true)?;
        let data = RunData::load_with(&config, start.as_ref(), no_text, progress)?;
        config.check_start(&layout, start.as_ref(), &data)?;
        Ok((Arc::new(data), start))
    };
    let on_rank = |world: &Group, (data, start): &(Arc<RunData>, Option<InitFrom>)| {
        let starting = world.phase(Phase::Start);
        let limit = config.train.step_timeout();
        let _monitor = Monitor::start(world, limit, Arc::default())?;
        agree_on(
            world,
            &format!("{}{layout}{}", config.to_toml(), data.eval_hash),
        )?;
        let groups = ProcessGroups::new(world, layout)?;
        let agreed = match start {
            Some(InitFrom::Init(source)) => {
                let agreed = settle(world, source.agreed(world).map_err(TrainError::from))?;
                agreed.map(|source| InitFrom::Init(Box::new(source)))
            }
            _ => None,
        };
        let start = agreed.as_ref().or(start.as_ref());
        let device = device.clone().autodiff();
        let trainer = Trainer::starting_from(start, config.clone(), groups, device, data.clone());
        let trainer = settle(world, trainer)?;
        drop(starting);
        trainer.set_losses()
    };
    let found = run_prepared(&layout, env, group, &device, prepare, on_rank)?;
    Ok(found.into_iter().next().unwrap_or_default())
}

/// There is always a data set.
fn no_text() -> Result<Corpus, DataError> {
    let tried = "data.path is not set".into();
    Err(DataError::NoSources { tried })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_sets_need_different_names() {
        let set = |path: &str| SourceConfig {
            path: path.into(),
            ..SourceConfig::default()
        };
        let error = eval_layers("x", &[set("a/text"), set("b/text")]).unwrap_err();
        assert!(error.to_string().contains("\"text\" twice"), "{error}");
        assert!(eval_layers("x", &[]).is_err());
    }
}
