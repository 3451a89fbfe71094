use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use burn::{
    Tensor,
    tensor::{DType, Device},
};
use megaburn_autograd::{MainGrad, bucket_slice, is_view_of};
use megaburn_collective::CollectiveError;
use megaburn_kernels::is_on_gpu;
use megaburn_mesh::ParamSpec;

use crate::{
    reduce::{has_padding, without_padding},
    sharding::{Bucket, GradReduceQueue, Sharding, Slot},
};

/// Starts to reduce a bucket over ranks inside the backward pass that completes its gradients, so
/// that communication overlaps the rest of backward.
///
/// On GPUs, layers accumulate directly into the bucket's buffer, so no copy is needed. Only a few
/// buckets are in flight at a time, because each keeps its memory allocated.
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
    /// Weights whose layers accumulate their gradients, by path.
    direct: BTreeMap<String, BucketGrad>,
    /// The device of all weights.
    device: Device,
    /// Whether this backward pass completes the sums.
    is_last: bool,
    /// On GPUs, of buckets that get their gradients, by their first parameter.
    buffers: BTreeMap<String, Tensor<1>>,
    /// Weights that got their slice of a buffer. Each gets it only once, or a sum that was taken
    /// already would be overwritten.
    given: BTreeSet<String>,
    sums: GradReduceQueue,
    /// The index of the bucket of each reduction in `sums`.
    started: Vec<usize>,
    error: Option<CollectiveError>,
}

#[derive(Debug)]
struct BucketGrad {
    main_grad: MainGrad,
    spec: ParamSpec,
    /// The first parameter of the bucket, the bucket's length, and the offset of this weight in it.
    first: String,
    len: usize,
    start: usize,
    chunk: usize,
    /// Gradients that arrived in this backward pass.
    arrived: usize,
    /// Gradients per backward pass, once one has been observed.
    expected: Expected,
    /// Whether the last gradient has arrived.
    is_complete: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Expected {
    Unknown,
    Gradients(usize),
    /// Also receives gradients outside the hooks, so it is never complete early.
    Others,
}

impl Overlap {
    /// For weights whose main gradients are attached already, all on one device.
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
            // The layer may outlive this `Overlap`.
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

    /// Called before a backward pass; `is_last` says whether its gradients complete the sums.
    pub(crate) fn begin(&self, is_last: bool) {
        let mut state = self.lock();
        state.is_last = is_last;
        state
            .direct
            .values_mut()
            .for_each(|direct| direct.arrived = 0);
    }

    /// Notes that the weight at `path` also gets gradients that its layer does not sum.
    pub(crate) fn exclude(&self, path: &str) {
        if let Some(direct) = self.lock().direct.get_mut(path) {
            direct.expected = Expected::Others;
        }
    }

    /// Called after a backward pass.
    pub(crate) fn end(&self) {
        let mut state = self.lock();
        state.is_last = false;
        for direct in state.direct.values_mut() {
            if direct.expected == Expected::Unknown && direct.arrived > 0 {
                direct.expected = Expected::Gradients(direct.arrived);
            }
        }
    }

    /// Forgets all reductions that were started.
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

    /// This rank's shards of the buckets whose reduction was started, by bucket index.
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

    /// The buffer that was allocated for a bucket's sums.
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

    /// Where the layer accumulates the gradient of the weight at `path`.
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

    /// This rank's gradients of a bucket: the buffer itself if they are in place, joined otherwise.
    fn take_complete(&mut self, bucket: &Bucket) -> Tensor<1> {
        let buffer = self.take_buffer(bucket);
        let weights = bucket
            .slots
            .iter()
            .map(|slot| (slot, &self.direct[&slot.path]));
        let sums = weights.map(|(slot, direct)| {
            let sum = direct
                .main_grad
                .take()
                .expect("the gradient has been computed");
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
            |_, _| parts.next().expect("there is one part per slot"),
            zeros,
        )
    }
}

#[cfg(test)]
mod tests;
