//! What the decoder of an encoder-decoder model reads.

use burn::tensor::{DType, TensorData};
use megaburn_checkpoint::TensorFile;
use megaburn_models::ModelError;
use megaburn_train::TrainError;
use serde_json::Value;

/// The label that is excluded from the loss.
pub(crate) const IGNORED: i64 = -100;

/// The tokens of the decoder of a batch, `[B, S_dec]`: `decoder_input_ids` or, as Transformers makes
/// them, the labels one place later, behind the token that starts the decoder.
///
/// # Errors
/// There are neither, or they have another shape or type.
fn decoder_tokens(
    file: &TensorFile,
    rows: usize,
    config: &Value,
) -> Result<TensorData, TrainError> {
    let is_given = file.contains("decoder_input_ids");
    let name = if is_given {
        "decoder_input_ids"
    } else {
        "labels"
    };
    let given = file.read(name)?;
    let shape = given.shape().to_vec();
    if shape.len() != 2 || shape[0] != rows || shape[1] == 0 || given.dtype() != DType::I64 {
        let found = given.dtype();
        return Err(ModelError::Tensor {
            path: file.path().to_path_buf(),
            name: name.into(),
            why: format!("expected [{rows}, S] in I64, found {shape:?} in {found:?}"),
        }
        .into());
    }
    if is_given {
        return Ok(given);
    }
    let number = |key: &str| config[key].as_i64();
    let padding = number("pad_token_id").unwrap_or(0);
    let start = number("decoder_start_token_id").unwrap_or(padding);
    let labels: Vec<i64> = given.iter::<i64>().collect();
    let tokens = shifted(&labels, shape[1], start, padding);
    Ok(TensorData::new(tokens, shape))
}

/// The labels of rows of `len` one place later, behind `start`. Labels to ignore become padding.
fn shifted(labels: &[i64], len: usize, start: i64, padding: i64) -> Vec<i64> {
    let row = |row: &[i64]| {
        let before = row[..len - 1].iter().copied();
        let tokens = before.map(|label| if label == IGNORED { padding } else { label });
        std::iter::once(start).chain(tokens).collect::<Vec<_>>()
    };
    labels.chunks(len).flat_map(row).collect()
}

/// The tokens of encoder and decoder in one row, `[B, S_enc + S_dec]`, from those of the encoder.
///
/// # Errors
/// The decoder has no tokens, or they have another shape or type.
pub(crate) fn with_decoder(
    encoder: &TensorData,
    file: &TensorFile,
    config: &Value,
) -> Result<TensorData, TrainError> {
    let [rows, len] = [encoder.shape()[0], encoder.shape()[1]];
    let decoder = decoder_tokens(file, rows, config)?;
    let rest = decoder.shape()[1];
    let [encoder, decoder] = [encoder, &decoder].map(|all| all.iter::<i64>().collect::<Vec<_>>());
    let both = encoder.chunks(len).zip(decoder.chunks(rest));
    let both = both.flat_map(|(encoder, decoder)| encoder.iter().chain(decoder).copied());
    Ok(TensorData::new(
        both.collect::<Vec<_>>(),
        [rows, len + rest],
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_decoder_reads_each_label_after_it_was_to_be_predicted() {
        let labels = [7, 8, 1, 9, 1, IGNORED];
        assert_eq!(shifted(&labels, 3, 0, 5), [0, 7, 8, 0, 9, 1]);
        assert_eq!(shifted(&[IGNORED, 4], 2, 3, 5), [3, 5]);
        assert_eq!(shifted(&[4, 6], 1, 3, 5), [3, 3]);
    }
}
