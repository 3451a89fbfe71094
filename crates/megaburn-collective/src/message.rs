use std::{fmt, ops::Range, sync::Arc};

use burn::tensor::{Bytes, DType};
use serde::{Deserialize, Serialize};

/// The operation of a collective. Ranks that meet with different operations have a bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each variant is named after its collective")]
pub enum OpKind {
    AllReduceSum,
    AllReduceMax,
    AllReduceMean,
    AllGather,
    ReduceScatterSum,
    ReduceScatterMax,
    ReduceScatterMean,
    AllToAll,
    Broadcast { root: usize },
    Send,
    Shift { by: isize },
    Barrier,
}

impl fmt::Display for OpKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::AllReduceSum => "all_reduce(sum)",
            Self::AllReduceMax => "all_reduce(max)",
            Self::AllReduceMean => "all_reduce(mean)",
            Self::AllGather => "all_gather",
            Self::ReduceScatterSum => "reduce_scatter(sum)",
            Self::ReduceScatterMax => "reduce_scatter(max)",
            Self::ReduceScatterMean => "reduce_scatter(mean)",
            Self::AllToAll => "all_to_all",
            Self::Broadcast { root } => return write!(f, "broadcast(from member {root})"),
            Self::Send => "send/recv",
            Self::Shift { by } => return write!(f, "ring_shift(by {by})"),
            Self::Barrier => "barrier",
        };
        f.write_str(name)
    }
}

/// One collective call of one rank, which its peers compare with theirs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// The operation.
    pub op: OpKind,
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
    pub(crate) fn agrees(&self, other: &Call) -> bool {
        (self.op, self.seq, self.dtype) == (other.op, other.seq, other.dtype)
            && (self.any_shape() || self.shape == other.shape)
    }

    /// Whether the shape of the contribution may differ by rank.
    pub(crate) fn any_shape(&self) -> bool {
        matches!(self.op, OpKind::AllToAll | OpKind::Send)
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

/// Bytes that several receivers may share without a copy.
#[derive(Clone, Debug)]
pub(crate) struct Payload {
    owner: Arc<Bytes>,
    range: Range<usize>,
}

impl Payload {
    pub(crate) fn new(bytes: Bytes) -> Self {
        let range = 0..bytes.len();
        Self {
            owner: Arc::new(bytes),
            range,
        }
    }

    pub(crate) fn empty() -> Self {
        Self::new(Bytes::from_bytes_vec(Vec::new()))
    }

    /// The part `range` of this payload, sharing its memory.
    pub(crate) fn slice(&self, range: Range<usize>) -> Self {
        let range = self.range.start + range.start..self.range.start + range.end;
        assert!(
            range.end <= self.range.end,
            "slice past the end of a payload"
        );
        Self {
            owner: self.owner.clone(),
            range,
        }
    }

    /// The bytes.
    pub(crate) fn as_slice(&self) -> &[u8] {
        &self.owner[self.range.clone()]
    }

    /// The bytes, without a copy if this is the only owner and covers the full buffer.
    pub(crate) fn into_bytes(self) -> Bytes {
        if self.range == (0..self.owner.len()) {
            return Arc::try_unwrap(self.owner).unwrap_or_else(|shared| (*shared).clone());
        }
        Bytes::from_bytes_vec(self.as_slice().to_vec())
    }
}

/// A message from one rank to another: the sender's call and its contribution.
#[derive(Clone, Debug)]
pub(crate) struct Message {
    /// What the sender called.
    pub call: Call,
    /// What it sends to this receiver.
    pub payload: Payload,
}
