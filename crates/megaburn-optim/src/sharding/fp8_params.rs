//! Which weights ranks send each other in FP8, and with which scales.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use burn::{Tensor, tensor::DType};
use megaburn_collective::{CollectiveError, Group, Lane, ReduceOp, tensors};
use megaburn_kernels::{AmaxReduction, SentAmax, SentScale, largest_magnitude};

use super::{
    bucket::Bucket,
    fp8_message::{Fp8Layout, Fp8Message},
};

/// A weight that its layer quantises with one scale in the next step, so that ranks may send it in
/// FP8: the layer then computes with the same numbers.
///
/// Source: Megatron-LM `--fp8-param-gather`; torchao `enable_fsdp_float8_all_gather`.
#[derive(Clone, Debug)]
pub struct Fp8Param {
    /// Where the layer looks for the largest magnitude of the weight.
    pub sent_amax: SentAmax,
    /// Reduces the largest magnitude over the ranks that hold other parts of the layer's weight.
    pub reduction: Option<AmaxReduction>,
    /// Whether the layer's scale is rounded down to a power of two.
    pub power_of_two: bool,
    /// The scale, if it follows the weight of the steps before.
    pub delayed: Option<DelayedScale>,
}

/// The scale that delayed scaling derives for the next step if the update of this one is made.
#[derive(Clone, Debug)]
pub struct DelayedScale {
    /// The largest magnitude of this rank's part in the current step, `[1]`.
    pub current: Option<Tensor<1>>,
    /// The largest magnitude of the earlier steps in the history; 0 if the history is empty.
    pub before: f32,
    /// The factor of the magnitudes.
    pub factor: f32,
}

/// The weights that are sent in FP8. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Fp8Params(Arc<Mutex<Fp8State>>);

#[derive(Debug, Default)]
struct Fp8State {
    /// The weights that the next updates send in FP8.
    next: BTreeMap<String, Fp8Param>,
    /// The weights that the last update sent in FP8.
    sent: BTreeMap<String, SentAmax>,
}

impl Fp8Params {
    pub(super) fn set_next(&self, params: BTreeMap<String, Fp8Param>) {
        self.lock().next = params;
    }

    /// The largest magnitude of the parameter before the last update sent it in FP8, if it did.
    pub(super) fn sent_amax(&self, path: &str) -> Option<Tensor<1>> {
        self.lock().sent.get(path)?.get()
    }

    /// The parameter has the values that it was given.
    pub(super) fn forget(&self, path: &str) {
        if let Some(sent) = self.lock().sent.remove(path) {
            sent.set(None);
        }
    }

    /// Returns the message that sends this rank's shard of a bucket of bf16 parameters, or `None` if
    /// the bucket is sent in bf16. `values` holds the bucket's values from an offset on and contains
    /// the shard.
    ///
    /// # Collective
    /// If a parameter is sent in FP8, all members of `group`, which share the bucket, and all ranks
    /// that hold parts of its weights: one or two numbers for each.
    pub(super) fn message(
        &self,
        bucket: &Bucket,
        group: &Group,
        values: (&Tensor<1>, usize),
    ) -> Result<Option<Fp8Message>, CollectiveError> {
        let all = bucket.slots.iter().enumerate();
        let params: BTreeMap<usize, Fp8Param> = {
            let state = self.lock();
            let next =
                |(index, path): (usize, &String)| Some((index, state.next.get(path)?.clone()));
            all.filter_map(|(index, slot)| next((index, &slot.path)))
                .collect()
        };
        let is_fp8 = |path: &str| self.lock().next.contains_key(path);
        let layout = Fp8Layout::new(bucket, group.size(), is_fp8);
        let layout = layout.filter(|_| values.0.dtype() == DType::BF16 && !params.is_empty());
        let Some(layout) = layout else {
            bucket.slots.iter().for_each(|slot| self.forget(&slot.path));
            return Ok(None);
        };
        let amaxes = amaxes(&layout, group.rank(), &params, values);
        let amaxes = tensors::all_reduce(amaxes, ReduceOp::Max, group, Lane::InOrder)?.wait();
        let mut reductions = params.values().filter_map(|param| param.reduction.as_ref());
        // All layers of a bucket are split over the same ranks, or every rank has the whole weight.
        let amaxes = match reductions.next() {
            Some(reduction) => reduction.reduced(amaxes),
            None => amaxes,
        };
        let mut scales = BTreeMap::new();
        for (position, (index, param)) in params.iter().enumerate() {
            let own = amaxes.clone().narrow(0, position, 1);
            let current = amaxes.clone().narrow(0, params.len() + position, 1);
            scales.insert(*index, param.scale(own.clone(), current));
            param.sent_amax.set(Some(own));
        }
        let mut state = self.lock();
        for (index, slot) in bucket.slots.iter().enumerate() {
            match params.get(&index) {
                Some(param) => {
                    let amax = param.sent_amax.clone();
                    state.sent.insert(slot.path.clone(), amax);
                }
                None => drop(state.sent.remove(&slot.path)),
            }
        }
        drop(state);
        let message = Fp8Message::new(layout, scales, group.rank(), values);
        Ok(Some(message))
    }

    fn lock(&self) -> MutexGuard<'_, Fp8State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Fp8Param {
    /// The scale of the layer in the next step, given the largest magnitudes of the weight now and
    /// in this step.
    fn scale(&self, own: Tensor<1>, current: Tensor<1>) -> SentScale {
        let amax = match &self.delayed {
            None => own,
            Some(delayed) => {
                let derived = current.clamp_min(delayed.before) * delayed.factor;
                // A weight that was zero in all steps says nothing about the next one.
                let is_zero = derived.clone().equal_elem(0.0);
                // A magnitude of a step before must not hide one that is not finite.
                derived.mask_where(is_zero, own.clone()) + (own.clone() - own)
            }
        };
        SentScale {
            amax,
            power_of_two: self.power_of_two,
        }
    }
}

/// Concatenates the largest magnitudes of this rank's parts of the weights with the largest
/// magnitudes of the current step.
fn amaxes(
    layout: &Fp8Layout,
    rank: usize,
    params: &BTreeMap<usize, Fp8Param>,
    (values, start): (&Tensor<1>, usize),
) -> Tensor<1> {
    let place = (&values.device(), DType::F32);
    let zero = || Tensor::<1>::zeros([1], place);
    let parts: BTreeMap<_, _> = layout.fp8_parts(rank).collect();
    let now = params.keys().map(|index| match parts.get(index) {
        Some(range) => {
            let part = values.clone().narrow(0, range.start - start, range.len());
            largest_magnitude(part)
        }
        None => zero(),
    });
    let current = params.values().map(|param| {
        let delayed = param.delayed.as_ref();
        let current = delayed.and_then(|delayed| delayed.current.clone());
        current.unwrap_or_else(zero)
    });
    Tensor::cat(now.chain(current).collect(), 0)
}
