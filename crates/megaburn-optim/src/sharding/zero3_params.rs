use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use burn::{Tensor, tensor::Float};
use megaburn_collective::{
    CollectiveError, Group,
    tensors::{self, AsyncCollective},
};
use megaburn_kernels::{LinearPass, MainGrad};

use super::Bucket;

/// Parameters of which each rank keeps its share, and which are whole only while layers compute with
/// them: a bucket is gathered when one of its weights is read, forward and again backward, and let go
/// when a weight of another one is. The next one is on its way meanwhile, as it was the last time.
///
/// All ranks that share read in one order, or they would wait for each other for ever.
///
/// Source: Rajbhandari et al. 2020, stage 3; Zhao et al. 2023, <https://arxiv.org/abs/2304.11277>.
#[derive(Clone, Debug)]
pub(super) struct Zero3Params(Arc<Mutex<Zero3State>>);

#[derive(Debug)]
struct Zero3State {
    /// And between whom each is shared.
    buckets: Vec<(Bucket, Group)>,
    places: BTreeMap<String, Place>,
    /// This rank's shares by bucket, once all of their parameters were given.
    shares: Vec<Option<Tensor<1>>>,
    /// What was given of buckets of which others are still to come.
    parts: BTreeMap<String, Tensor<1>>,
    /// Buckets that are whole, or will be.
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
    InFlight(AsyncCollective<1, Float>),
    Here(Tensor<1>),
}

/// In which order buckets are read: what came next the last time behind the longest stretch of reads that
/// is known. So each stage of a pipeline has an order of its own, forward and backward, in whichever order
/// stages come, and what recomputes a block goes on otherwise than its forward did.
#[derive(Debug)]
struct PrefetchPredictor {
    known: BTreeMap<Vec<Option<Read>>, Read>,
    /// What is not known yet: a forward without a backward leaves no trace.
    now: Vec<(Vec<Option<Read>>, Read)>,
    /// No more than count; none is what a beginning is behind.
    last: VecDeque<Option<Read>>,
}

type Read = (LinearPass, usize);

/// How many reads are told from others: more than buckets of a block that is computed again.
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
    /// Takes note of a read; whether it is of another bucket than the one before, or of another pass.
    fn record(&mut self, read: Read) -> bool {
        match self.last.back() {
            Some(Some(last)) if *last == read => return false,
            Some(Some((LinearPass::Backward, _))) if read.0 == LinearPass::Forward => self.learn(),
            _ => {}
        }
        let suffixes = self
            .suffixes()
            .map(|stretch| (stretch, read))
            .collect::<Vec<_>>();
        self.now.extend(suffixes);
        self.last.push_back(Some(read));
        if self.last.len() > HISTORY {
            self.last.pop_front();
        }
        true
    }

    /// Those that end with the last read, the longest first.
    fn suffixes(&self) -> impl Iterator<Item = Vec<Option<Read>>> {
        (0..self.last.len()).map(|start| self.last.range(start..).copied().collect())
    }

    /// That a backward is over, or all.
    fn learn(&mut self) {
        let now = std::mem::take(&mut self.now);
        if now
            .iter()
            .any(|(_, (pass, _))| *pass == LinearPass::Backward)
        {
            self.known.extend(now);
        }
    }

    /// That what is read next is the first.
    fn begin(&mut self) {
        self.learn();
        self.last = [None].into();
    }

    /// The bucket that was read next the last time.
    fn next(&self) -> Option<usize> {
        let known = self.suffixes().find_map(|stretch| self.known.get(&stretch));
        known.map(|(_, next)| *next)
    }
}

impl Zero3Params {
    /// Of buckets of matrices and those that share each; `shapes` are those of the local ones.
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
        let (parts, whole, reads, prefetches, error) = Default::default();
        let state = Zero3State {
            buckets,
            places,
            shares,
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

    /// Takes what this rank keeps of a parameter.
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
        let stretch = bucket.share(group.rank(), group.size());
        let part = |slot: &super::Slot, _| parts.remove(&slot.path).expect("it was given");
        let share = bucket.join(stretch, part, zeros);
        state.shares[index] = Some(share);
        state.whole.clear();
    }

    /// What this rank keeps of a parameter.
    pub(super) fn part(&self, path: &str) -> Option<Tensor<1>> {
        let state = self.lock();
        let place = state.places.get(path)?;
        let share = state.shares[place.bucket].as_ref()?;
        let (bucket, group) = &state.buckets[place.bucket];
        let stretch = bucket.share(group.rank(), group.size());
        let slot = bucket.slots.iter().find(|slot| slot.path == path)?;
        let kept = slot.within(&stretch);
        Some(if kept.is_empty() {
            Tensor::empty([0], (&share.device(), share.dtype()))
        } else {
            share
                .clone()
                .narrow(0, slot.start + kept.start - stretch.start, kept.len())
        })
    }

    /// All parameters, whole and flat.
    pub(super) fn gather(&self) -> Result<BTreeMap<String, Tensor<1>>, CollectiveError> {
        let state = self.lock();
        let mut params = BTreeMap::new();
        for ((bucket, group), share) in state.buckets.iter().zip(&state.shares) {
            let Some(share) = share.clone() else { continue };
            let whole = tensors::all_gather(share, group)?;
            for slot in &bucket.slots {
                let value = whole.clone().narrow(0, slot.start, slot.len);
                params.insert(slot.path.clone(), value);
            }
        }
        Ok(params)
    }

    /// Takes this rank's share of the bucket that begins with `first`, for [`put`](Self::put) to replace.
    pub(super) fn take(&self, first: &str) -> Option<Tensor<1>> {
        let mut state = self.lock();
        let index = state.places.get(first)?.bucket;
        state.whole.clear();
        state.shares[index].take()
    }

    pub(super) fn put(&self, first: &str, share: Tensor<1>) {
        let mut state = self.lock();
        let index = state.places[first].bucket;
        state.shares[index] = Some(share);
    }

    /// Lets layers read `weights` here from now on; the next ones are fetched early if it `prefetches`.
    pub(super) fn attach(&self, weights: &BTreeMap<String, MainGrad>, prefetches: bool) {
        let mut state = self.lock();
        state.prefetches = prefetches;
        for path in state.places.keys() {
            // A layer may outlive the optimizer, but not compute without it.
            let shares = self.clone();
            let own = path.clone();
            if let Some(weight) = weights.get(path) {
                weight.with_source(move |pass| shares.lock().read(&own, pass));
            }
        }
    }

    /// That new values are there: the first ones that will be read are fetched.
    pub(super) fn updated(&self) {
        let mut state = self.lock();
        state.reads.begin();
        if let Some(next) = state.reads.next().filter(|_| state.prefetches) {
            state.fetch(next);
        }
    }

    /// Lets go of what is whole, and of the place in the order of reads.
    pub(super) fn release(&self) {
        let mut state = self.lock();
        state.reads.begin();
        state.whole.clear();
    }

    /// What failed since this was last asked.
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

    /// Starts to gather a bucket, unless that was done.
    fn fetch(&mut self, bucket: usize) {
        if self.whole.contains_key(&bucket) || self.error.is_some() {
            return;
        }
        let share = self.shares[bucket]
            .clone()
            .expect("parameters are given before they are read");
        match tensors::start_all_gather(share, &self.buckets[bucket].1) {
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

    /// What is computed with where gathering failed, until somebody can be told.
    fn nothing(&self, bucket: usize, shape: [usize; 2]) -> Tensor<2> {
        let share = self.shares[bucket]
            .as_ref()
            .expect("parameters are given before they are read");
        Tensor::full(shape, f32::NAN, (&share.device(), share.dtype()))
    }
}

#[cfg(test)]
mod tests;
