//! The small files of a model that a run keeps, so that it can be exported and asked without them.

use std::{fs, io, path::Path};

use megaburn_models::assets::{ASSETS, Assets};

use crate::{
    TrainConfig, TrainError,
    config::{Start, Tokenizer},
    data::RunData,
};

/// Puts into the folder of a run that begins what came with the model that it starts from, with the
/// tokenizer that it trains with, in place of what stood there.
pub(crate) fn keep(
    config: &TrainConfig,
    start: Option<&Start>,
    data: &RunData,
    dir: &Path,
) -> Result<(), TrainError> {
    let of_model = match start {
        Some(start) => Assets::of(start.source())?,
        None => Assets::default(),
    };
    let of_tokenizer = match &config.data.tokenizer {
        Tokenizer::Byte => Assets::default(),
        Tokenizer::File(path) => of_tokenizer(Path::new(path))?,
    };
    let own = of_model.get("tokenizer.json");
    let is_own = own.is_some() && own == of_tokenizer.get("tokenizer.json");
    let mut assets = of_model.with_tokenizer_of(of_tokenizer);
    if !is_own {
        // The model's own special tokens mean something else now.
        let tokenizer = &data.tokenizer;
        assets.set_special_tokens(Some(tokenizer.eos()), tokenizer.bos(), tokenizer.pad());
    }
    let folder = dir.join(ASSETS);
    write(&assets, &folder).map_err(|source| TrainError::Write { path: folder.clone(), source })
}

/// Writes the files beside the folder first: it is never half of one and half of another model.
fn write(assets: &Assets, folder: &Path) -> io::Result<()> {
    let staging = folder.with_extension("tmp");
    remove(&staging)?;
    fs::create_dir_all(&staging)?;
    for (name, bytes) in assets.kept() {
        fs::write(staging.join(name), bytes)?;
    }
    remove(folder)?;
    fs::rename(&staging, folder)
}

fn remove(folder: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn of_tokenizer(path: &Path) -> Result<Assets, TrainError> {
    if path.is_dir() {
        return Ok(Assets::read(path)?);
    }
    let mut assets = Assets::read(path.parent().unwrap_or(Path::new("")))?;
    let bytes = fs::read(path).map_err(|source| TrainError::Read { path: path.into(), source })?;
    assets.insert("tokenizer.json", bytes);
    Ok(assets)
}
