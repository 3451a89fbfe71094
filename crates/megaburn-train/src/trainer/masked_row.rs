//! The rows of an encoder's batch.

use megaburn_data::BertSample;

use super::packed_row::{Encoded, IGNORED, PackedRow};

impl PackedRow {
    /// A sample of masked sentences, padded to `len` tokens. The padding is a document of its own,
    /// so that tokens do not attend to it. Unless the sample `counts`, its labels are excluded from
    /// the losses.
    ///
    /// A masked token can become `[PAD]` by chance. The tokens attend to it, because the row's text
    /// ends after the last token that is no padding; Megatron-LM excludes it from attention.
    pub(super) fn masked(sample: &BertSample, len: usize, counts: bool) -> Self {
        let is_text = |is: &bool| *is;
        let held = sample.padding_mask.iter().rposition(is_text);
        let held = held.map_or(0, |last| last + 1);
        let mut tokens: Vec<i64> = sample.text.iter().map(|id| i64::from(*id)).collect();
        let label = |(label, is_masked): (&i64, &bool)| match *is_masked && counts {
            true => *label,
            false => IGNORED,
        };
        let mut labels: Vec<i64> = sample
            .labels
            .iter()
            .zip(&sample.loss_mask)
            .map(label)
            .collect();
        let mut types: Vec<usize> = sample.types.iter().map(|id| *id as usize).collect();
        tokens.resize(len, 0);
        labels.resize(len, IGNORED);
        types.resize(len, 0);
        let order = if counts {
            sample.is_random.into()
        } else {
            IGNORED
        };
        Self {
            tokens,
            labels,
            bounds: if held < len {
                vec![0, held, len]
            } else {
                vec![0, len]
            },
            lens: vec![held],
            encoded: Some(Encoded { types, order }),
        }
    }

    /// Whether the row ends with padding of its own.
    pub(super) fn is_padded(&self) -> bool {
        self.bounds.len() > 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sample of 6 tokens, of which 4 are text, two are in the second segment and one is masked.
    fn sample() -> BertSample {
        BertSample {
            text: vec![2, 4, 7, 3, 0, 0],
            types: vec![0, 0, 1, 1, 0, 0],
            labels: vec![-1, 9, -1, -1, -1, -1],
            is_random: true,
            padding_mask: vec![true, true, true, true, false, false],
            loss_mask: vec![false, true, false, false, false, false],
            truncated: false,
        }
    }

    #[test]
    fn padding_is_a_document_of_its_own() {
        let row = PackedRow::masked(&sample(), 8, true);
        assert_eq!(row.tokens, [2, 4, 7, 3, 0, 0, 0, 0]);
        let no = IGNORED;
        assert_eq!(row.labels, [no, 9, no, no, no, no, no, no]);
        assert_eq!(
            (row.bounds.as_slice(), row.lens.as_slice()),
            (&[0, 4, 8][..], &[4][..])
        );
        let encoded = row.encoded.unwrap();
        assert_eq!(encoded.types, [0, 0, 1, 1, 0, 0, 0, 0]);
        assert_eq!(encoded.order, 1);
    }

    #[test]
    fn padding_that_a_masked_token_became_is_attended_to() {
        let hole = BertSample {
            padding_mask: vec![true, false, true, true, false, false],
            text: vec![2, 0, 7, 3, 0, 0],
            ..sample()
        };
        let row = PackedRow::masked(&hole, 6, true);
        assert_eq!((row.bounds.as_slice(), row.lens[0]), (&[0, 4, 6][..], 4));
        assert_eq!(row.labels[1], 9);
    }

    #[test]
    fn a_full_row_has_no_padding_and_one_that_does_not_count_no_labels() {
        let full = BertSample {
            padding_mask: vec![true; 6],
            ..sample()
        };
        let row = PackedRow::masked(&full, 6, false);
        assert!(!row.is_padded() && row.bounds == [0, 6]);
        assert_eq!(row.labels, [IGNORED; 6]);
        assert_eq!(row.encoded.unwrap().order, IGNORED);
    }
}
