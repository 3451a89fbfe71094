//! The three indices of a `GPTDataset`: which sequences are read one after another, where in them
//! each sample begins, and in which order the samples are used.
//!
//! Source: `_build_document_index` and `_build_shuffle_index` of `gpt_dataset.py`,
//! `build_sample_idx` of `helpers.cpp`.

use std::ops::Range;

use super::{epochs::Epochs, random::RandomState, sequences::SequenceRange};
use crate::{
    error::DataError,
    index_cache::{NpyShape, NpyType, NpyWriter, reserved},
};

/// What the indices depend on.
#[derive(Debug)]
pub(super) struct GptIndex<'a> {
    pub(super) source: &'a SequenceRange,
    pub(super) seq_len: u64,
    pub(super) seed: u32,
    pub(super) epochs: Epochs,
}

impl GptIndex<'_> {
    /// Names and shapes of the arrays.
    ///
    /// # Errors
    /// There are more sequences than Megatron-LM's integers can number.
    pub(super) fn arrays(&self) -> Result<[(&'static str, NpyShape); 3], DataError> {
        let num_sequences = self.source.dataset().num_sequences();
        if num_sequences > i32::MAX as u64 {
            let why = format!(
                "Megatron-LM numbers up to {} sequences, but `{}` has {num_sequences}; divide it",
                i32::MAX,
                self.source.dataset().prefix().display()
            );
            return Err(DataError::OrderSize { why });
        }
        // Both factors are below 2^31.
        let num_documents = self.epochs.num_epochs * self.num_sequences();
        let documents = NpyShape {
            of: NpyType::I32,
            rows: Some(num_documents),
            row_len: 1,
        };
        let samples = NpyShape {
            of: sample_type(num_documents),
            rows: Some(self.epochs.num_samples + 1),
            row_len: 2,
        };
        let shuffle = NpyShape {
            of: shuffle_type(self.epochs.num_samples),
            rows: Some(self.epochs.num_samples),
            row_len: 1,
        };
        Ok([
            ("document_index", documents),
            ("sample_index", samples),
            ("shuffle_index", shuffle),
        ])
    }

    /// Number of sequences of an epoch.
    fn num_sequences(&self) -> u64 {
        let sequences = self.source.sequences();
        sequences.end - sequences.start
    }

    /// Computes the arrays and writes them to `out`, in the order of [`arrays`](Self::arrays).
    ///
    /// Memory holds 4 bytes for each sequence and epoch and 4 for each sequence, and then, when
    /// these are dropped, 4 bytes for each sample (8 from 2^32 samples on).
    ///
    /// # Errors
    /// The data set cannot be read, or the files cannot be written. There is not enough memory.
    pub(super) fn write(&self, out: &mut [NpyWriter; 3]) -> Result<(), DataError> {
        let [documents_out, samples_out, shuffle_out] = out;
        let mut state = RandomState::new(self.seed);
        let documents = self.documents(&mut state)?;
        for document in &documents {
            documents_out.push(i64::from(*document))?;
        }
        self.write_samples(&documents, samples_out)?;
        drop(documents);
        let num_samples = self.epochs.num_samples;
        match shuffle_type(num_samples) {
            NpyType::U32 => self.write_shuffle(&mut state, |n| n as u32, shuffle_out),
            _ => self.write_shuffle(&mut state, |n| n as i64, shuffle_out),
        }
    }

    /// The numbers of the sequences in the order in which they are read.
    fn documents(&self, state: &mut RandomState) -> Result<Vec<i32>, DataError> {
        let num_epochs = self.epochs.num_epochs;
        let mut documents = reserved(num_epochs * self.num_sequences())?;
        for _ in 0..num_epochs {
            // `arrays` has checked that the numbers are in the range.
            documents.extend(self.source.sequences().clone().map(|n| n as i32));
        }
        let last_epoch = match self.epochs.separate_from {
            Some(_) => documents.len() - self.num_sequences() as usize,
            None => documents.len(),
        };
        let (first, last) = documents.split_at_mut(last_epoch);
        state.shuffle(first);
        state.shuffle(last);
        Ok(documents)
    }

    /// Writes where each sample begins: an index of `documents`, and the number of tokens before it
    /// in that sequence. Samples overlap by one token.
    fn write_samples(&self, documents: &[i32], out: &mut NpyWriter) -> Result<(), DataError> {
        let lengths = self.lengths()?;
        let first = self.source.sequences().start;
        let length = |at: usize| lengths[(documents[at] as u64 - first) as usize] as u64;
        let (mut at, mut offset) = (0, 0);
        for sample in 0..=self.epochs.num_samples {
            out.push(at as i64)?;
            out.push(offset as i64)?;
            if sample == self.epochs.num_samples {
                break;
            }
            // The sample after this one begins with the last of these tokens.
            let mut missing = self.seq_len + 1;
            while missing > length(at) - offset {
                missing -= length(at) - offset;
                (at, offset) = (at + 1, 0);
            }
            offset += missing - 1;
        }
        Ok(())
    }

    /// The lengths of the sequences of an epoch, which have as many tokens as the epochs were
    /// computed for.
    fn lengths(&self) -> Result<Vec<i32>, DataError> {
        let dataset = self.source.dataset();
        let mut lengths = reserved(self.num_sequences())?;
        let all = dataset.lengths_from(self.source.sequences().start);
        let mut num_tokens = 0;
        for length in all.take(self.num_sequences() as usize) {
            let length = length?;
            num_tokens += u64::try_from(length)
                .map_err(|_| dataset.bad(format!("a sequence has the length {length}")))?;
            lengths.push(length);
        }
        if num_tokens != self.epochs.num_tokens {
            let name = self.source.name();
            let expected = self.epochs.num_tokens;
            return Err(dataset.bad(format!(
                "{name} have {num_tokens} tokens by their lengths, and {expected} by their positions"
            )));
        }
        Ok(lengths)
    }

    /// Writes the numbers of the samples in the order in which they are used.
    fn write_shuffle<T: Copy + Into<i64>>(
        &self,
        state: &mut RandomState,
        number: impl Fn(u64) -> T,
        out: &mut NpyWriter,
    ) -> Result<(), DataError> {
        let num_samples = self.epochs.num_samples;
        let last_epoch = self.epochs.separate_from.unwrap_or(num_samples);
        let mut write = |range: Range<u64>| {
            let mut numbers = reserved(range.end - range.start)?;
            numbers.extend(range.map(&number));
            state.shuffle(&mut numbers);
            numbers
                .iter()
                .try_for_each(|number| out.push((*number).into()))
        };
        write(0..last_epoch)?;
        write(last_epoch..num_samples)
    }
}

/// The type of positions of samples, which number the sequences of all epochs.
fn sample_type(num_documents: u64) -> NpyType {
    match num_documents > i32::MAX as u64 {
        true => NpyType::I64,
        false => NpyType::I32,
    }
}

/// The type of the numbers of samples.
fn shuffle_type(num_samples: u64) -> NpyType {
    match num_samples >= u64::from(u32::MAX) - 1 {
        true => NpyType::I64,
        false => NpyType::U32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_those_of_megatron() {
        let most = i32::MAX as u64;
        assert_eq!(sample_type(most), NpyType::I32);
        assert_eq!(sample_type(most + 1), NpyType::I64);
        assert_eq!(shuffle_type(u64::from(u32::MAX) - 2), NpyType::U32);
        assert_eq!(shuffle_type(u64::from(u32::MAX) - 1), NpyType::I64);
    }
}
