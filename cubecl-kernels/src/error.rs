use thiserror::Error;

/// Why the configuration of an operation is invalid.
///
/// Shapes that do not fit are programming errors and panic, as in Burn's own operations.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "the error message of each variant describes its fields"
)]
pub enum KernelError {
    #[error(
        "rotary embedding rotates {rotated} elements (rotary_percent {rotary_percent} of \
        head_dim {head_dim}): the number must be even, from 2 to head_dim, because elements are \
        rotated in pairs"
    )]
    RopeHeadDim {
        head_dim: usize,
        rotary_percent: f64,
        rotated: usize,
    },
    #[error(
        "rotary embedding: the sequences of a batch have {lengths:?} positions: there must be at \
        least one sequence, all of the same length"
    )]
    RopeSequences { lengths: Vec<usize> },
    #[error("packed sequence: cu_seqlens {cu_seqlens:?} must begin with 0 and not decrease")]
    PackedLengths { cu_seqlens: Vec<usize> },
    #[error(
        "rotary embedding: {name} is {value}, but must be a finite number greater than \
            {above}"
    )]
    RopeParameter {
        name: &'static str,
        value: f64,
        above: f64,
    },
    #[error(
        "rotary embedding: {name} has {found} elements for {pairs} pairs of rotated elements: give \
        one for each pair"
    )]
    RopeFactors {
        name: &'static str,
        found: usize,
        pairs: usize,
    },
}
