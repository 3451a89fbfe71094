use megaburn_data::{T5DatasetConfig, Tokenizer};
use megaburn_models::{assets::Assets, source::ModelSource};

use crate::error::TrainError;

/// The tokens that end a text of the model, and the token with which the decoder of an
/// encoder-decoder model begins. `is_given` says that `tokenizer` was chosen instead of the model's
/// own.
///
/// The ids of a decoder-only model in its own files belong to its own tokenizer. An encoder-decoder
/// model was trained with a beginning and an end that its tokenizer alone does not say, so those in
/// its files always count.
///
/// # Errors
/// A file of the model cannot be read.
pub fn ends_of(
    source: &ModelSource,
    tokenizer: Option<&dyn Tokenizer>,
    is_given: bool,
) -> Result<(Vec<u32>, Option<u32>), TrainError> {
    let assets = Assets::of(source)?;
    let mut eos = assets.eos();
    if source.config().is_encoder_decoder() {
        if eos.is_empty() {
            eos.extend(tokenizer.map(T5DatasetConfig::default_eos));
        }
        let start = assets.decoder_start();
        let start = start.or_else(|| T5DatasetConfig::default_bos(tokenizer?));
        return Ok((eos, start));
    }
    if is_given {
        eos.clear();
    }
    eos.extend(tokenizer.map(|tokenizer| tokenizer.eos()));
    Ok((eos, None))
}
