use burn::Tensor;
use megaburn_collective::{
    CollectiveError, Group, Lane,
    tensors::{self, Work},
};

use super::fp8_message::Fp8Message;

/// A bucket that is in flight from the ranks that hold its shards.
#[derive(Debug)]
pub(crate) enum SentBucket {
    /// In the type of the parameters.
    Plain(Work<Tensor<1>>),
    /// With weights in FP8.
    Fp8 {
        /// The messages of all ranks.
        work: Work<Tensor<1>>,
        message: Fp8Message,
        /// The buffer of the values.
        whole: Tensor<1>,
    },
}

impl SentBucket {
    /// Sends a message with weights in FP8. The values of the bucket will be written to `whole`.
    ///
    /// # Collective
    /// All members of `group`, which share the bucket.
    pub(super) fn of_message(
        message: &Fp8Message,
        group: &Group,
        whole: Tensor<1>,
    ) -> Result<Self, CollectiveError> {
        let work = tensors::all_gather(message.own().clone(), group, Lane::Overlapped)?;
        let message = message.without_own();
        Ok(Self::Fp8 {
            work,
            message,
            whole,
        })
    }

    /// The values before they have arrived, to be read after [`wait`](Self::wait); `None` if they
    /// will be in other memory.
    pub(super) fn peek(&self) -> Option<Tensor<1>> {
        match self {
            Self::Plain(work) => Some(work.peek()),
            Self::Fp8 { message, whole, .. } => message.is_in_place(whole).then(|| whole.clone()),
        }
    }

    /// The values. On a GPU, kernels enqueued from now on wait for them; the host does not.
    pub(super) fn wait(self) -> Tensor<1> {
        match self {
            Self::Plain(work) => work.wait(),
            Self::Fp8 {
                work,
                message,
                whole,
            } => message.unpacked(work.wait(), whole),
        }
    }
}
