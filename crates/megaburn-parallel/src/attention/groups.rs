use megaburn_collective::Group;

use crate::context::ContextParallel;

/// The groups over which a layer of attention is split.
#[derive(Clone, Debug)]
pub struct AttentionGroups {
    /// The ranks over which the heads are split.
    pub tp: Group,
    /// The ranks that share each sequence: each holds two [chunks](megaburn_mesh::Zigzag) of it,
    /// and they exchange keys and values (of heads, not latents) as
    /// [`ContextComm`](crate::ContextComm) says.
    pub cp: ContextParallel,
}

/// Every rank holds full sequences.
impl From<&Group> for AttentionGroups {
    fn from(tp: &Group) -> Self {
        Self {
            tp: tp.clone(),
            cp: ContextParallel::none(),
        }
    }
}
