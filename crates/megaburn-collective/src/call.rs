use std::fmt;

use burn::tensor::DType;
use serde::{Deserialize, Serialize};

/// How members' values are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ReduceOp {
    /// The sum, in rank order.
    Sum,
    /// The largest value; NaN if any member has NaN.
    Max,
    /// The sum divided by the number of members.
    Mean,
}

/// What the members of a group do together. Ranks that meet with different ones have a bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each variant is named after its collective")]
pub enum Collective {
    AllReduce(ReduceOp),
    AllGather,
    ReduceScatter(ReduceOp),
    AllToAll,
    Broadcast { root: usize },
    Send,
    Shift { by: isize },
    Barrier,
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sum => "sum",
            Self::Max => "max",
            Self::Mean => "mean",
        })
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AllReduce(op) => write!(f, "all_reduce({op})"),
            Self::AllGather => f.write_str("all_gather"),
            Self::ReduceScatter(op) => write!(f, "reduce_scatter({op})"),
            Self::AllToAll => f.write_str("all_to_all"),
            Self::Broadcast { root } => write!(f, "broadcast(from member {root})"),
            Self::Send => f.write_str("send/recv"),
            Self::Shift { by } => write!(f, "ring_shift(by {by})"),
            Self::Barrier => f.write_str("barrier"),
        }
    }
}

/// One collective call of one rank, which its peers compare with theirs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// What is done.
    pub op: Collective,
    /// How many calls this group (for send/recv: this pair) made before.
    pub seq: u64,
    /// Element type.
    pub dtype: DType,
    /// Shape of this rank's contribution.
    pub shape: Vec<usize>,
}

impl Call {
    /// Whether two ranks may meet in these calls. Shapes must agree, except for operations whose
    /// contributions may differ by rank.
    pub fn agrees(&self, other: &Call) -> bool {
        (self.op, self.seq, self.dtype) == (other.op, other.seq, other.dtype)
            && (self.any_shape() || self.shape == other.shape)
    }

    /// Whether the shape of the contribution may differ by rank.
    pub(crate) fn any_shape(&self) -> bool {
        matches!(self.op, Collective::AllToAll | Collective::Send)
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            op,
            seq,
            dtype,
            shape,
        } = self;
        write!(f, "{op} #{seq} of {dtype:?} {shape:?}")
    }
}
