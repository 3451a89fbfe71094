use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use burn::Tensor;
use megaburn_autograd::{LinearPass, MainGrad};
use megaburn_collective::{CollectiveError, Group, Lane, tensors};

use super::{Bucket, SentBucket, fp8_message::Fp8Message};

/// Sharded parameters, which are unsharded only while layers compute with them. A bucket is
/// gathered when one of its weights is read, in forward and in backward, and released when a weight
/// of another bucket is read. Meanwhile, the bucket that came next the last time is prefetched.
///
/// All ranks that shard parameters must read them in the same order, or they deadlock.
///
/// Source: Rajbhandari et al. 2020, stage 3; Zhao et al. 2023, <https://arxiv.org/abs/2304.11277>.
#[derive(Clone, Debug)]
pub(super) struct Zero3Params(Arc<Mutex<Zero3State>>);

#[derive(Debug)]
struct Zero3State {
    /// The buckets, each with the group that shards it.
    buckets: Vec<(Bucket, Group)>,
    places: BTreeMap<String, Place>,
    /// This rank's shards by bucket, once all of the bucket's parameters have been given.
    shares: Vec<Option<Tensor<1>>>,
    /// What is sent instead of the shards of buckets with weights in FP8.
    messages: BTreeMap<usize, Fp8Message>,
    /// Parts given so far for buckets that still lack other parameters.
    parts: BTreeMap<String, Tensor<1>>,
    /// Buckets that are gathered or in flight.
    whole: BTreeMap<usize, GatheredParams>,
    reads: PrefetchPredictor,
    prefetches: bool,
    error: Option<CollectiveError>,
}

#[derive(Clone, Copy, Debug)]
struct Place {
    bucket: usize,
    start: usize,
    shape: [usize; 2],
}

#[derive(Debug)]
enum GatheredParams {
    InFlight(SentBucket),
    Here(Tensor<1>),
}

/// Learned access order for prefetching. The next bucket is predicted from the longest previously
/// seen suffix of recent reads, so every stage, pass and recomputed block gets its own order, in
/// whichever order stages run.
#[derive(Debug)]
struct PrefetchPredictor {
    known: BTreeMap<Vec<Option<Read>>, Read>,
    /// Reads of the current pass. They are learned only once a backward pass is among them, so a
    /// forward pass without backward leaves no trace.
    now: Vec<(Vec<Option<Read>>, Read)>,
    /// The most recent reads, at most `HISTORY`; `None` marks the start of a pass.
    last: VecDeque<Option<Read>>,
}

type Read = (LinearPass, usize);

/// Length of the history used for prediction; must exceed the number of buckets in one recomputed
/// block.
const HISTORY: usize = 8;

impl Default for PrefetchPredictor {
    fn default() -> Self {
        Self {
            known: BTreeMap::new(),
            now: Vec::new(),
            last: [None].into(),
        }
    }
}

impl PrefetchPredictor {
    /// Records a read. Returns whether its bucket or pass differs from the previous read's.
    fn record(&mut self, read: Read) -> bool {
        match self.last.back() {
            Some(Some(last)) if *last == read => return false,
            Some(Some((LinearPass::Backward, _))) if read.0 == LinearPass::Forward => self.learn(),
            _ => {}
        }
        let suffixes = self
            .suffixes()
            .map(|suffix| (suffix, read))
            .collect::<Vec<_>>();
        self.now.extend(suffixes);
        self.last.push_back(Some(read));
        if self.last.len() > HISTORY {
            self.last.pop_front();
        }
        true
    }

    /// All suffixes of the recent reads, the longest first.
    fn suffixes(&self) -> impl Iterator<Item = Vec<Option<Read>>> {
        (0..self.last.len()).map(|start| self.last.range(start..).copied().collect())
    }

    /// Called at the end of a backward pass or of all passes; learns the recorded reads.
    fn learn(&mut self) {
        let now = std::mem::take(&mut self.now);
        if now
            .iter()
            .any(|(_, (pass, _))| *pass == LinearPass::Backward)
        {
            self.known.extend(now);
        }
    }

    /// Marks the next read as the first of a pass.
    fn begin(&mut self) {
        self.learn();
        self.last = [None].into();
    }

    /// The bucket that was read next the last time.
    fn next(&self) -> Option<usize> {
        let known = self.suffixes().find_map(|suffix| self.known.get(&suffix));
        known.map(|(_, next)| *next)
    }
}

impl Zero3Params {
    /// For buckets of matrices, each with the group that shards it; `shapes` are the local shapes.
    pub(super) fn new(
        buckets: Vec<(Bucket, Group)>,
        shapes: &BTreeMap<String, [usize; 2]>,
    ) -> Self {
        let mut places = BTreeMap::new();
        for (index, (bucket, _)) in buckets.iter().enumerate() {
            for slot in &bucket.slots {
                let place = Place {
                    bucket: index,
                    start: slot.start,
                    shape: shapes[&slot.path],
                };
                places.insert(slot.path.clone(), place);
            }
        }
        let shares = buckets.iter().map(|_| None).collect();
        let (messages, parts, whole, reads, prefetches, error) = Default::default();
        let state = Zero3State {
            buckets,
            places,
            shares,
            messages,
            parts,
            whole,
            reads,
            prefetches,
            error,
        };
        Self(Arc::new(Mutex::new(state)))
    }

    pub(super) fn has(&self, path: &str) -> bool {
        self.lock().places.contains_key(path)
    }

    /// Stores the part of a parameter that this rank keeps.
    pub(super) fn give(&self, path: &str, part: Tensor<1>) {
        let mut state = self.lock();
        let index = state.places[path].bucket;
        state.parts.insert(path.to_string(), part);
        let Zero3State { buckets, parts, .. } = &mut *state;
        let (bucket, group) = &buckets[index];
        if !bucket
            .slots
            .iter()
            .all(|slot| parts.contains_key(&slot.path))
        {
            return;
        }
        let mut parts: BTreeMap<_, _> = bucket
            .slots
            .iter()
            .filter_map(|slot| Some((slot.path.clone(), parts.remove(&slot.path)?)))
            .collect();
        let first = &parts[&bucket.slots[0].path];
        let place = (first.device(), first.dtype());
        let zeros = |len| Tensor::zeros([len], (&place.0, place.1));
        let range = bucket.share(group.rank(), group.size());
        let part = |slot: &super::Slot, _| parts.remove(&slot.path).expect("it was given");
        let share = bucket.join(range, part, zeros);
        state.shares[index] = Some(share);
        state.messages.remove(&index);
        state.whole.clear();
    }

    /// The part of a parameter that this rank keeps.
    pub(super) fn part(&self, path: &str) -> Option<Tensor<1>> {
        let state = self.lock();
        let place = state.places.get(path)?;
        let share = state.shares[place.bucket].as_ref()?;
        let (bucket, group) = &state.buckets[place.bucket];
        let range = bucket.share(group.rank(), group.size());
        let slot = bucket.slots.iter().find(|slot| slot.path == path)?;
        let kept = slot.within(&range);
        Some(if kept.is_empty() {
            Tensor::empty([0], (&share.device(), share.dtype()))
        } else {
            share
                .clone()
                .narrow(0, slot.start + kept.start - range.start, kept.len())
        })
    }

    /// All parameters, unsharded and flat.
    pub(super) fn gather(&self) -> Result<BTreeMap<String, Tensor<1>>, CollectiveError> {
        let state = self.lock();
        let mut params = BTreeMap::new();
        for ((bucket, group), share) in state.buckets.iter().zip(&state.shares) {
            let Some(share) = share.clone() else { continue };
            let whole = tensors::all_gather(share, group, Lane::InOrder)?.wait();
            for slot in &bucket.slots {
                let value = whole.clone().narrow(0, slot.start, slot.len);
                params.insert(slot.path.clone(), value);
            }
        }
        Ok(params)
    }

    /// Takes this rank's shard of the bucket whose first parameter is `first`; [`put`](Self::put)
    /// replaces it.
    pub(super) fn take(&self, first: &str) -> Option<Tensor<1>> {
        let mut state = self.lock();
        let index = state.places.get(first)?.bucket;
        state.whole.clear();
        state.shares[index].take()
    }

    pub(super) fn put(&self, first: &str, share: Tensor<1>, message: Option<Fp8Message>) {
        let mut state = self.lock();
        let index = state.places[first].bucket;
        state.shares[index] = Some(share);
        match message {
            Some(message) => drop(state.messages.insert(index, message)),
            None => drop(state.messages.remove(&index)),
        }
    }

    /// Sends the shard of the bucket whose first parameter is `first` as it is from now on. Returns
    /// whether that is a sharded parameter.
    pub(super) fn forget_message(&self, first: &str) -> bool {
        let mut state = self.lock();
        let Some(index) = state.places.get(first).map(|place| place.bucket) else {
            return false;
        };
        state.messages.remove(&index);
        state.whole.clear();
        true
    }

    /// Makes the layers of `weights` read their parameters from here. With `prefetches`, the next
    /// bucket is gathered early.
    pub(super) fn attach(&self, weights: &BTreeMap<String, MainGrad>, prefetches: bool) {
        let mut state = self.lock();
        state.prefetches = prefetches;
        for path in state.places.keys() {
            // A layer may outlive the optimizer, but it cannot compute without these parameters.
            let shares = self.clone();
            let own = path.clone();
            if let Some(weight) = weights.get(path) {
                weight.with_source(move |pass| shares.lock().read(&own, pass));
            }
        }
    }

    /// Called when all shards have new values; prefetches the bucket that will be read first.
    pub(super) fn updated(&self) {
        let mut state = self.lock();
        state.reads.begin();
        if let Some(next) = state.reads.next().filter(|_| state.prefetches) {
            state.fetch(next);
        }
    }

    /// Releases gathered buckets, and marks the next read as the first of a pass.
    pub(super) fn release(&self) {
        let mut state = self.lock();
        state.reads.begin();
        state.whole.clear();
    }

    /// The first error since the last call.
    pub(super) fn check(&self) -> Result<(), CollectiveError> {
        self.lock().error.take().map_or(Ok(()), Err)
    }

    fn lock(&self) -> MutexGuard<'_, Zero3State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Zero3State {
    fn read(&mut self, path: &str, pass: LinearPass) -> Tensor<2> {
        let Place {
            bucket,
            start,
            shape,
        } = self.places[path];
        if self.reads.record((pass, bucket)) {
            self.whole.retain(|&other, _| other == bucket);
            self.fetch(bucket);
            if let Some(next) = self.reads.next().filter(|_| self.prefetches) {
                self.fetch(next);
            }
        }
        let len = shape.iter().product();
        match self.here(bucket) {
            Some(whole) => whole.narrow(0, start, len).reshape(shape),
            None => self.nothing(bucket, shape),
        }
    }

    /// Starts to gather a bucket, unless it is gathered or in flight.
    fn fetch(&mut self, bucket: usize) {
        if self.whole.contains_key(&bucket) || self.error.is_some() {
            return;
        }
        let share = self.shares[bucket]
            .clone()
            .expect("parameters are set before they are read");
        let (parts, group) = &self.buckets[bucket];
        let started = match self.messages.get(&bucket) {
            Some(message) => {
                let whole = Tensor::empty([parts.len], (&share.device(), share.dtype()));
                SentBucket::of_message(message, group, whole)
            }
            None => {
                let work = tensors::all_gather(share, group, Lane::Overlapped);
                work.map(SentBucket::plain)
            }
        };
        match started {
            Ok(started) => drop(self.whole.insert(bucket, GatheredParams::InFlight(started))),
            Err(error) => self.error = Some(error),
        }
    }

    fn here(&mut self, bucket: usize) -> Option<Tensor<1>> {
        let whole = match self.whole.remove(&bucket)? {
            GatheredParams::InFlight(started) => started.wait(),
            GatheredParams::Here(whole) => whole,
        };
        self.whole
            .insert(bucket, GatheredParams::Here(whole.clone()));
        Some(whole)
    }

    /// NaN in place of a parameter that could not be gathered, until [`check`](Zero3Params::check)
    /// reports the error.
    fn nothing(&self, bucket: usize, shape: [usize; 2]) -> Tensor<2> {
        let share = self.shares[bucket]
            .as_ref()
            .expect("parameters are set before they are read");
        Tensor::full(shape, f32::NAN, (&share.device(), share.dtype()))
    }
}

#[cfg(test)]
mod tests;
