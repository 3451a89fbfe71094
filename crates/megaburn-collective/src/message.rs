use std::{ops::Range, sync::Arc};

use burn::tensor::Bytes;

use crate::call::Call;

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
