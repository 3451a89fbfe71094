use megaburn_autograd::MainGrad;

/// How [`embedding`](crate::embedding) reads its table and where the gradient of the table goes.
#[derive(Clone, Debug, Default)]
pub struct EmbeddingOptions {
    /// The id of the table's first row if the table is a shard of a longer one; ids of other shards
    /// give zeros. With `None` the table is unsharded, and every id must have a row.
    pub first: Option<usize>,
    /// Accumulates the gradient of the table, once attached. With `None` the gradient is an
    /// ordinary one.
    pub main_grad: Option<MainGrad>,
}
