use burn::Tensor;
use megaburn_collective::{
    CollectiveError, Group, Lane,
    tensors::{self, Work},
};

use super::fp8_message::Fp8Message;

/// A bucket that is in flight from the ranks that hold its shards.
#[derive(Debug)]
pub(crate) struct SentBucket {
    /// The values, or the messages of all ranks.
    work: Work<Tensor<1>>,
    fp8: Option<Box<Fp8InFlight>>,
}

/// An all-gather of weights in FP8 that is not finished: how its messages are read, and the buffer
/// that gets the values.
#[derive(Debug)]
struct Fp8InFlight {
    message: Fp8Message,
    whole: Tensor<1>,
}

impl SentBucket {
    /// A bucket that is sent in the type of the parameters.
    pub(super) fn plain(work: Work<Tensor<1>>) -> Self {
        Self { work, fp8: None }
    }

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
        let fp8 = Some(Box::new(Fp8InFlight { message, whole }));
        Ok(Self { work, fp8 })
    }

    /// The values before they have arrived, to be read after [`wait`](Self::wait); `None` if they
    /// will be in other memory.
    pub(super) fn peek(&self) -> Option<Tensor<1>> {
        match &self.fp8 {
            None => Some(self.work.peek()),
            Some(sent) => {
                let is_in_place = sent.message.is_in_place(&sent.whole);
                is_in_place.then(|| sent.whole.clone())
            }
        }
    }

    /// The values. On a GPU, kernels enqueued from now on wait for them; the host does not.
    pub(super) fn wait(self) -> Tensor<1> {
        let arrived = self.work.wait();
        match self.fp8 {
            None => arrived,
            Some(sent) => sent.message.unpacked(arrived, sent.whole),
        }
    }
}
