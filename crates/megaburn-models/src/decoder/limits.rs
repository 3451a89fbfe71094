//! Sizes beyond which a configuration is a mistake.

/// Larger sizes are mistakes, and their products could overflow.
pub(crate) const LARGEST: usize = 1 << 30;
/// More layers are a mistake, and lists of them would fill the memory.
pub(crate) const MOST_LAYERS: usize = 10_000;
/// More experts in all layers are a mistake, and a list of them would fill the memory.
pub(super) const MOST_EXPERTS: usize = 1 << 20;
/// More parameters in the full model are a mistake. Up to this number, their bytes in any type fit
/// a `u64`.
pub(super) const MOST_PARAMS: f64 = (1u64 << 58) as f64;
