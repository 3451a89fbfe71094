//! What depths of multi-token prediction read, and what they cost.

use std::{ops::Range, sync::Arc};

use burn::{prelude::Int, tensor::Tensor};

/// What one depth of [multi-token prediction](super::Mtp) reads, where the model itself reads tokens and is
/// asked for labels.
#[derive(Clone, Debug)]
pub struct MtpTargets {
    /// So many places on as the depth, `[S, B]`.
    pub tokens: Tensor<2, Int>,
    /// The ones after these, `[S, B]`; -100 does not count.
    pub labels: Tensor<2, Int>,
    /// Which tokens are [asked for something](megaburn_parallel::TokenContext::counted); none: all.
    pub counted: Option<Arc<[bool]>>,
}

/// The numbers of a row that stand `depth` places on, and `none` where that is not in the same document:
/// to be made of whole rows, before ranks share them out. A document is a stretch from one of `bounds` to
/// the next.
///
/// ```
/// use megaburn_models::decoder::shift_for_depth;
///
/// let (row, bounds) = ([1, 2, 3, 4, 5, 6], [0, 4, 6]);
/// assert_eq!(shift_for_depth(&row, &bounds, 1, -100), [2, 3, 4, -100, 6, -100]);
/// assert_eq!(shift_for_depth(&row, &bounds, 3, -100), [4, -100, -100, -100, -100, -100]);
/// ```
///
/// # Panics
/// If the documents are not those of the row.
pub fn shift_for_depth(row: &[i64], bounds: &[usize], depth: usize, none: i64) -> Vec<i64> {
    assert_eq!(
        (bounds.first(), bounds.last()),
        (Some(&0), Some(&row.len())),
        "documents of a row"
    );
    let of_document = |of: Range<usize>| {
        of.clone().map(move |at| {
            if at + depth < of.end {
                row[at + depth]
            } else {
                none
            }
        })
    };
    bounds
        .windows(2)
        .flat_map(|two| of_document(two[0]..two[1]))
        .collect()
}

/// Sums of losses of a micro-batch in nats, `[1]` each.
#[derive(Clone, Debug)]
pub struct StageLosses {
    /// Of the next tokens: the model's own.
    pub main: Tensor<1>,
    /// Of each depth.
    pub mtp: Vec<Tensor<1>>,
}

impl StageLosses {
    /// What is learnt from: the model's own, and `scaling_factor` times the mean of those of depths.
    pub fn total(&self, scaling_factor: f64) -> Tensor<1> {
        let part = scaling_factor / self.mtp.len().max(1) as f64;
        self.mtp
            .iter()
            .fold(self.main.clone(), |sum, loss| sum + loss.clone() * part)
    }

    /// The same without their graphs.
    #[must_use]
    pub fn inner(&self) -> Self {
        let mtp = self.mtp.iter().map(|loss| loss.clone().inner()).collect();
        Self {
            main: self.main.clone().inner(),
            mtp,
        }
    }
}
