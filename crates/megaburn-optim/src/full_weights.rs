//! Weights that were sent in FP8, again in bf16.

use std::collections::BTreeMap;

use burn::{Tensor, module::Module, tensor::DType};
use megaburn_collective::{Lane, tensors};

use crate::{error::OptimError, leaf::put, optimizer::Optimizer, sharding::Bucket};

impl Optimizer {
    /// Whether weights may be sent in FP8: bf16 parameters whose masters are stored in f32. Without
    /// that, what the update continues from would be rounded.
    pub(crate) fn allows_fp8_params(&self) -> bool {
        self.has_master(DType::BF16) && !self.keeps_remainder(DType::BF16)
    }

    /// Sends weights in bf16 that the last update sent in FP8
    /// ([`Sharding::send_in_fp8`](crate::Sharding::send_in_fp8)): those for which `is_wanted`, and
    /// the others of their buckets. They have the values then that they would have without FP8, up
    /// to the next update.
    ///
    /// # Errors
    /// See [`megaburn_collective::CollectiveError`]; the module is lost then.
    /// # Collective
    /// All ranks that shard the parameters, with the same paths.
    pub fn send_in_full<M: Module>(
        &self,
        module: M,
        is_wanted: impl Fn(&str) -> bool,
    ) -> Result<M, OptimError> {
        let sharding = &self.sharding;
        sharding.settle();
        let mut new = BTreeMap::new();
        for bucket in sharding.buckets().iter().rev() {
            let paths = || bucket.slots.iter().map(|slot| &slot.path);
            if !paths().any(|path| sharding.is_in_fp8(path) && is_wanted(path)) {
                continue;
            }
            if !sharding.send_share_in_full(bucket) {
                let group = sharding.replicas(bucket.kind).share();
                let whole = tensors::all_gather(self.share(bucket), group, Lane::InOrder)?.wait();
                for slot in &bucket.slots {
                    let value = whole.clone().narrow(0, slot.start, slot.len);
                    new.insert(slot.path.clone(), value);
                }
            }
            paths().for_each(|path| sharding.forget_fp8(path));
        }
        Ok(put(module, |path| Some((None, new.remove(path)?))))
    }

    /// This rank's shard of a bucket of bf16 parameters, rounded from its masters.
    fn share(&self, bucket: &Bucket) -> Tensor<1> {
        let sharding = &self.sharding;
        let part = |path: &str| {
            let unused = || unreachable!("masters are in f32 where weights are sent in FP8");
            let master = self.master(path, unused);
            master.expect("every parameter of the bucket has a master")
        };
        let device = part(&bucket.slots[0].path).device();
        let zeros = |len| Tensor::zeros([len], (&device, DType::BF16));
        let range = sharding.shard_of(bucket);
        bucket.join(range, |slot, _| part(&slot.path).cast(DType::BF16), zeros)
    }
}
