//! Targets and losses of multi-token prediction.

use std::{ops::Range, sync::Arc};

use burn::{prelude::Int, tensor::Tensor};

/// The inputs and labels of one depth of [multi-token prediction](super::Mtp).
#[derive(Clone, Debug)]
pub struct MtpTargets {
    /// The tokens `depth` positions ahead, `[S, B]`.
    pub tokens: Tensor<2, Int>,
    /// The tokens after those, `[S, B]`; labels of -100 are ignored.
    pub labels: Tensor<2, Int>,
    /// Which tokens are [counted](megaburn_parallel::BatchContext::counted); `None` for all.
    pub counted: Option<Arc<[bool]>>,
}

/// Shifts a row left by `depth` positions; positions whose source is in another document become
/// `none`. It must be applied to full rows, before they are split over ranks. A document is the
/// range from one element of `bounds` to the next.
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
/// If `bounds` does not start at 0 and end at the length of the row.
pub fn shift_for_depth(row: &[i64], bounds: &[usize], depth: usize, none: i64) -> Vec<i64> {
    assert_eq!(
        (bounds.first(), bounds.last()),
        (Some(&0), Some(&row.len())),
        "the documents must cover the row"
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

/// The summed losses of a micro-batch in nats, `[1]` each.
#[derive(Clone, Debug)]
pub struct StageLosses {
    /// The model's own loss of its labels.
    pub main: Tensor<1>,
    /// The loss of each depth of multi-token prediction.
    pub mtp: Vec<Tensor<1>>,
    /// The loss of the binary head, summed over rows, if the batch has labels for it.
    pub binary: Option<Tensor<1>>,
}

impl StageLosses {
    /// The training loss: the model's own loss plus `scaling_factor` times the mean of the losses
    /// of all depths, plus `binary_factor` times the loss of the binary head.
    pub fn total(&self, scaling_factor: f64, binary_factor: f64) -> Tensor<1> {
        let part = scaling_factor / self.mtp.len().max(1) as f64;
        let depths = self.mtp.iter().map(|loss| loss.clone() * part);
        let binary = self.binary.iter().map(|loss| loss.clone() * binary_factor);
        depths
            .chain(binary)
            .fold(self.main.clone(), |sum, loss| sum + loss)
    }

    /// The same losses, detached from their autodiff graphs.
    #[must_use]
    pub fn inner(&self) -> Self {
        let mtp = self.mtp.iter().map(|loss| loss.clone().inner()).collect();
        Self {
            main: self.main.clone().inner(),
            mtp,
            binary: self.binary.as_ref().map(|loss| loss.clone().inner()),
        }
    }
}
