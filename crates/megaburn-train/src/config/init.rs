//! What a configuration takes from the model that the run starts from.

use std::path::Path;

use megaburn_checkpoint::newest;
use megaburn_models::{assets::Assets, source::ModelSource};
use toml::Table;

use super::{ModelConfig, Tokenizer, TrainConfig};
use crate::TrainError;

/// A model that a run takes its sizes from.
#[derive(Debug)]
pub(crate) enum Start {
    /// The run's own newest checkpoint, from which it resumes.
    Resumed(Box<ModelSource>),
    /// What `model.init` names.
    Init(Box<ModelSource>),
}

impl Start {
    pub(crate) fn source(&self) -> &ModelSource {
        match self {
            Self::Resumed(source) | Self::Init(source) => source,
        }
    }
}

impl TrainConfig {
    /// Where `model.init` is set, what the run starts from. A run that has a checkpoint resumes from
    /// that unless it is `fresh`, and does not need `model.init` any more.
    ///
    /// # Errors
    /// See [`ModelSource::open`].
    pub(crate) fn start(&self, fresh: bool) -> Result<Option<Start>, TrainError> {
        let Some(init) = &self.model.init else { return Ok(None) };
        let checkpoints = Path::new(&self.run.dir).join("checkpoints");
        let own = match !fresh && checkpoints.is_dir() {
            // A newest one that is damaged is seen to when the run resumes.
            true => newest(&checkpoints).ok().flatten(),
            false => None,
        };
        Ok(Some(match own {
            Some(own) => Start::Resumed(Box::new(ModelSource::open(own.path())?)),
            None => Start::Init(Box::new(ModelSource::open(Path::new(init))?)),
        }))
    }
}

/// Where `model.init` is set, fills in the rest of `[model]` from there, and `data.tokenizer` with
/// the model's own. `given` is what the layers set.
///
/// # Errors
/// What is named cannot be opened, or a key says something else than it.
pub(super) fn fill_in(
    config: &mut TrainConfig,
    given: &Table,
    fresh: bool,
) -> Result<(), TrainError> {
    let Some(start) = config.start(fresh)? else { return Ok(()) };
    let source = start.source();
    let init = config.model.init.clone();
    let section = |model: &ModelConfig| Table::try_from(model).expect("a section is a table");
    let (said, found) = (section(&config.model), ModelConfig::of(source.config()));
    let actual = section(&found);
    let given_in = |section: &str| given.get(section).and_then(|section| section.as_table());
    for key in given_in("model").into_iter().flatten().map(|(key, _)| key) {
        if key != "init" && said.get(key) != actual.get(key) {
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
    // Another run is pinned to the checkpoint that is its newest now.
    let pinned = |source: &ModelSource| {
        source.checkpoint().map_or(source.path(), |checkpoint| checkpoint.path()).to_path_buf()
    };
    let init = match &start {
        Start::Init(source) => Some(pinned(source).display().to_string()),
        Start::Resumed(_) => init,
    };
    config.model = ModelConfig { init, ..found };
    if given_in("data").is_none_or(|data| !data.contains_key("tokenizer")) {
        let file = Assets::folder(source).map(|folder| folder.join("tokenizer.json"));
        if let Some(file) = file.filter(|file| file.is_file()) {
            config.data.tokenizer = Tokenizer::File(file.display().to_string());
        }
    }
    Ok(())
}
