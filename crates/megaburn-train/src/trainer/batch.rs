use burn::{
    prelude::{Device, Int},
    tensor::{Tensor, TensorData},
};
use megaburn_mesh::{Documents, MeshError, Zigzag};
use megaburn_parallel::PackedDocuments;

/// The label that the loss leaves out, as PyTorch's and Hugging Face's.
const IGNORED: i64 = -100;

/// How samples become what a rank's model reads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Batching {
    /// Tokens of a sequence, those that it is padded with included.
    pub(super) seq_len: usize,
    /// What of each sequence the rank holds.
    pub(super) zigzag: Zigzag,
    /// Where samples are documents that do not see each other.
    pub(super) documents: Option<Split>,
}

/// How a sample is split into documents.
#[derive(Clone, Copy, Debug)]
pub(super) struct Split {
    /// The token that ends one.
    pub(super) eos: u32,
    /// Each is padded to a multiple of this.
    pub(super) multiple: usize,
}

/// What a model reads, and what it is asked for.
pub(super) struct Batch {
    /// `[seq_len / n, samples]` on `n` ranks that share sequences.
    pub(super) tokens: Tensor<2, Int>,
    /// One place on, of the same shape.
    pub(super) labels: Tensor<2, Int>,
    /// Labels of these that take part in the loss.
    pub(super) counted: usize,
    pub(super) documents: Option<PackedDocuments>,
}

/// A sample as long as a sequence.
#[derive(Debug, PartialEq)]
struct Row {
    tokens: Vec<i64>,
    labels: Vec<i64>,
    /// Where documents begin, and where the last ends.
    bounds: Vec<usize>,
}

impl Batching {
    /// Samples of one token more than they have labels, on the device without autodiff. Only the first
    /// `counted` of them take part in the loss.
    ///
    /// # Errors
    /// Documents that ranks do not divide.
    pub(super) fn batch(
        &self,
        samples: &[Vec<u32>],
        counted: usize,
        device: &Device,
    ) -> Result<Batch, MeshError> {
        let mut rows: Vec<Row> = samples.iter().map(|sample| self.row(sample)).collect();
        rows.iter_mut().skip(counted).for_each(|row| row.labels.fill(IGNORED));
        let documents = match self.documents {
            None => None,
            Some(_) => {
                let bounds = rows.iter().map(|row| row.bounds.clone()).collect();
                let documents = Documents::new(bounds)?;
                documents.check(self.zigzag)?;
                Some(documents)
            }
        };
        let held: Vec<Vec<usize>> = match &documents {
            Some(all) => {
                (0..rows.len()).map(|row| all.tokens(row, self.zigzag).collect()).collect()
            }
            None => vec![self.zigzag.positions(self.seq_len).collect(); rows.len()],
        };
        let (len, count) = (self.seq_len / self.zigzag.ranks(), rows.len());
        let matrix = |of: fn(&Row) -> &[i64]| -> Vec<i64> {
            let place =
                |at: usize| rows.iter().zip(&held).map(move |(row, held)| of(row)[held[at]]);
            (0..len).flat_map(place).collect()
        };
        let (tokens, labels) = (matrix(|row| &row.tokens), matrix(|row| &row.labels));
        let counted = labels.iter().filter(|label| **label != IGNORED).count();
        let tensor = |ids: Vec<i64>| Tensor::from_data(TensorData::new(ids, [len, count]), device);
        let documents = documents.map(PackedDocuments::new);
        Ok(Batch { tokens: tensor(tokens), labels: tensor(labels), counted, documents })
    }

    fn row(&self, sample: &[u32]) -> Row {
        let (mut tokens, mut labels) = (Vec::new(), Vec::new());
        let mut bounds = vec![0];
        match self.documents {
            None => self.put(sample, self.seq_len, &mut tokens, &mut labels),
            Some(Split { eos, multiple }) => {
                // An eos is what the last token of its document is asked for, and read by nobody.
                for document in sample.split_inclusive(|token| *token == eos) {
                    let room = self.seq_len - tokens.len();
                    let len = (document.len() - 1).next_multiple_of(multiple).min(room);
                    if len > 0 {
                        self.put(document, len, &mut tokens, &mut labels);
                        bounds.push(tokens.len());
                    }
                }
            }
        }
        // The last document has what room is left.
        if bounds.len() > 1 {
            bounds.pop();
        }
        bounds.push(self.seq_len);
        tokens.resize(self.seq_len, 0);
        labels.resize(self.seq_len, IGNORED);
        Row { tokens, labels, bounds }
    }

    /// A document, cut or padded to `len`.
    fn put(&self, document: &[u32], len: usize, tokens: &mut Vec<i64>, labels: &mut Vec<i64>) {
        let end = tokens.len() + len;
        let count = (document.len() - 1).min(len);
        tokens.extend(document[..count].iter().map(|token| i64::from(*token)));
        labels.extend(document[1..=count].iter().map(|token| i64::from(*token)));
        tokens.resize(end, 0);
        labels.resize(end, IGNORED);
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const NO: i64 = IGNORED;

    fn batching(seq_len: usize, documents: Option<Split>) -> Batching {
        Batching { seq_len, zigzag: Zigzag::WHOLE, documents }
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
        let row = batching(6, None).row(sample);
        assert_eq!((&row.tokens[..], &row.labels[..]), (tokens, labels));
        assert_eq!(row.bounds, [0, 6]);
    }

    #[rstest]
    // 9 ends documents. Two, the second of which has the room that is left.
    #[case(&[1, 2, 9, 3, 4, 5], &[1, 2, 3, 4, 0, 0, 0, 0], &[2, 9, 4, 5, NO, NO, NO, NO], &[0, 2, 8])]
    // One of nothing but its end, one that is cut, one without room.
    #[case(&[9, 1, 2, 3, 9, 4, 5, 6, 7, 8, 9, 1, 2], &[1, 2, 3, 0, 4, 5, 6, 7], &[2, 3, 9, NO, 5, 6, 7, 8], &[0, 4, 8])]
    #[case(&[9, 9, 9], &[0; 8], &[NO; 8], &[0, 8])]
    fn documents_are_padded_each(
        #[case] sample: &[u32],
        #[case] tokens: &[i64],
        #[case] labels: &[i64],
        #[case] bounds: &[usize],
    ) {
        let row = batching(8, Some(Split { eos: 9, multiple: 2 })).row(sample);
        assert_eq!((&row.tokens[..], &row.labels[..]), (tokens, labels));
        assert_eq!(row.bounds, bounds);
    }

    #[test]
    fn ranks_hold_what_the_zigzag_says() {
        let device = Device::flex();
        let samples: [Vec<u32>; 2] = [(0..9).collect(), (10..19).collect()];
        let of = Batching { zigzag: Zigzag::new(0, 2), ..batching(8, None) };
        let batch = of.batch(&samples, 1, &device).unwrap();
        assert_eq!(matrix(batch.tokens), [0, 10, 1, 11, 6, 16, 7, 17]);
        assert_eq!(matrix(batch.labels), [1, NO, 2, NO, 7, NO, 8, NO]);
        assert_eq!(batch.counted, 4);
        // Documents of 4 and 12 tokens, then of 8 and 8.
        let split = Split { eos: 99, multiple: 4 };
        let of =
            Batching { zigzag: Zigzag::new(1, 2), documents: Some(split), ..batching(16, None) };
        let sample = |end: u32| [(1..end).collect(), vec![99], (50..70).collect()].concat();
        let batch = of.batch(&[sample(5), sample(9)], 2, &device).unwrap();
        let columns: Vec<i64> = matrix(batch.tokens);
        let row = |at: usize| columns.iter().copied().skip(at).step_by(2).collect::<Vec<_>>();
        assert_eq!(row(0), [2, 53, 54, 55, 3, 56, 57, 58]);
        assert_eq!(row(1), [3, 4, 52, 53, 5, 6, 54, 55]);
        assert!(batch.documents.is_some());
    }
}
