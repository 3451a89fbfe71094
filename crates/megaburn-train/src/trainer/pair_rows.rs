//! The rows of an encoder-decoder model's batch.

use std::ops::Range;

use burn::{
    prelude::{Device, Int},
    tensor::{Tensor, TensorData},
};
use megaburn_data::{Sample, T5Sample};
use megaburn_parallel::EncoderRows;

use super::{batch::Batch, packed_row::IGNORED};

/// The samples of an encoder and a decoder; `None` if they are of another kind.
pub(super) fn pairs_of(samples: &[Sample]) -> Option<Vec<&T5Sample>> {
    fn pair(sample: &Sample) -> Option<&T5Sample> {
        match sample {
            Sample::T5(pair) => Some(pair),
            _ => None,
        }
    }
    let pairs: Option<Vec<&T5Sample>> = samples.iter().map(pair).collect();
    pairs.filter(|pairs| !pairs.is_empty())
}

impl Batch {
    /// The batch of samples of an encoder and a decoder: the tokens of the encoder, then those of the
    /// decoder, and the labels of the decoder. Only the samples `counted` count in the loss.
    pub(super) fn of_pairs(samples: &[&T5Sample], counted: Range<usize>, device: &Device) -> Self {
        let ids = |tokens: &[u32]| -> Vec<i64> { tokens.iter().map(|id| (*id).into()).collect() };
        let tokens = samples.iter().map(|sample| {
            let [encoder, decoder] = [&sample.text_enc, &sample.text_dec].map(|of| ids(of));
            [encoder, decoder].concat()
        });
        let labels = samples.iter().enumerate().map(|(index, sample)| {
            let label = |(label, counts): (&i64, &bool)| match *counts && counted.contains(&index) {
                true => *label,
                false => IGNORED,
            };
            let all = sample.labels.iter().zip(&sample.loss_mask);
            all.map(label).collect()
        });
        let (tokens, labels): (Vec<Vec<i64>>, Vec<Vec<i64>>) = (tokens.collect(), labels.collect());
        let num_counted = labels.iter().flatten().filter(|label| **label != IGNORED);
        let num_counted = num_counted.count();
        let held = |mask: &[bool]| {
            mask.iter()
                .rposition(|is_text| *is_text)
                .map_or(0, |at| at + 1)
        };
        let encoder_held = samples.iter().map(|sample| held(&sample.enc_mask));
        let encoder_held: Vec<usize> = encoder_held.collect();
        // Rows that do not count are no work.
        let pairs = samples.iter().zip(&encoder_held).skip(counted.start);
        let pairs = pairs.take(counted.len());
        let lens = pairs.flat_map(|(sample, encoder)| [*encoder, held(&sample.dec_mask)]);
        let encoder_len = samples.first().map_or(0, |sample| sample.text_enc.len());
        let is_padded = encoder_held.iter().any(|held| *held < encoder_len);
        Self {
            lens: lens.collect(),
            encoder: Some(EncoderRows::new(
                encoder_len,
                is_padded.then(|| encoder_held.into()),
            )),
            tokens: by_position(&tokens, device),
            labels: by_position(&labels, device),
            counted: num_counted,
            loss_mask_values: None,
            ahead: Vec::new(),
            ranks: 1,
            documents: None,
            token_types: None,
            sentence_order: None,
            counted_rows: 0,
            parallel: None,
        }
    }
}

/// Rows of equal length as `[positions, rows]`.
fn by_position(rows: &[Vec<i64>], device: &Device) -> Tensor<2, Int> {
    let len = rows.first().map_or(0, Vec::len);
    let ids = (0..len).flat_map(|at| rows.iter().map(move |row| row[at]));
    let ids: Vec<i64> = ids.collect();
    Tensor::from_data(TensorData::new(ids, [len, rows.len()]), device)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sample of which the encoder reads `encoder` of 5 tokens, and the decoder `decoder` of 4.
    fn sample(encoder: usize, decoder: usize) -> T5Sample {
        let tokens = |first: u32, held: usize, len: usize| -> Vec<u32> {
            (0..len as u32)
                .map(|at| if at < held as u32 { first + at } else { 0 })
                .collect()
        };
        let mask = |held: usize, len: usize| (0..len).map(|at| at < held).collect::<Vec<_>>();
        let label = |at: i64| if at < decoder as i64 { 70 + at } else { -1 };
        T5Sample {
            text_enc: tokens(30, encoder, 5),
            text_dec: tokens(50, decoder, 4),
            labels: (0..4).map(label).collect(),
            loss_mask: mask(decoder, 4),
            truncated: false,
            enc_mask: mask(encoder, 5),
            dec_mask: mask(decoder, 4),
        }
    }

    fn numbers(tensor: &Tensor<2, Int>) -> Vec<i64> {
        tensor.to_data().iter::<i64>().collect()
    }

    #[test]
    fn the_encoder_comes_first_and_padding_has_no_labels() {
        let samples = [sample(3, 4), sample(5, 2)];
        let samples: Vec<&T5Sample> = samples.iter().collect();
        let batch = Batch::of_pairs(&samples, 0..2, &Device::flex());
        assert_eq!(batch.tokens.dims(), [9, 2]);
        let encoder = [30, 30, 31, 31, 32, 32, 0, 33, 0, 34];
        let decoder = [50, 50, 51, 51, 52, 0, 53, 0];
        assert_eq!(numbers(&batch.tokens), [&encoder[..], &decoder].concat());
        let no = IGNORED;
        assert_eq!(batch.labels.dims(), [4, 2]);
        assert_eq!(numbers(&batch.labels), [70, 70, 71, 71, 72, no, 73, no]);
        assert_eq!((batch.counted, batch.lens), (6, vec![3, 4, 5, 2]));
        let held = Some([3, 5].as_slice().into());
        assert_eq!(batch.encoder, Some(EncoderRows::new(5, held)));
    }

    #[test]
    fn full_rows_have_no_padding_and_one_that_does_not_count_no_labels() {
        let samples = [sample(5, 3), sample(5, 4)];
        let samples: Vec<&T5Sample> = samples.iter().collect();
        let batch = Batch::of_pairs(&samples, 0..1, &Device::flex());
        assert_eq!(batch.encoder, Some(EncoderRows::new(5, None)));
        let no = IGNORED;
        assert_eq!(numbers(&batch.labels), [70, no, 71, no, 72, no, no, no]);
        assert_eq!((batch.counted, batch.lens), (3, vec![5, 3]));
    }
}
