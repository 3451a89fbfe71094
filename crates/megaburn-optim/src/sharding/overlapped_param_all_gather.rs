use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use burn::Tensor;
use megaburn_autograd::MainGrad;

use super::{Bucket, SentBucket};

/// Updated parameters that are in flight from the ranks that updated them.
///
/// If the layers of all weights of a bucket announce their first use, the first of them to run
/// waits for the bucket, so that communication overlaps the layers before it. Any other bucket is
/// waited for at once.
///
/// Source: Megatron-LM `--overlap-param-gather`.
#[derive(Clone, Debug, Default)]
pub(super) struct ParamAllGather(Arc<Mutex<GatherState>>);

#[derive(Debug, Default)]
struct GatherState {
    /// All-gathers in flight, by the first parameter of their bucket.
    pending: BTreeMap<String, SentBucket>,
    /// For each weight whose layer announces its use, the first parameter of its bucket.
    first_of: BTreeMap<String, String>,
}

impl ParamAllGather {
    /// Lets layers wait for the buckets whose parameters are all in `weights`.
    pub(super) fn wait_on_use(&self, buckets: &[Bucket], weights: &BTreeMap<String, MainGrad>) {
        let tells = |bucket: &&Bucket| {
            bucket
                .slots
                .iter()
                .all(|slot| weights.contains_key(&slot.path))
        };
        for bucket in buckets.iter().filter(tells) {
            let first = &bucket.slots[0].path;
            for slot in &bucket.slots {
                self.lock()
                    .first_of
                    .insert(slot.path.clone(), first.clone());
                // A layer may outlive the optimizer.
                let state = Arc::downgrade(&self.0);
                let first = first.clone();
                weights[&slot.path].on_use(move || {
                    if let Some(state) = state.upgrade() {
                        Self(state).arrive(&first);
                    }
                });
            }
        }
    }

    /// The values of a bucket, which may still be in flight.
    pub(super) fn of(&self, bucket: &Bucket, started: SentBucket) -> Tensor<1> {
        let first = &bucket.slots[0].path;
        let mut state = self.lock();
        // If views needed a copy, it would be made before the values arrive.
        let is_cut_in_place = |values: &Tensor<1>| bucket.is_cut_in_place(values.dtype().size());
        let is_waited_for = state.first_of.contains_key(first);
        let values = started.peek().filter(is_cut_in_place);
        let Some(values) = values.filter(|_| is_waited_for) else {
            return started.wait();
        };
        state.pending.insert(first.clone(), started);
        values
    }

    fn arrive(&self, first: &str) {
        let started = self.lock().pending.remove(first);
        started.map(SentBucket::wait);
    }

    pub(super) fn settle(&self) {
        let pending = std::mem::take(&mut self.lock().pending);
        pending
            .into_values()
            .for_each(|started| drop(started.wait()));
    }

    fn lock(&self) -> MutexGuard<'_, GatherState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use megaburn_collective::{Group, Lane, tensors::all_gather};
    use megaburn_kernels::{LinearOptions, linear};

    use super::*;
    use crate::{sharding::ParamKind, testing::values};

    #[test]
    fn a_bucket_is_waited_for_by_the_layer_that_uses_it_and_others_at_once() {
        let params = [("a", 256), ("b", 256), ("c", 256), ("d", 100)];
        let params = params.map(|(path, len)| (path.to_string(), len));
        // The buckets are [a, b] and [c, d].
        let buckets = Bucket::fill(ParamKind::Dense, 0, params, 512, 1);
        let weights: BTreeMap<_, _> = ["a", "b", "c", "d"]
            .map(|path| (path.to_string(), MainGrad::default()))
            .into();
        let gathering = ParamAllGather::default();
        let gathered = |bucket: &Bucket| {
            let flat = Tensor::<1>::ones([bucket.len], &Device::flex());
            let started = all_gather(flat, &Group::single(0), Lane::Overlapped).unwrap();
            let started = SentBucket::plain(started);
            assert_eq!(values(gathering.of(bucket, started)), vec![1.0; bucket.len]);
            gathering.lock().pending.keys().cloned().collect::<Vec<_>>()
        };
        assert!(gathered(&buckets[0]).is_empty(), "no layer waits yet");
        gathering.wait_on_use(&buckets, &weights);
        assert_eq!(gathered(&buckets[0]), ["a"]);
        assert_eq!(
            gathered(&buckets[1]),
            ["a"],
            "d ends where memory cannot be cut"
        );
        let used = |path: &str| {
            let options = LinearOptions {
                main_grad: Some(weights[path].clone()),
                ..Default::default()
            };
            let x = Tensor::<2>::ones([1, 16], &Device::flex());
            linear(x, Tensor::ones([16, 16], &Device::flex()), None, options);
            gathering.lock().pending.len()
        };
        assert_eq!(used("c"), 1);
        assert_eq!(used("b"), 0);
        gathered(&buckets[0]);
        gathering.settle();
        assert!(gathering.lock().pending.is_empty());
    }
}
