use thiserror::Error;

/// Why the configuration of an operation is invalid.
///
/// Shapes that do not fit are programming errors and panic, as in Burn's own operations.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "the message of each variant says what its fields are"
)]
pub enum KernelError {
    #[error(
        "rotary embedding of the part {rotary_percent} of a head's {head_dim} elements, {rotated} of them: it must be an even number, not zero and not above the head's, because they are rotated in pairs"
    )]
    RopeHeadDim {
        head_dim: usize,
        rotary_percent: f64,
        rotated: usize,
    },
    #[error(
        "rotary embedding: the sequences of a batch have {lengths:?} positions, they must be one or more and as long"
    )]
    RopeSequences { lengths: Vec<usize> },
    #[error(
        "packed sequence: documents end at {cu_seqlens:?}, which must begin with 0 and not descend"
    )]
    PackedLengths { cu_seqlens: Vec<usize> },
    #[error("rotary embedding: {name} is {value}, it must be a finite number above {above}")]
    RopeParameter {
        name: &'static str,
        value: f64,
        above: f64,
    },
}
