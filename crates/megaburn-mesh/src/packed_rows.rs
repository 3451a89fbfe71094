use std::ops::Range;

use crate::{error::MeshError, zigzag::Zigzag};

/// Several consecutive documents in each row of a batch (`cu_seqlens`). Tokens attend only within
/// their document, and positions restart at 0 in each. Context parallelism splits each document [in
/// zigzag](Zigzag).
///
/// ```
/// use megaburn_mesh::{PackedRows, Zigzag};
///
/// // Documents of 4 and 8 tokens in a row of 12.
/// let documents = PackedRows::new(vec![vec![0, 4, 12]])?;
/// let rank = Zigzag::new(1, 2);
/// documents.check(rank)?;
/// // The front chunks of both, then the back chunks.
/// assert!(documents.tokens(0, rank).eq([1, 6, 7, 2, 8, 9]));
/// assert!(documents.positions(0, rank).eq([1, 2, 3, 2, 4, 5]));
/// # Ok::<(), megaburn_mesh::MeshError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedRows {
    rows: Vec<Vec<usize>>,
}

impl PackedRows {
    /// Creates rows from `cu_seqlens`: for each row of the batch, the start of each document and
    /// the end of the last.
    ///
    /// # Errors
    /// The rows have different lengths, or their bounds do not increase from 0.
    pub fn new(cu_seqlens: Vec<Vec<usize>>) -> Result<Self, MeshError> {
        let len = cu_seqlens
            .first()
            .and_then(|row| row.last().copied())
            .unwrap_or(0);
        let fits = |row: &Vec<usize>| {
            row.first() == Some(&0) && row.is_sorted() && row.last() == Some(&len)
        };
        match cu_seqlens.iter().find(|row| !fits(row)) {
            Some(row) => Err(MeshError::PackedRows {
                cu_seqlens: row.clone(),
                len,
            }),
            None => Ok(Self { rows: cu_seqlens }),
        }
    }

    /// The number of rows in the batch.
    pub fn num_rows(&self) -> usize {
        self.rows.len()
    }

    /// The number of tokens per row.
    pub fn row_len(&self) -> usize {
        self.rows
            .first()
            .and_then(|row| row.last().copied())
            .unwrap_or(0)
    }

    /// For each row, the start of each document and the end of the last.
    pub fn cu_seqlens(&self) -> &[Vec<usize>] {
        &self.rows
    }

    /// The `cu_seqlens` of one chunk of each document, if each is split into `chunks`.
    pub fn chunk_bounds(&self, chunks: usize) -> Vec<Vec<usize>> {
        let bounds = |row: &Vec<usize>| row.iter().map(|bound| bound / chunks).collect();
        self.rows.iter().map(bounds).collect()
    }

    /// For each row, the chunk length of each document, if each is split into `chunks`.
    pub fn chunk_lens(&self, chunks: usize) -> Vec<Vec<usize>> {
        let lens = |row: &Vec<usize>| {
            row.windows(2)
                .map(|ends| (ends[1] - ends[0]) / chunks)
                .collect()
        };
        self.rows.iter().map(lens).collect()
    }

    /// Refuses documents that the ranks cannot split evenly.
    ///
    /// # Errors
    /// The first such document, with its length.
    pub fn check(&self, zigzag: Zigzag) -> Result<(), MeshError> {
        let multiple = zigzag.multiple();
        for (row, bounds) in self.rows.iter().enumerate() {
            let uneven = |ends: &&[usize]| !(ends[1] - ends[0]).is_multiple_of(multiple);
            if let Some(ends) = bounds.windows(2).find(uneven) {
                let start = ends[0];
                let len = ends[1] - ends[0];
                return Err(MeshError::DocumentLength {
                    row,
                    start,
                    len,
                    multiple,
                });
            }
        }
        Ok(())
    }

    /// The tokens of a row that a rank holds: the front chunks of all documents, then the back
    /// chunks.
    ///
    /// # Panics
    /// If the ranks cannot split a document evenly.
    pub fn tokens(&self, row: usize, zigzag: Zigzag) -> impl Iterator<Item = usize> {
        self.each(row, zigzag, |start, at| start + at)
    }

    /// The position of each token of [`tokens`](Self::tokens) in its document.
    ///
    /// # Panics
    /// See [`tokens`](Self::tokens).
    pub fn positions(&self, row: usize, zigzag: Zigzag) -> impl Iterator<Item = usize> {
        self.each(row, zigzag, |_, at| at)
    }

    fn each(
        &self,
        row: usize,
        zigzag: Zigzag,
        of: fn(usize, usize) -> usize,
    ) -> impl Iterator<Item = usize> {
        let bounds = &self.rows[row];
        // A single rank holds the documents unsplit.
        let halves: &[&[usize]] = if zigzag.ranks() == 1 {
            &[&[0, 1]]
        } else {
            &[&[0], &[1]]
        };
        halves.iter().flat_map(move |halves| {
            bounds.windows(2).flat_map(move |ends| {
                let ranges = zigzag.ranges(ends[1] - ends[0]);
                let ranges: Vec<Range<usize>> =
                    halves.iter().map(|half| ranges[*half].clone()).collect();
                let start = ends[0];
                ranges.into_iter().flatten().map(move |at| of(start, at))
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[test]
    fn ranks_hold_every_token_of_a_row_once() {
        let documents = PackedRows::new(vec![vec![0, 24], vec![0, 6, 6, 18, 24]]).unwrap();
        for ranks in [1, 3] {
            for (row, bounds) in documents.cu_seqlens().iter().enumerate() {
                let of_rank = |rank| {
                    let zigzag = Zigzag::new(rank, ranks);
                    documents.check(zigzag).unwrap();
                    documents
                        .tokens(row, zigzag)
                        .zip(documents.positions(row, zigzag))
                };
                let mut all: Vec<_> = (0..ranks).flat_map(of_rank).collect();
                all.sort_unstable();
                let start = |at: usize| *bounds.iter().rfind(|start| **start <= at).unwrap();
                assert!(all.into_iter().eq((0..24).map(|at| (at, at - start(at)))));
            }
        }
        assert!(documents.tokens(1, Zigzag::WHOLE).eq(0..24));
        assert_eq!(documents.chunk_bounds(6), [vec![0, 4], vec![0, 1, 1, 3, 4]]);
        assert_eq!(documents.chunk_lens(6), [vec![4], vec![1, 0, 2, 1]]);
    }

    #[rstest]
    #[case(vec![vec![0, 4, 3]], "[0, 4, 3] must increase from 0 to 3")]
    #[case(vec![vec![0, 4], vec![0, 5]], "[0, 5] must increase from 0 to 4")]
    #[case(vec![vec![1, 4]], "[1, 4] must increase from 0 to 4")]
    #[case(vec![vec![]], "[] must increase from 0 to 0")]
    fn bounds_that_are_none_are_refused(#[case] rows: Vec<Vec<usize>>, #[case] message: &str) {
        let error = PackedRows::new(rows).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }

    #[test]
    fn a_document_that_ranks_do_not_divide_is_refused() {
        let documents = PackedRows::new(vec![vec![0, 8, 18]]).unwrap();
        let error = documents.check(Zigzag::new(0, 2)).unwrap_err().to_string();
        assert!(
            error.contains("10 tokens at position 8 of row 0"),
            "{error}"
        );
    }
}
