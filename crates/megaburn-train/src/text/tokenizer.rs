use std::{
    fs,
    path::{Path, PathBuf},
};

use megaburn_data::{HfTokenizer, Tokenizer};
use megaburn_models::{
    assets::{ASSETS, Assets},
    source::ModelSource,
};

use crate::{config::Tokenizer as Choice, error::TrainError, run_folder::config_of};

/// The tokenizer of an opened model: `choice` if it is given, else the one that the run trained
/// with, else the one that came with the model; `None` if there is none of these.
///
/// # Errors
/// The tokenizer cannot be used, or the run's configuration cannot be read.
pub fn model_tokenizer(
    source: &ModelSource,
    choice: Option<&str>,
) -> Result<Option<Box<dyn Tokenizer>>, TrainError> {
    let choice = match choice {
        Some(choice) => Some(Choice::from(choice.to_string())),
        None => match run_of(source) {
            Some(run) => Some(run_choice(&run)?),
            None => Assets::folder(source).and_then(|folder| in_folder(&folder)),
        },
    };
    Ok(choice.map(|choice| choice.open()).transpose()?)
}

fn in_folder(folder: &Path) -> Option<Choice> {
    HfTokenizer::find(folder).map(|file| Choice::File(file.display().to_string()))
}

/// The run that a checkpoint belongs to, if any.
fn run_of(source: &ModelSource) -> Option<PathBuf> {
    let run = source.checkpoint()?.path().parent()?.parent()?;
    config_of(run).is_file().then(|| run.to_path_buf())
}

/// The tokenizer that a run trained with. The run's own copy takes precedence over the original
/// file.
fn run_choice(run: &Path) -> Result<Choice, TrainError> {
    let path = config_of(run);
    let text = fs::read_to_string(&path).map_err(|source| TrainError::Read {
        path: path.clone(),
        source,
    })?;
    let table: toml::Table = text.parse().map_err(|source| TrainError::Toml {
        origin: format!("`{}`", path.display()),
        source,
    })?;
    let said = table
        .get("data")
        .and_then(|data| data.get("tokenizer")?.as_str());
    Ok(match Choice::from(said.unwrap_or("byte").to_string()) {
        Choice::Byte => Choice::Byte,
        Choice::File(path) => in_folder(&run.join(ASSETS)).unwrap_or(Choice::File(path)),
    })
}
