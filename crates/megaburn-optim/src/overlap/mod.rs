use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use burn::{
    Tensor,
    tensor::{DType, Device},
};
use megaburn_collective::CollectiveError;
use megaburn_kernels::{MainGrad, bucket_slice, is_on_gpu, is_view_of};
use megaburn_mesh::ParamSpec;

use crate::{
    reduce::{has_padding, without_padding},
    sharding::{Bucket, GradReduceQueue, Sharding, Slot},
};

/// Starts to sum a bucket over ranks inside the backward that gives its last gradient, so that it is on
/// its way while backward goes on.
///
/// On GPUs the bucket is there already then: layers sum where it will be sent from. A few are on their way
/// at a time, whose memory is taken.
///
/// Only in the order of a stage's buckets, whatever order gradients come in, and of a rank's stages
/// as their backwards come: all ranks send the same. How many gradients a layer's weight gets in a
/// backward is counted in the first one that gives it any, in which nothing is sent. A stage of a
/// pipeline has a backward of its own for its weights, or two, one of which gives nothing but
/// theirs.
///
/// Source: Megatron-LM `--overlap-grad-reduce`.
#[derive(Clone, Debug)]
pub(crate) struct Overlap(Arc<Mutex<OverlapState>>);

#[derive(Debug)]
struct OverlapState {
    sharding: Sharding,
    /// Weights whose layers sum their gradients, by path.
    direct: BTreeMap<String, BucketGrad>,
    /// Where they are.
    device: Device,
    /// Whether what this backward gives completes sums.
    is_last: bool,
    /// On GPUs, of buckets that get their gradients, by their first parameter.
    buffers: BTreeMap<String, Tensor<1>>,
    /// Weights that were given room there: once, or a sum that somebody took would be written over.
    given: BTreeSet<String>,
    sums: GradReduceQueue,
    /// Which buckets these are of.
    started: Vec<usize>,
    error: Option<CollectiveError>,
}

#[derive(Debug)]
struct BucketGrad {
    main_grad: MainGrad,
    spec: ParamSpec,
    /// The first parameter of its bucket, whose length, and where it stands there.
    first: String,
    len: usize,
    start: usize,
    chunk: usize,
    /// Gradients that came in this backward.
    arrived: usize,
    /// Those of a backward, once one was seen.
    expected: Expected,
    /// Whether the last one came.
    is_complete: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Expected {
    Unknown,
    Gradients(usize),
    /// It gets others, of which nobody tells.
    Others,
}

impl Overlap {
    /// For weights that are attached already, on one device.
    pub(crate) fn new(
        sharding: Sharding,
        device: Device,
        mut weights: BTreeMap<String, (MainGrad, ParamSpec)>,
    ) -> Self {
        let mut direct = BTreeMap::new();
        let sent = sharding
            .buckets()
            .iter()
            .filter(|b| !sharding.replicas(b.kind).is_alone());
        for Bucket {
            slots, len, chunk, ..
        } in sent
        {
            for Slot { path, start, .. } in slots {
                let Some((main_grad, spec)) = weights.remove(path) else {
                    continue;
                };
                let first = slots[0].path.clone();
                let len = *len;
                let start = *start;
                let chunk = *chunk;
                let expected = if sharding.is_cross_stage(path) {
                    Expected::Others
                } else {
                    Expected::Unknown
                };
                let arrived = 0;
                let is_complete = false;
                let weight = BucketGrad {
                    main_grad,
                    spec,
                    first,
                    len,
                    start,
                    chunk,
                    arrived,
                    expected,
                    is_complete,
                };
                direct.insert(path.clone(), weight);
            }
        }
        let (is_last, buffers, given, started, error) = Default::default();
        let sums = GradReduceQueue::new(sharding.clone());
        let state = OverlapState {
            sharding,
            direct,
            device,
            is_last,
            buffers,
            given,
            sums,
            started,
            error,
        };
        let overlap = Self(Arc::new(Mutex::new(state)));
        overlap.install_hooks();
        overlap
    }

    fn install_hooks(&self) {
        let state = self.lock();
        let on_gpu = is_on_gpu(&Tensor::<1>::empty([1], &state.device));
        for (path, direct) in &state.direct {
            // A layer may outlive who sums its gradients.
            let weak = Arc::downgrade(&self.0);
            let own = path.clone();
            direct.main_grad.on_gradient(move || {
                if let Some(state) = weak.upgrade() {
                    Self(state).lock().arrived(&own);
                }
            });
            let weak = Arc::downgrade(&self.0);
            let own = path.clone();
            if on_gpu {
                direct
                    .main_grad
                    .with_out_buffer(move || Self(weak.upgrade()?).lock().room(&own));
            }
        }
    }

    /// Before a backward, whose gradients may complete sums.
    pub(crate) fn begin(&self, is_last: bool) {
        let mut state = self.lock();
        state.is_last = is_last;
        state
            .direct
            .values_mut()
            .for_each(|direct| direct.arrived = 0);
    }

    /// That the weight at `path` gets gradients beside those that its layer sums.
    pub(crate) fn exclude(&self, path: &str) {
        if let Some(direct) = self.lock().direct.get_mut(path) {
            direct.expected = Expected::Others;
        }
    }

    /// Behind a backward.
    pub(crate) fn end(&self) {
        let mut state = self.lock();
        state.is_last = false;
        for direct in state.direct.values_mut() {
            if direct.expected == Expected::Unknown && direct.arrived > 0 {
                direct.expected = Expected::Gradients(direct.arrived);
            }
        }
    }

    /// Forgets what was started.
    pub(crate) fn reset(&self) {
        let mut state = self.lock();
        state.is_last = false;
        state
            .direct
            .values_mut()
            .for_each(|direct| direct.is_complete = false);
        (state.buffers, state.given, state.started, state.error) = Default::default();
        state.sums = GradReduceQueue::new(state.sharding.clone());
    }

    /// This rank's shares of the buckets that were started, by their places among all.
    pub(crate) fn take(&self) -> Result<BTreeMap<usize, Tensor<1>>, CollectiveError> {
        let mut state = self.lock();
        state
            .direct
            .values_mut()
            .for_each(|direct| direct.is_complete = false);
        let started = std::mem::take(&mut state.started);
        match state.error.take() {
            Some(error) => Err(error),
            None => Ok(started.into_iter().zip(state.sums.finish()?).collect()),
        }
    }

    /// The memory that was there for the sums of a bucket.
    pub(crate) fn take_buffer(&self, bucket: &Bucket) -> Option<Tensor<1>> {
        self.lock().take_buffer(bucket)
    }

    fn lock(&self) -> MutexGuard<'_, OverlapState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OverlapState {
    fn arrived(&mut self, path: &str) {
        let Some(direct) = self.direct.get_mut(path) else {
            return;
        };
        direct.arrived += 1;
        let is_all = direct.expected == Expected::Gradients(direct.arrived);
        direct.is_complete |= self.is_last && is_all;
        let chunk = direct.chunk;
        let sharding = self.sharding.clone();
        let is_own =
            |bucket: &Bucket| bucket.chunk == chunk && !sharding.replicas(bucket.kind).is_alone();
        let mut own = sharding
            .buckets()
            .iter()
            .enumerate()
            .filter(|(_, b)| is_own(b));
        while self.is_last && self.error.is_none() {
            let next = own.find(|(index, _)| !self.started.contains(index));
            let Some((index, bucket)) = next.filter(|(_, b)| self.is_complete(b)) else {
                return;
            };
            self.started.push(index);
            let whole = self.take_complete(bucket);
            self.error = self.sums.start(bucket.kind, whole).err();
        }
    }

    /// Where the sum of a weight's gradients is to stand.
    fn room(&mut self, path: &str) -> Option<Tensor<2>> {
        let BucketGrad {
            spec,
            first,
            len,
            start,
            ..
        } = self.direct.get(path)?;
        if !self.given.insert(path.to_string()) {
            return None;
        }
        let empty = || Tensor::empty([*len], (&self.device, DType::F32));
        let buffer = self.buffers.entry(first.clone()).or_insert_with(empty);
        bucket_slice(buffer, *start, spec.shard.local_shape().try_into().ok()?)
    }

    fn is_complete(&self, bucket: &Bucket) -> bool {
        let slots = bucket.slots.iter();
        slots
            .map(|slot| self.direct.get(&slot.path))
            .all(|direct| direct.is_some_and(|direct| direct.is_complete))
    }

    fn take_buffer(&mut self, bucket: &Bucket) -> Option<Tensor<1>> {
        for slot in &bucket.slots {
            self.given.remove(&slot.path);
        }
        self.buffers.remove(&bucket.slots[0].path)
    }

    /// This rank's gradients of a bucket: where they stand already, or joined.
    fn take_complete(&mut self, bucket: &Bucket) -> Tensor<1> {
        let buffer = self.take_buffer(bucket);
        let weights = bucket
            .slots
            .iter()
            .map(|slot| (slot, &self.direct[&slot.path]));
        let sums = weights.map(|(slot, direct)| {
            let sum = direct.main_grad.take().expect("a gradient came");
            (slot, direct, sum)
        });
        let sums: Vec<_> = sums.collect();
        let stands = |buffer: &Tensor<1>| {
            sums.iter().all(|(slot, direct, sum)| {
                is_view_of(sum, buffer, slot.start) && !has_padding(&direct.spec.shard)
            })
        };
        if let Some(buffer) = buffer.filter(stands) {
            return buffer;
        }
        let parts = sums
            .into_iter()
            .map(|(_, direct, sum)| without_padding(&direct.spec.shard, sum.flatten(0, 1)));
        let mut parts = parts.collect::<Vec<_>>().into_iter();
        let zeros = |len| Tensor::zeros([len], (&self.device, DType::F32));
        bucket.join(
            0..bucket.len,
            |_, _| parts.next().expect("one a slot"),
            zeros,
        )
    }
}

#[cfg(test)]
mod tests;
