use std::{borrow::Cow, ops::Range, sync::Arc};

use burn::{
    prelude::Device,
    tensor::{Tensor, TensorData},
};
use megaburn_data::Sample;
use megaburn_mesh::{MeshError, PackedRows, Zigzag};
use megaburn_models::decoder::{MtpTargets, shift_for_depth};
use megaburn_parallel::PackedDocuments;

use super::{
    batch::Batch,
    packed_row::{Document, Encoded, IGNORED, PackedRow},
    pair_rows::pairs_of,
};

/// Turns samples into the inputs of a rank's model.
#[derive(Clone, Copy, Debug)]
pub(super) struct Collator {
    /// Tokens of a sequence.
    pub(super) seq_len: usize,
    /// Tokens of a row including its padding.
    pub(super) padded: usize,
    /// Which chunks of each sequence this rank holds.
    pub(super) zigzag: Zigzag,
    /// How samples are split into documents; `None` if they are not.
    pub(super) documents: Option<Split>,
    /// The eos, if labels after it are excluded from the loss.
    pub(super) masked_eos: Option<u32>,
    /// Number of multi-token-prediction depths.
    pub(super) mtp_depths: usize,
}

/// How a sample is split into documents.
#[derive(Clone, Copy, Debug)]
pub(super) struct Split {
    /// The token that ends a document.
    pub(super) eos: u32,
    /// Each document is padded to a multiple of this length.
    pub(super) multiple: usize,
}

impl Collator {
    /// Builds the batch of some samples, each of which has one token more than labels, on the
    /// device without autodiff. Only the samples `counted` count in the loss.
    ///
    /// # Errors
    /// The context-parallel ranks do not divide the documents.
    pub(super) fn batch(
        &self,
        samples: &[Sample],
        counted: Range<usize>,
        device: &Device,
    ) -> Result<Batch, MeshError> {
        if let Some(pairs) = pairs_of(samples) {
            return Ok(Batch::of_pairs(&pairs, counted, device));
        }
        let row = |(index, sample): (usize, &Sample)| {
            if let Sample::Bert(sample) = sample {
                return PackedRow::masked(sample, self.padded, counted.contains(&index));
            }
            let documents = self.documents_of(sample).into_iter();
            let loss_mask_values = counted.contains(&index);
            let documents = documents.map(|of| if loss_mask_values { of } else { of.ignored() });
            self.row(documents)
        };
        let rows: Vec<PackedRow> = samples.iter().enumerate().map(row).collect();
        let split = self.documents.is_some() || rows.iter().any(PackedRow::is_padded);
        batch(&rows, self.zigzag, split, self.mtp_depths, device)
    }

    /// The documents of a sample, or the sample itself if samples are not split. Tokens that do not
    /// fit into a sequence are cut off.
    pub(super) fn documents_of(&self, sample: &Sample) -> Vec<Document> {
        let documents: Vec<&[u32]> = match (sample, self.documents) {
            (Sample::Documents(documents), _) => documents.iter().map(Vec::as_slice).collect(),
            // The eos at the end of a document is only a label of the token before it, never an
            // input.
            (Sample::Tokens(tokens), Some(Split { eos, .. })) => {
                tokens.split_inclusive(|token| *token == eos).collect()
            }
            (Sample::Tokens(tokens), None) => vec![tokens],
            (Sample::Bert(_) | Sample::T5(_), _) => Vec::new(),
        };
        let multiple = self.documents.map_or(1, |split| split.multiple);
        let mut room = self.seq_len;
        let documents = documents.into_iter().filter_map(|tokens| {
            let mut document = Document::of(tokens).cut(room);
            room -= document.len().next_multiple_of(multiple).min(room);
            if let Some(eos) = self.masked_eos {
                document.ignore_after(eos);
            }
            (document.len() > 0).then_some(document)
        });
        documents.collect()
    }

    /// Packs documents into a sequence.
    fn row(&self, documents: impl Iterator<Item = Document>) -> PackedRow {
        let mut row = PackedRow::default();
        for document in documents {
            let room = self.seq_len - row.tokens.len();
            let multiple = self.documents.map_or(1, |split| split.multiple);
            let len = document.len().next_multiple_of(multiple).min(room);
            row.put(document, len);
        }
        row.fill(self.padded)
    }
}

/// This rank's part of rows of equal length. If `split`, their documents do not attend to each
/// other. `mtp_depths` is the number of multi-token-prediction depths.
///
/// # Errors
/// The context-parallel ranks do not divide the documents.
pub(super) fn batch(
    rows: &[PackedRow],
    zigzag: Zigzag,
    split: bool,
    mtp_depths: usize,
    device: &Device,
) -> Result<Batch, MeshError> {
    let documents = if split {
        let documents = PackedRows::new(rows.iter().map(|row| row.bounds.clone()).collect())?;
        documents.check(zigzag)?;
        Some(documents)
    } else {
        None
    };
    let seq_len = rows.first().map_or(0, |row| row.tokens.len());
    let count = rows.len();
    let held: Vec<Vec<usize>> = match &documents {
        Some(all) => (0..count)
            .map(|row| all.tokens(row, zigzag).collect())
            .collect(),
        None => vec![zigzag.positions(seq_len).collect(); count],
    };
    let len = seq_len / zigzag.ranks();
    let matrix = |of: &dyn Fn(&PackedRow) -> Cow<'_, [i64]>| -> Vec<i64> {
        let whole: Vec<_> = rows.iter().map(of).collect();
        let place = |at: usize| {
            whole
                .iter()
                .zip(&held)
                .map(move |(row, held)| row[held[at]])
        };
        (0..len).flat_map(place).collect()
    };
    let tensor = |ids: Vec<i64>| Tensor::from_data(TensorData::new(ids, [len, count]), device);
    // Shift full rows, because the tokens further ahead may be on another context-parallel rank.
    let ahead = (1..=mtp_depths).map(|depth| {
        let tokens = matrix(&|PackedRow { tokens, bounds, .. }| {
            shift_for_depth(tokens, bounds, depth, 0).into()
        });
        let labels = matrix(&|PackedRow { labels, bounds, .. }| {
            shift_for_depth(labels, bounds, depth, IGNORED).into()
        });
        let (_, counted) = counted(&labels);
        MtpTargets {
            tokens: tensor(tokens),
            labels: tensor(labels),
            counted,
        }
    });
    let ahead = ahead.collect();
    let tokens = matrix(&|row| (&row.tokens).into());
    let labels = matrix(&|row| (&row.labels).into());
    let (counted, loss_mask_values) = counted(&labels);
    let documents = documents.map(PackedDocuments::new);
    let tokens = tensor(tokens);
    let labels = tensor(labels);
    // Rows that do not count are no work.
    let counts = |row: &&PackedRow| row.labels.iter().any(|label| *label != IGNORED);
    let lens = rows.iter().filter(counts);
    let lens = lens.flat_map(|row| row.lens.clone()).collect();
    let ranks = zigzag.ranks();
    let parallel = None;
    let encoded: Option<Vec<&Encoded>> = rows.iter().map(|row| row.encoded.as_ref()).collect();
    let encoded = encoded.filter(|rows| !rows.is_empty());
    let orders: Option<Vec<i64>> = encoded
        .as_ref()
        .map(|rows| rows.iter().map(|row| row.order).collect());
    let counted_rows = orders.iter().flatten().filter(|label| **label != IGNORED);
    let counted_rows = counted_rows.count();
    let order = |labels| Tensor::from_data(TensorData::new(labels, [1, count]), device);
    let types = |rows: Vec<&Encoded>| rows.into_iter().map(|row| row.types.clone()).collect();
    Ok(Batch {
        token_types: encoded.map(types),
        encoder: None,
        sentence_order: orders.map(order),
        counted_rows,
        tokens,
        labels,
        counted,
        loss_mask_values,
        ahead,
        lens,
        ranks,
        documents,
        parallel,
    })
}

/// How many labels count in the loss, and the loss mask; `None` if all count.
fn counted(labels: &[i64]) -> (usize, Option<Arc<[bool]>>) {
    let loss_mask_values = || labels.iter().map(|label| *label != IGNORED);
    let count = loss_mask_values().filter(|is| *is).count();
    (
        count,
        (count < labels.len()).then(|| loss_mask_values().collect()),
    )
}

#[cfg(test)]
mod tests {
    use burn::prelude::Int;
    use rstest::rstest;

    use super::*;

    const NO: i64 = IGNORED;

    fn collator(seq_len: usize, documents: Option<Split>) -> Collator {
        Collator {
            seq_len,
            padded: seq_len,
            zigzag: Zigzag::WHOLE,
            documents,
            masked_eos: None,
            mtp_depths: 0,
        }
    }

    fn matrix(of: Tensor<2, Int>) -> Vec<i64> {
        of.into_data().iter::<i64>().collect()
    }

    #[rstest]
    #[case(&[1, 2, 3, 4, 5], &[1, 2, 3, 4, 0, 0], &[2, 3, 4, 5, NO, NO])]
    #[case(&[1, 2, 3, 4, 5, 6, 7], &[1, 2, 3, 4, 5, 6], &[2, 3, 4, 5, 6, 7])]
    fn samples_are_padded_behind(
        #[case] sample: &[u32],
        #[case] tokens: &[i64],
        #[case] labels: &[i64],
    ) {
        let of = collator(6, None);
        let row = of.row(of.documents_of(&Sample::Tokens(sample.into())).into_iter());
        assert_eq!((&row.tokens[..], &row.labels[..]), (tokens, labels));
        assert_eq!(row.bounds, [0, 6]);
    }

    #[rstest]
    // 9 is the eos. There are two documents; the second is cut to the space that is left.
    #[case(&[1, 2, 9, 3, 4, 5], &[1, 2, 3, 4, 0, 0, 0, 0], &[2, 9, 4, 5, NO, NO, NO, NO], &[0, 2, 8])]
    // A document with only an eos, one that is cut off, and one that does not fit.
    #[case(&[9, 1, 2, 3, 9, 4, 5, 6, 7, 8, 9, 1, 2], &[1, 2, 3, 0, 4, 5, 6, 7], &[2, 3, 9, NO, 5, 6, 7, 8], &[0, 4, 8])]
    #[case(&[9, 9, 9], &[0; 8], &[NO; 8], &[0, 8])]
    fn documents_are_padded_each(
        #[case] sample: &[u32],
        #[case] tokens: &[i64],
        #[case] labels: &[i64],
        #[case] bounds: &[usize],
    ) {
        let of = collator(
            8,
            Some(Split {
                eos: 9,
                multiple: 2,
            }),
        );
        let row = of.row(of.documents_of(&Sample::Tokens(sample.into())).into_iter());
        assert_eq!((&row.tokens[..], &row.labels[..]), (tokens, labels));
        assert_eq!(row.bounds, bounds);
    }

    #[test]
    fn documents_of_a_sample_are_packed_as_they_are() {
        let split = Split {
            eos: 9,
            multiple: 2,
        };
        let of = collator(8, Some(split));
        let sample = Sample::Documents(vec![vec![1, 2, 3, 4], vec![5, 9], vec![6, 7, 8]]);
        let row = of.row(of.documents_of(&sample).into_iter());
        assert_eq!(row.tokens, [1, 2, 3, 0, 5, 0, 6, 7]);
        assert_eq!(row.labels, [2, 3, 4, NO, 9, NO, 7, 8]);
        assert_eq!(row.bounds, [0, 4, 6, 8]);
    }

    #[test]
    fn the_label_after_an_eos_can_be_excluded_from_the_loss() {
        let sample = Sample::Tokens(vec![1, 9, 2, 9, 9, 3, 9]);
        let of = Collator {
            masked_eos: Some(9),
            ..collator(6, None)
        };
        let row = of.row(of.documents_of(&sample).into_iter());
        assert_eq!(row.tokens, [1, 9, 2, 9, 9, 3]);
        assert_eq!(row.labels, [9, NO, 9, NO, NO, 9]);
    }

    #[test]
    fn ranks_hold_what_the_zigzag_says() {
        let device = Device::flex();
        let samples = [0..9, 10..19].map(|tokens| Sample::Tokens(tokens.collect()));
        let of = Collator {
            zigzag: Zigzag::new(0, 2),
            ..collator(8, None)
        };
        let batch = of.batch(&samples, 0..1, &device).unwrap();
        assert_eq!(matrix(batch.tokens), [0, 10, 1, 11, 6, 16, 7, 17]);
        assert_eq!(matrix(batch.labels), [1, NO, 2, NO, 7, NO, 8, NO]);
        assert_eq!(batch.counted, 4);
        // Documents of 4 and 12 tokens, then of 8 and 8.
        let split = Split {
            eos: 99,
            multiple: 4,
        };
        let of = Collator {
            zigzag: Zigzag::new(1, 2),
            documents: Some(split),
            ..collator(16, None)
        };
        let sample =
            |end: u32| Sample::Tokens([(1..end).collect(), vec![99], (50..70).collect()].concat());
        let batch = of.batch(&[sample(5), sample(9)], 0..2, &device).unwrap();
        let columns: Vec<i64> = matrix(batch.tokens);
        let row = |at: usize| {
            columns
                .iter()
                .copied()
                .skip(at)
                .step_by(2)
                .collect::<Vec<_>>()
        };
        assert_eq!(row(0), [2, 53, 54, 55, 3, 56, 57, 58]);
        assert_eq!(row(1), [3, 4, 52, 53, 5, 6, 54, 55]);
        assert!(batch.documents.is_some());
    }

    #[test]
    fn further_tokens_are_those_of_whole_documents() {
        let device = Device::flex();
        // Documents of 4 and 12 tokens; the second is padded.
        let sample = Sample::Tokens([vec![1, 2, 3, 4, 99], (50..60).collect()].concat());
        let split = Some(Split {
            eos: 99,
            multiple: 4,
        });
        let of = |zigzag, mtp_depths| {
            let of = Collator {
                zigzag,
                mtp_depths,
                ..collator(16, split)
            };
            of.batch(std::slice::from_ref(&sample), 0..1, &device)
                .unwrap()
        };
        let whole = of(Zigzag::WHOLE, 4);
        let [first, .., last] = &whole.ahead[..] else {
            panic!("four depths")
        };
        let tokens = [2, 3, 4, 0, 51, 52, 53, 54, 55, 56, 57, 58, 0, 0, 0, 0];
        assert_eq!(matrix(first.tokens.clone()), tokens);
        let labels = [3, 4, 99, NO, 52, 53, 54, 55, 56, 57, 58, 59, NO, NO, NO, NO];
        assert_eq!(matrix(first.labels.clone()), labels);
        assert_eq!(
            first.counted.as_deref().unwrap(),
            labels.map(|label| label != NO)
        );
        let labels = [
            NO, NO, NO, NO, 55, 56, 57, 58, 59, NO, NO, NO, NO, NO, NO, NO,
        ];
        assert_eq!(matrix(last.labels.clone()), labels);
        // Rank 1 of 2 holds chunks 1 and 2 of the four chunks of each document: chunk 1 of both
        // documents, then chunk 2 of both.
        let part = of(Zigzag::new(1, 2), 1);
        assert_eq!(
            matrix(part.ahead[0].tokens.clone()),
            [3, 54, 55, 56, 4, 57, 58, 0]
        );
        assert_eq!(
            matrix(part.ahead[0].labels.clone()),
            [4, 55, 56, 57, 99, 58, 59, NO]
        );
        assert_eq!(part.counted, 8);
    }
}
