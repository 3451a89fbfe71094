use std::ops::Range;
use std::path::{Path, PathBuf};

use serde_json::json;

use super::{IndexedDataset, merge::copy, with_ending};
use crate::{
    error::DataError,
    part::{Opened, Output, Part, check_replaceable},
};

/// The parts of a data set, by name.
const PARTS: [&str; 3] = ["train", "valid", "test"];

/// Ranges of the documents of a data set for training, validation and test.
///
/// ```
/// let split = megaburn_data::DocumentSplit::new(&[969.0, 30.0, 1.0], 1000)?;
/// assert_eq!(split.documents()[1], 969..999);
/// # Ok::<(), megaburn_data::DataError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DocumentSplit([Range<u64>; 3]);

impl DocumentSplit {
    /// Divides documents by weights of training, validation and test. Weights that are not given
    /// are 0. The rounding is that of Megatron-LM's `--split`, which divides sequences: the parts
    /// are the same if every document is one sequence.
    ///
    /// # Errors
    /// A weight is negative or not finite, all are 0, there are more than three, or a part whose
    /// weight is positive would have no documents.
    pub fn new(weights: &[f64], num_documents: u64) -> Result<Self, DataError> {
        let bad = |why: String| DataError::Split {
            weights: weights.to_vec(),
            why,
        };
        if weights.len() > PARTS.len() {
            return Err(bad("there are more than three weights".into()));
        }
        if let Some(weight) = weights.iter().find(|w| !(w.is_finite() && **w >= 0.0)) {
            return Err(bad(format!("{weight} is not a weight")));
        }
        let sum: f64 = weights.iter().sum();
        if sum <= 0.0 || !sum.is_finite() {
            return Err(bad("the sum of the weights is not positive".into()));
        }
        // Megatron-LM adds the fractions up in this order, and Python rounds halves to even.
        let mut end = 0.0;
        let mut ends = [0; 3];
        for (index, at) in ends.iter_mut().enumerate() {
            end += weights.get(index).copied().unwrap_or(0.0) / sum;
            *at = ((end * num_documents as f64).round_ties_even() as u64).min(num_documents);
        }
        let parts = [0..ends[0], ends[0]..ends[1], ends[1]..ends[2]];
        for ((part, name), weight) in parts.iter().zip(PARTS).zip(weights) {
            if *weight > 0.0 && part.is_empty() {
                return Err(DataError::EmptyPart {
                    name,
                    why: format!("none of the {num_documents} documents"),
                });
            }
        }
        Ok(Self(parts))
    }

    /// The documents of training, validation and test.
    pub fn documents(&self) -> &[Range<u64>; 3] {
        &self.0
    }
}

/// Writes the parts of a data set as data sets of their own: `OUT_train`, `OUT_valid` and
/// `OUT_test`, of which those without documents are left out; with `force` an earlier one of that
/// name is removed. Returns their prefixes.
///
/// # Errors
/// The data set is damaged, or a part would have no tokens. One of the three parts exists, also one
/// that is left out, and `force` is not set or another program wrote it. A file cannot be read or
/// written.
pub fn split(
    set: &IndexedDataset,
    parts: &DocumentSplit,
    out: &Path,
    force: bool,
) -> Result<Vec<PathBuf>, DataError> {
    set.check()?;
    let named = PARTS.into_iter().zip(parts.documents());
    let named: Vec<_> = named
        .filter(|(_, documents)| !documents.is_empty())
        .collect();
    for &(name, documents) in &named {
        let at = |document| set.bytes_before(set.sequences_before(document)?);
        if at(documents.start)? == at(documents.end)? {
            return Err(DataError::EmptyPart {
                name,
                why: format!("only documents {documents:?}, which have no tokens"),
            });
        }
    }
    let prefix = |name: &str| with_ending(out, &format!("_{name}"));
    // A part of an earlier split has documents that are in another part now.
    let is_left_out = |part: &&str| named.iter().all(|(name, _)| name != part);
    let others = PARTS.into_iter().filter(is_left_out);
    let others: Vec<PathBuf> = others.map(prefix).collect();
    for other in &others {
        check_replaceable(other, force)?;
    }
    let prefixes: Vec<PathBuf> = named.iter().map(|(name, _)| prefix(name)).collect();
    let outputs: Vec<_> = prefixes
        .iter()
        .map(|p| (p.clone(), set.token_type()))
        .collect();
    let ranges: Vec<_> = named.iter().map(|(_, d)| json!([d.start, d.end])).collect();
    let from = set.prefix().display().to_string();
    let identity = json!({"command": "split", "from": set.identity()?, "documents": ranges});
    let tokenizer = set.description().map(|d| d["tokenizer"].clone());
    let describe = |output: &Output| {
        let index = prefixes.iter().position(|prefix| prefix == output.prefix());
        let documents = index.map(|index| ranges[index].clone());
        json!({
            "command": "split",
            "from": from,
            "documents": documents,
            "tokenizer": tokenizer,
        })
    };
    let complete = match Part::open(out, &outputs, identity, force)? {
        Opened::Complete(part) => part,
        Opened::Writing(mut part) => {
            for ((_, documents), output) in named.iter().zip(part.outputs()) {
                copy(set, (*documents).clone(), output)?;
            }
            part.complete(json!(null), describe)?
        }
    };
    let superseded = if force { others } else { Vec::new() };
    complete.with_superseded(superseded).commit()?;
    Ok(prefixes)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(&[969.0, 30.0, 1.0], 1000, [0..969, 969..999, 999..1000])]
    #[case(&[1.0], 3, [0..3, 3..3, 3..3])]
    #[case(&[99.0, 1.0], 50, [0..50, 50..50, 50..50])]
    #[case(&[0.5, 0.0, 0.5], 5, [0..2, 2..2, 2..5])]
    fn documents_are_divided_as_megatron_does(
        #[case] weights: &[f64],
        #[case] num_documents: u64,
        #[case] expected: [Range<u64>; 3],
    ) {
        let found = DocumentSplit::new(weights, num_documents);
        match found {
            Ok(split) => assert_eq!(split.documents(), &expected),
            Err(error) => assert!(error.to_string().contains("part valid would have none")),
        }
    }

    #[rstest]
    #[case(&[1.0, -1.0], 9, "-1 is not a weight")]
    #[case(&[f64::NAN], 9, "NaN is not a weight")]
    #[case(&[0.0, 0.0], 9, "the sum of the weights is not positive")]
    #[case(&[], 9, "the sum of the weights is not positive")]
    #[case(&[1.0, 1.0, 1.0, 1.0], 9, "more than three weights")]
    #[case(&[99.0, 1.0], 10, "the part valid would have none of the 10 documents")]
    #[case(&[1.0], 0, "the part train would have none of the 0 documents")]
    fn weights_that_cannot_be_are_refused(
        #[case] weights: &[f64],
        #[case] num_documents: u64,
        #[case] why: &str,
    ) {
        let error = DocumentSplit::new(weights, num_documents)
            .unwrap_err()
            .to_string();
        assert!(error.contains(why), "{error}");
    }
}
