//! The parts of a configuration that come from the model that the run starts from.

use std::{collections::BTreeSet, fs, path::Path};

use megaburn_checkpoint::{Checkpoint, HfDir, Latest, newest};
use megaburn_data::HfTokenizer;
use megaburn_models::{assets::Assets, source::ModelSource};
use toml::Table;

use super::{ModelConfig, ModelParts, Tokenizer, TrainConfig, changes::same_start, fine_tune};
use crate::{
    error::TrainError,
    resume_error::{RecordedInit, ResumeError},
    run_folder::config_of,
};

/// The model that determines a run's `[model]` section.
#[derive(Debug)]
pub(crate) enum InitFrom {
    /// The run's own newest checkpoint, from which it resumes.
    Resumed(Box<ModelSource>),
    /// The model that `model.init` names.
    Init(Box<ModelSource>),
}

impl InitFrom {
    /// `model.init` as a path that keeps its meaning: for a run, the path of the chosen checkpoint.
    pub(crate) fn pinned(&self) -> Option<String> {
        let Self::Init(source) = self else {
            return None;
        };
        let path = source
            .checkpoint()
            .map_or(source.path(), |checkpoint| checkpoint.path());
        Some(path.display().to_string())
    }

    /// What a new run takes from the model that it starts from, and how it converts it.
    pub(crate) fn conversion(&self, config: &TrainConfig) -> Option<String> {
        let Self::Init(source) = self else {
            return None;
        };
        let paths = source.params().map(|param| param.path.as_str());
        let mut stored: BTreeSet<String> = paths
            .filter_map(|path| source.dtype(path).ok())
            .map(|dtype| format!("{dtype:?}").to_lowercase())
            .collect();
        if source.hf_dir().is_some_and(HfDir::has_fp8) {
            stored.insert("fp8".into());
        }
        let stored: Vec<_> = stored.into_iter().collect();
        let mut text = format!("read in {}", stored.join(" and "));
        let dtype = config.train.dtype.to_string();
        if stored != [dtype.as_str()] {
            text += &format!(", computed in {dtype}");
        }
        // An imported model has no trainer state.
        let checkpoint = source.checkpoint();
        let Some(checkpoint) = checkpoint.filter(|found| !found.trainer().is_null()) else {
            return Some(text);
        };
        text += &format!(", from step {} of a run", checkpoint.step());
        if let Some(optimizer) = checkpoint.trainer()["optimizer"].as_str() {
            text += &format!(
                "; its {optimizer} state is not used: {} and the step count begin anew",
                config.optimizer.name
            );
        }
        Some(text)
    }

    pub(crate) fn source(&self) -> &ModelSource {
        match self {
            Self::Resumed(source) | Self::Init(source) => source,
        }
    }
}

impl TrainConfig {
    /// The model that the run starts from, if `model.init` is set. A run with a checkpoint of its
    /// own resumes from that unless `fresh`, and does not need `model.init` any more.
    ///
    /// # Errors
    /// See [`ModelSource::open`]. The run has checkpoints, but none is intact.
    pub(crate) fn start(&self, fresh: bool) -> Result<Option<InitFrom>, TrainError> {
        let Some(init) = &self.model.init else {
            return Ok(None);
        };
        let checkpoints = Path::new(&self.run.dir).join("checkpoints");
        let own = if fresh {
            Latest {
                checkpoint: None,
                refused: Vec::new(),
            }
        } else {
            newest(&checkpoints)?
        };
        if let (None, Some(newest)) = (&own.checkpoint, own.refused.into_iter().next()) {
            return Err(ResumeError::AllDamaged {
                path: newest.path,
                why: newest.why,
            }
            .into());
        }
        // Newer checkpoints that are damaged are reported when the run resumes.
        Ok(Some(match own.checkpoint {
            Some(own) => InitFrom::Resumed(Box::new(ModelSource::open(own.path())?)),
            None => InitFrom::Init(Box::new(ModelSource::open(Path::new(init))?)),
        }))
    }
}

/// The `model.init` of the run in `dir`, as recorded in its checkpoint or else in its
/// `config.toml`.
fn recorded_init(dir: &Path, checkpoint: &Checkpoint) -> RecordedInit {
    let told = |init: Option<&str>| {
        init.map_or(RecordedInit::Fresh, |init| {
            RecordedInit::From(init.to_string())
        })
    };
    let recorded = checkpoint.trainer().get("config");
    if let Some(config) = recorded.filter(|config| config.is_object()) {
        return told(config["model"]["init"].as_str());
    }
    let text = fs::read_to_string(config_of(dir)).ok();
    match text.and_then(|text| text.parse::<Table>().ok()) {
        Some(table) => {
            let model = table.get("model");
            told(
                model
                    .and_then(|model| model.get("init"))
                    .and_then(toml::Value::as_str),
            )
        }
        None => RecordedInit::Unknown,
    }
}

/// Tokenizer files that are not supported, looked for in folders without another one.
const UNREAD_TOKENIZERS: [&str; 4] = [
    "sentencepiece.bpe.model",
    "tekken.json",
    "vocab.json",
    "merges.txt",
];

/// The tokenizer in the model's folder; `None` if there is none, which means bytes.
fn own_tokenizer(source: &ModelSource) -> Result<Option<Tokenizer>, TrainError> {
    let Some(folder) = Assets::folder(source) else {
        return Ok(None);
    };
    if let Some(file) = HfTokenizer::find(&folder) {
        return Ok(Some(Tokenizer::File(file.display().to_string())));
    }
    match UNREAD_TOKENIZERS
        .iter()
        .find(|name| folder.join(name).is_file())
    {
        None => Ok(None),
        Some(name) => {
            let rule = format!(
                "given, because the model's own tokenizer `{}` cannot be read: give a \
                tokenizer.json or its folder \
                (`AutoTokenizer.from_pretrained(..).save_pretrained(..)` of transformers writes \
                one), or `data.tokenizer=byte` to train on bytes",
                folder.join(name).display()
            );
            Err(TrainError::Invalid {
                key: "data.tokenizer",
                value: "absent".into(),
                rule,
            })
        }
    }
}

/// If `model.init` is set, fills in the rest of `[model]` from it, sets `data.tokenizer` to the
/// model's own tokenizer, and applies the fine-tuning defaults. `given` holds the keys that are set
/// by the layers.
///
/// # Errors
/// The model cannot be opened, is not the one that the run started from, or contradicts a key; its
/// tokenizer cannot be read.
pub(super) fn fill_in(
    config: &mut TrainConfig,
    given: &Table,
    fresh: bool,
) -> Result<(), TrainError> {
    let Some(start) = config.start(fresh)? else {
        return Ok(());
    };
    let source = start.source();
    let mut init = config.model.init.clone();
    if let (InitFrom::Resumed(own), Some(given)) = (&start, &init) {
        let run = Path::new(&config.run.dir);
        let checkpoint = own.checkpoint().expect("a run resumes from its checkpoint");
        let recorded = recorded_init(run, checkpoint);
        match recorded {
            RecordedInit::From(recorded) if same_start(&recorded, given) => init = Some(recorded),
            recorded => {
                let run = run.to_path_buf();
                let given = given.clone();
                return Err(ResumeError::OtherInit {
                    run,
                    recorded,
                    given,
                }
                .into());
            }
        }
    }
    let section = |model: &ModelConfig| Table::try_from(model).expect("a section is a table");
    let said = section(&config.model);
    let found = ModelConfig::of(source.config());
    let actual = section(&found);
    let all_parts = Table::try_from(ModelParts::all_of(source.config()));
    let all_parts = all_parts.expect("a section is a table");
    let given_parts = given.get("model").and_then(|model| model.get("parts"));
    for (key, value) in given_parts
        .and_then(|parts| parts.as_table())
        .into_iter()
        .flatten()
    {
        if all_parts.get(key) != Some(value) {
            return Err(TrainError::OtherThanInit {
                key: format!("parts.{key}"),
                value: value.to_string(),
                init: init.unwrap_or_default(),
                found: all_parts
                    .get(key)
                    .map_or("none".into(), ToString::to_string),
            });
        }
    }
    let given_in = |section: &str| given.get(section).and_then(|section| section.as_table());
    for key in given_in("model").into_iter().flatten().map(|(key, _)| key) {
        if key != "init" && key != "parts" && said.get(key) != actual.get(key) {
            let text = |value: Option<&toml::Value>| {
                value.map_or("none".to_string(), |value| value.to_string())
            };
            return Err(TrainError::OtherThanInit {
                key: key.clone(),
                value: text(said.get(key)),
                init: init.unwrap_or_default(),
                found: text(actual.get(key)),
            });
        }
    }
    config.model = ModelConfig { init, ..found };
    fine_tune::set_defaults(config, given, source.config());
    if given_in("data").is_none_or(|data| !data.contains_key("tokenizer"))
        && let Some(tokenizer) = own_tokenizer(source)?
    {
        config.data.tokenizer = tokenizer;
    }
    Ok(())
}
