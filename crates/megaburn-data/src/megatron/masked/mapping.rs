//! Which sentences each sample has.
//!
//! Source: `build_mapping` of `helpers.cpp`.

use std::ops::Range;

use rand_mt::{Mt, Mt64};

use crate::{
    error::DataError,
    index_cache::{NpyShape, NpyType, NpyWriter, reserved},
    megatron::documents::DocumentRange,
};

/// A document with a sentence of more tokens is left out, unless it is the only sentence.
const LONGEST_SENTENCE: i32 = 512;
/// The number of times that documents are read at most.
const MOST_EPOCHS: u64 = i32::MAX as u64 - 1;

/// What the mapping depends on.
#[derive(Debug)]
pub(super) struct Mapping<'a> {
    pub(super) source: &'a DocumentRange,
    /// The number of tokens that a sample has if it is not short, at least 2.
    pub(super) target_len: u32,
    /// One of this number of samples is short; 0 for none.
    pub(super) short_ratio: u32,
    pub(super) min_sentences: u64,
    pub(super) seed: u32,
    /// Documents are read until they give this number of samples; `None` for one epoch.
    pub(super) num_samples: Option<u64>,
}

/// The documents that samples are made of: ranges of the lengths.
struct Sentences {
    /// The number of the first sentence.
    first: u64,
    lengths: Vec<i32>,
    documents: Vec<Range<usize>>,
}

impl Mapping<'_> {
    /// Name and shape of the array: the first sentence of each sample, the one after its last, and
    /// the number of tokens that it is to have.
    pub(super) fn array(&self) -> (&'static str, NpyShape) {
        let shape = NpyShape {
            of: self.number_type(),
            rows: None,
            row_len: 3,
        };
        ("sample_index", shape)
    }

    fn number_type(&self) -> NpyType {
        match self.source.dataset().num_sequences() > u64::from(u32::MAX) {
            true => NpyType::U64,
            false => NpyType::U32,
        }
    }

    /// Computes and writes the array.
    ///
    /// # Errors
    /// No document has enough sentences, there is not enough memory, or files cannot be read or
    /// written.
    pub(super) fn write(&self, out: &mut NpyWriter) -> Result<(), DataError> {
        match self.number_type() {
            NpyType::U32 => self.write_as(|number| number as u32, out),
            _ => self.write_as(|number| number, out),
        }
    }

    fn write_as<T: Copy + Into<u64>>(
        &self,
        number: impl Fn(u64) -> T,
        out: &mut NpyWriter,
    ) -> Result<(), DataError> {
        // More samples than memory holds are an error before they are counted.
        drop(reserved::<[T; 3]>(self.num_samples.unwrap_or(0))?);
        let sentences = self.sentences()?;
        let mut num_rows = 0;
        self.walk(&sentences, |_| num_rows += 1);
        let mut rows = reserved(num_rows)?;
        self.walk(&sentences, |row| rows.push(row.map(&number)));
        let mut random = Mt64::new(u64::from(self.seed) + 1);
        for last in (1..rows.len()).rev() {
            // The number is at most `last`, which is a `usize`.
            rows.swap(last, (random.next_u64() % (last as u64 + 1)) as usize);
        }
        let numbers = rows.iter().flatten();
        numbers
            .map(|number| (*number).into())
            .try_for_each(|number| out.push(number as i64))
    }

    /// Calls `emit` with each sample, in the order of the documents.
    fn walk(&self, sentences: &Sentences, mut emit: impl FnMut([u64; 3])) {
        let mut random = Mt::new(self.seed);
        let mut num_emitted = 0;
        for epoch in 0..MOST_EPOCHS {
            match self.num_samples {
                Some(num_samples) if num_emitted >= num_samples => return,
                None if epoch > 0 => return,
                _ => {}
            }
            for document in &sentences.documents {
                let mut target = self.target(&mut random);
                let mut begin = document.start;
                let mut num_tokens = 0;
                for sentence in document.clone() {
                    num_tokens += u64::from(sentences.lengths[sentence].unsigned_abs());
                    let num_read = (sentence + 1 - begin) as u64;
                    let num_left = document.end - sentence - 1;
                    let is_full =
                        num_tokens >= target && num_left > 1 && num_read >= self.min_sentences;
                    if is_full || num_left == 0 {
                        let number = |at: usize| sentences.first + at as u64;
                        emit([number(begin), number(sentence + 1), target]);
                        num_emitted += 1;
                        (begin, num_tokens) = (sentence + 1, 0);
                        target = self.target(&mut random);
                    }
                }
            }
        }
    }

    /// The number of tokens that the next sample is to have.
    fn target(&self, random: &mut Mt) -> u64 {
        let longest = u64::from(self.target_len);
        if self.short_ratio == 0 {
            return longest;
        }
        let drawn = random.next_u32();
        match drawn.is_multiple_of(self.short_ratio) {
            true => 2 + u64::from(drawn) % (longest - 1),
            false => longest,
        }
    }

    fn sentences(&self) -> Result<Sentences, DataError> {
        let dataset = self.source.dataset();
        let Range { start: first, end } = self.source.sentences()?;
        let mut lengths = reserved(end - first)?;
        for length in dataset.lengths_from(first).take((end - first) as usize) {
            let length = length?;
            if length < 0 {
                return Err(dataset.bad(format!("a sentence has the length {length}")));
            }
            lengths.push(length);
        }
        let numbers = self.source.documents();
        let mut documents = reserved(numbers.end - numbers.start)?;
        let mut begin = 0;
        let ends = dataset.document_ends_from(numbers.start);
        for end in ends.take((numbers.end - numbers.start) as usize) {
            let end = end?;
            let at = usize::try_from(end - first as i64).ok();
            let at = at.filter(|at| (begin..=lengths.len()).contains(at));
            let at = at.ok_or_else(|| {
                let begin = begin as u64 + first;
                dataset.bad(format!(
                    "a document that begins at sentence {begin} ends at {end}"
                ))
            })?;
            documents.push(begin..at);
            begin = at;
        }
        documents.retain(|document: &Range<usize>| {
            let is_long = |length: &i32| *length > LONGEST_SENTENCE;
            let has_long = document.len() > 1 && lengths[document.clone()].iter().any(is_long);
            document.len() as u64 >= self.min_sentences && !has_long
        });
        if documents.is_empty() {
            return Err(DataError::MaskedSamples {
                why: format!(
                    "none of the {} documents of {} has {} or more sentences, of up to \
                    {LONGEST_SENTENCE} tokens each; encode texts of several sentences with \
                    `megaburn data preprocess --split-sentences`",
                    numbers.end - numbers.start,
                    self.source.name(),
                    self.min_sentences,
                ),
            });
        }
        Ok(Sentences {
            first,
            lengths,
            documents,
        })
    }
}
