//! The small files of a run's model, which export and generation need.

use std::{fs, path::Path};

use megaburn_data::T5DatasetConfig;
use megaburn_models::assets::Assets;

use crate::{
    config::{DatasetKind, InitFrom, Tokenizer, TrainConfig},
    data::RunData,
    error::TrainError,
};

/// The small files of the model that a new run starts from, with the tokenizer that it trains with.
///
/// # Errors
/// A file cannot be read.
pub(crate) fn assets_of(
    config: &TrainConfig,
    start: Option<&InitFrom>,
    data: &RunData,
) -> Result<Assets, TrainError> {
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
        // The model's own special tokens have different ids in this tokenizer.
        let tokenizer = data.tokenizer.as_ref();
        let [bos, pad] = [("bos", tokenizer.bos()), ("pad", tokenizer.pad())];
        assets.set_special_tokens(&match config.data.dataset {
            DatasetKind::Gpt | DatasetKind::Bert => {
                vec![("eos", Some(tokenizer.eos())), bos, pad]
            }
            DatasetKind::T5 => vec![
                ("eos", Some(T5DatasetConfig::default_eos(tokenizer))),
                bos,
                pad,
                ("decoder_start", T5DatasetConfig::default_bos(tokenizer)),
            ],
        });
    }
    Ok(assets)
}

fn of_tokenizer(path: &Path) -> Result<Assets, TrainError> {
    if path.is_dir() {
        return Ok(Assets::read(path)?);
    }
    let mut assets = Assets::read(path.parent().unwrap_or(Path::new("")))?;
    let bytes = fs::read(path).map_err(|source| TrainError::Read {
        path: path.into(),
        source,
    })?;
    assets.insert("tokenizer.json", bytes);
    Ok(assets)
}
