//! The small files of a run's model, which export and generation need.

use std::{fs, path::Path};

use megaburn_data::{DataError, PublishedTokenizer, T5DatasetConfig, Tokenizer};
use megaburn_models::assets::Assets;

use crate::{
    config::{DatasetKind, InitFrom, TrainConfig},
    error::TrainError,
};

/// The small files of the model that a new run starts from, with the tokenizer that it trains with.
///
/// # Errors
/// A file cannot be read.
pub(crate) fn assets_of(
    config: &TrainConfig,
    start: Option<&InitFrom>,
    tokenizer: &dyn Tokenizer,
) -> Result<Assets, TrainError> {
    let of_model = match start {
        Some(start) => Assets::of(start.source())?,
        None => Assets::default(),
    };
    let mut published = tokenizer.published()?;
    if let (DatasetKind::T5, Some(published)) = (config.data.dataset, &mut published) {
        // `config.json` names the token that ends the decoder's text. The tokenizer's own end
        // token, which ends documents, stays as it is.
        let end = tokenizer.id_to_token(tokenizer.eos());
        published.config.insert("eos_token".into(), end.into());
    }
    let (of_tokenizer, is_own) = match &published {
        None => (Assets::default(), false),
        Some(published) => of_tokenizer(published, &of_model)?,
    };
    let mut assets = of_model.with_tokenizer_of(of_tokenizer);
    if !is_own {
        // The model's own special tokens have different ids in this tokenizer.
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

/// Returns the small files of a tokenizer, and whether the model with the files `of_model` has the
/// same tokenizer.
fn of_tokenizer(
    published: &PublishedTokenizer,
    of_model: &Assets,
) -> Result<(Assets, bool), TrainError> {
    let PublishedTokenizer { path, name, config } = published;
    let mut assets = Assets::read(path.parent().unwrap_or(Path::new("")))?;
    let bytes = fs::read(path).map_err(|source| TrainError::Read {
        path: path.clone(),
        source,
    })?;
    let is_own = of_model.has_tokenizer(&bytes);
    assets.insert_tokenizer(name, bytes, config);
    Ok((assets, is_own))
}

/// The tokens with which the text of a decoder that follows an encoder begins and ends, as the model
/// that the run starts from has them, if the run trains with this model's own tokenizer. Without
/// them, they follow from the tokenizer.
///
/// # Errors
/// A file cannot be read; the tokenizer has no spelling of one of the tokens.
pub(crate) fn ends_of_start(
    start: Option<&InitFrom>,
    tokenizer: &dyn Tokenizer,
) -> Result<[Option<String>; 2], TrainError> {
    let source = start.map(InitFrom::source);
    let source = source.filter(|source| source.config().is_encoder_decoder());
    let (Some(source), Some(published)) = (source, tokenizer.published()?) else {
        return Ok([None, None]);
    };
    let assets = Assets::of(source)?;
    let (_, is_own) = of_tokenizer(&published, &assets)?;
    if !is_own {
        return Ok([None, None]);
    }
    let spelling = |key: &str, id: Option<u32>| {
        let Some(id) = id else { return Ok(None) };
        let spelling = tokenizer.id_to_token(id);
        let why = format!(
            "the model's {key} is {id}, which is no token of its tokenizer `{}`; correct it in the \
            model's generation_config.json or config.json",
            published.path.display()
        );
        spelling.map(Some).ok_or(DataError::MaskedSamples { why })
    };
    Ok([
        spelling("decoder_start_token_id", assets.decoder_start())?,
        spelling("eos_token_id", assets.eos().first().copied())?,
    ])
}
