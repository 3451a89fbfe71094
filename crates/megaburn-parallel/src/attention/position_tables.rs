use burn::tensor::Tensor;
use megaburn_kernels::RopeTable;

use super::AlibiKeys;

/// What tells attention the positions of its tokens; nothing by default.
#[derive(Clone, Copy, Debug, Default)]
pub struct PositionTables<'a> {
    /// Rotates queries and keys.
    pub rope: Option<&'a RopeTable>,
    /// The positions of keys for [ALiBi](super::Alibi), which a layer that has it needs.
    pub alibi: Option<&'a AlibiKeys>,
    /// The bias of the pass by distance, from [`RelativeBias::forward`](super::RelativeBias::forward)
    /// for at least as many positions as the longest sequence has; a layer with
    /// `relative_bias` needs it.
    pub relative: Option<&'a Tensor<3>>,
}

impl<'a> From<Option<&'a RopeTable>> for PositionTables<'a> {
    fn from(rope: Option<&'a RopeTable>) -> Self {
        Self {
            rope,
            ..Self::default()
        }
    }
}
