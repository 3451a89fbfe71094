use std::path::Path;

use tokenizers::ModelWrapper;

use super::{
    super::{
        encoder::{Encoder, EncoderModel},
        special::OwnIds,
    },
    FileKind, Opened,
};
use crate::error::DataError;

/// Parses a `tokenizer.json` and removes truncation, padding and BPE dropout, so that it encodes
/// complete texts and is deterministic.
pub(super) fn read(path: &Path, bytes: &[u8]) -> Result<Opened, DataError> {
    let bad = |why: String| DataError::BadTokenizer {
        path: path.into(),
        why,
    };
    let mut encoder = Encoder::from_bytes(bytes).map_err(|error| bad(error.to_string()))?;
    encoder
        .with_truncation(None)
        .map_err(|error| bad(error.to_string()))?;
    encoder.with_padding(None);
    if let EncoderModel::Library(ModelWrapper::BPE(model)) = encoder.get_model()
        && model.dropout.is_some()
    {
        let mut model = model.clone();
        model.dropout = None;
        encoder.with_model(EncoderModel::Library(model.into()));
    }
    if encoder.get_vocab_size(true) == 0 {
        return Err(bad("it has no tokens".into()));
    }
    Ok(Opened {
        kind: FileKind::Json,
        encoder,
        own: OwnIds::default(),
        settings: String::new(),
        encoding: None,
    })
}
