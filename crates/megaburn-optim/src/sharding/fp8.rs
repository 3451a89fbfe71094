//! How weights in FP8 are sent.

use std::collections::BTreeMap;

use burn::Tensor;
use megaburn_collective::{CollectiveError, Lane, tensors};

use super::{Bucket, SentBucket, Sharding, fp8_params::Fp8Param};

impl Sharding {
    /// Sets the weights that [`Optimizer::step`](crate::Optimizer::step) sends in FP8 from now on, by
    /// path: of those whose state is sharded, the ones in bf16 that have an f32 master. Of others, the
    /// parameters are sent in their own type, as are all weights of a bucket that would not become
    /// smaller. Values are rounded on all ranks, so that copies stay equal, and the masters are not
    /// changed. With [`ShardingLevel::Parameters`](crate::ShardingLevel::Parameters) a rank keeps its
    /// own shard unrounded.
    ///
    /// # Collective
    /// All ranks that shard the parameters or hold parts of the weights, with the same paths.
    pub fn send_in_fp8(&self, params: BTreeMap<String, Fp8Param>) {
        self.0.fp8.set_next(params);
    }

    /// Whether the parameter at `path` is in FP8 since the last update.
    pub fn is_in_fp8(&self, path: &str) -> bool {
        self.sent_amax(path).is_some()
    }

    /// The largest magnitude of the parameter at `path` before it was rounded to FP8, if it was.
    pub(crate) fn sent_amax(&self, path: &str) -> Option<Tensor<1>> {
        self.0.fp8.sent_amax(path)
    }

    /// The parameter at `path` has values that were not rounded to FP8.
    pub(crate) fn forget_fp8(&self, path: &str) {
        self.0.fp8.forget(path);
    }

    /// Sends the shards of a bucket, of which this rank's is in `whole`, in the type of the
    /// parameters or, where `allows_fp8`, with weights in FP8. `whole` is written.
    ///
    /// # Collective
    /// All ranks that shard the bucket.
    pub(crate) fn send(
        &self,
        bucket: &Bucket,
        whole: Tensor<1>,
        allows_fp8: bool,
    ) -> Result<SentBucket, CollectiveError> {
        let group = self.replicas(bucket.kind).share();
        let fp8 = &self.0.fp8;
        let message = allows_fp8.then(|| fp8.message(bucket, group, (&whole, 0)));
        match message.transpose()?.flatten() {
            Some(message) => SentBucket::of_message(&message, group, whole),
            None => {
                let work = tensors::all_gather_in_place(whole, group, Lane::Overlapped)?;
                Ok(SentBucket::plain(work))
            }
        }
    }

    /// As [`put_share`](Self::put_share), for a shard that is sent with weights in FP8 where
    /// `allows_fp8`.
    ///
    /// # Collective
    /// All ranks that shard the bucket.
    pub(crate) fn put_updated_share(
        &self,
        bucket: &Bucket,
        share: Tensor<1>,
        allows_fp8: bool,
    ) -> Result<(), CollectiveError> {
        let group = self.replicas(bucket.kind).share();
        let start = self.shard_of(bucket).start;
        let fp8 = &self.0.fp8;
        let message = allows_fp8.then(|| fp8.message(bucket, group, (&share, start)));
        let message = message.transpose()?.flatten();
        if let Some(shares) = &self.0.shares {
            shares.put(&bucket.slots[0].path, share, message);
        }
        Ok(())
    }

    /// Sends the bucket as it is from now on, if its parameters are sharded. Returns whether they
    /// are.
    pub(crate) fn send_share_in_full(&self, bucket: &Bucket) -> bool {
        let shares = self.0.shares.as_ref();
        shares.is_some_and(|shares| shares.forget_message(&bucket.slots[0].path))
    }
}
