/// How a part of a tensor is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SliceMode {
    /// A view, which keeps the memory of the full tensor alive.
    View,
    /// A copy, which holds only its own memory: for a part that outlives the others.
    Copy,
}
