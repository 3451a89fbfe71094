use thiserror::Error;

/// Why an operation's configuration cannot be.
///
/// Shapes that do not fit are programming errors and panic, as Burn's own operations do.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum KernelError {
    #[error(
        "rotary embedding of heads of size {head_dim}: the size must be even and not zero, because its first half is rotated with its second"
    )]
    RopeHeadDim { head_dim: usize },
    #[error("rotary embedding: {name} is {value}, it must be a finite number above {above}")]
    RopeParameter { name: &'static str, value: f64, above: f64 },
}
