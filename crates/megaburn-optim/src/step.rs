use std::{collections::BTreeMap, mem, ops::Range};

use burn::{
    Tensor,
    module::{Module, ModuleMapper, Param},
};
use megaburn_kernels::bf16_out_slice;

use crate::{
    accumulator::GradientAccumulator,
    error::OptimError,
    leaf::{Leaf, flat, put},
    optimizer::{Optimizer, Start, Update},
    rule::Rates,
    sharding::Bucket,
    visit::Path,
};

/// Elements of parameters that are updated together, or of gradients whose squares are summed
/// together, in one or two kernel launches.
pub(crate) const MULTI_TENSOR_CHUNK: usize = 64 << 20;

impl Optimizer {
    /// Updates the parameters that `grads` has, which stay leaves that require gradients. Other
    /// parameters are not changed.
    ///
    /// Arithmetic is in f32 whatever the type of the parameters. A narrower parameter is the
    /// rounding of its f32 master, and the master is updated ([`Optimizer::cast_params`]; without a
    /// master, the parameter itself becomes the first one). A parameter of the type `main_params`
    /// is updated itself. Equal shards with equal gradients stay bit-identical. Padding stays zero,
    /// because [`GradientAccumulator::reduce`] clears its gradient.
    ///
    /// If a number passed to [`GradientAccumulator::clip`] or
    /// [`GradientAccumulator::skip_if_not_finite`] is not finite, nothing changes except the step
    /// count; see [`Optimizer::revert_step_count`].
    ///
    /// Parameters may still be in flight afterwards; see
    /// [`Sharding::attach`](crate::Sharding::attach).
    ///
    /// # Errors
    /// See [`megaburn_collective::CollectiveError`]; or no host memory for offloaded state
    /// ([`Optimizer::with_cpu_offload`]). The module is lost then.
    /// # Collective
    /// Where the optimizer's state is sharded, all ranks that shard it. Each sends what it updated.
    pub fn step<M: Module>(
        &mut self,
        lr: f64,
        module: M,
        grads: &GradientAccumulator,
    ) -> Result<M, OptimError> {
        let rates = Rates {
            lr,
            weight_decay: self.rule.weight_decay(),
        };
        self.step_with(|_| rates, module, grads)
    }

    /// Like [`step`](Self::step), with separate rates for each parameter, by path. Parameters of
    /// one dimension do not decay here either.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    /// # Collective
    /// As [`step`](Self::step).
    pub fn step_with<M: Module>(
        &mut self,
        rates: impl Fn(&str) -> Rates,
        module: M,
        grads: &GradientAccumulator,
    ) -> Result<M, OptimError> {
        self.time += 1;
        if !grads.factor.is_finite() {
            return Ok(module);
        }
        self.expect(grads);
        let directions = self.rule.directions(grads, &mut self.state, self.time)?;
        grads.sharding.settle();
        let mut take = Take {
            path: Path::default(),
            grads,
            taken: BTreeMap::new(),
        };
        let module = module.map(&mut take);
        let mut step = Step {
            optimizer: self,
            rates,
            grads,
            directions,
            params: take.taken,
        };
        if grads.sharding.is_sharded() {
            step.update_shares()?
        } else {
            step.update_all()
        }
        grads.sharding.updated();
        let mut params = step.params;
        self.state.settle()?;
        Ok(put(module, |path| {
            params
                .remove(path)
                .map(|taken| (Some(taken.leaf), taken.value))
        }))
    }
}

/// A parameter that was taken out of its module.
struct TakenParam {
    leaf: Leaf,
    /// Flat, without autodiff.
    value: Tensor<1>,
}

struct Step<'a, R> {
    optimizer: &'a mut Optimizer,
    rates: R,
    grads: &'a GradientAccumulator,
    directions: BTreeMap<String, Tensor<1>>,
    params: BTreeMap<String, TakenParam>,
}

impl<R: Fn(&str) -> Rates> Step<'_, R> {
    /// The weight of an update in a batch of updates, which ends at [`MULTI_TENSOR_CHUNK`]. An
    /// update with offloaded state ends the batch, so that only one such parameter's state is on
    /// the device at a time.
    fn weight(&self, path: &str, num_elements: usize) -> usize {
        if !self.optimizer.state.stays_on_gpu_of(path) {
            MULTI_TENSOR_CHUNK
        } else if self.optimizer.keeps_bits() {
            // The f32 tensors of a batch take up to 12 bytes per element.
            num_elements * 4
        } else {
            num_elements
        }
    }

    fn update_all(&mut self) {
        let paths: Vec<String> = self.params.keys().cloned().collect();
        self.update_whole(paths.into_iter());
    }

    /// Updates parameters that this rank updates in full.
    fn update_whole(&mut self, paths: impl Iterator<Item = String>) {
        let mut weight = 0;
        let mut leaves = Vec::new();
        let mut updates = Vec::new();
        for path in paths {
            let TakenParam { leaf, value } = self.params.remove(&path).expect("it was taken");
            weight += self.weight(&path, value.dims()[0]);
            let dtype = value.dtype();
            // If there is a master, the parameter is dropped here, so that its memory can be reused
            // for the new one.
            let start = self.optimizer.start(&path, dtype, move || value);
            leaves.push((path.clone(), leaf));
            updates.push(self.update_of(path, start, None));
            if weight >= MULTI_TENSOR_CHUNK {
                self.put(mem::take(&mut leaves), mem::take(&mut updates));
                weight = 0;
            }
        }
        self.put(leaves, updates);
    }

    fn put(&mut self, leaves: Vec<(String, Leaf)>, updates: Vec<Update>) {
        let new = self.optimizer.update(updates, self.grads);
        let taken = leaves.into_iter().zip(new);
        self.params
            .extend(taken.map(|((path, leaf), value)| (path, TakenParam { leaf, value })));
    }

    fn update_of(&mut self, path: String, start: Start, room: Option<Tensor<1>>) -> Update {
        let direction = self.directions.remove(&path);
        let rates = (self.rates)(&path);
        Update {
            path,
            start,
            room,
            direction,
            rates,
        }
    }

    fn update_shares(&mut self) -> Result<(), OptimError> {
        let sharding = &self.grads.sharding;
        let allows_fp8 = self.optimizer.allows_fp8_params();
        let mut started = Vec::with_capacity(sharding.buckets().len());
        // This must be the order of `Sharding::update_order`.
        for bucket in sharding.buckets().iter().rev() {
            let group = sharding.replicas(bucket.kind).share();
            if group.size() == 1 {
                self.update_whole(bucket.slots.iter().map(|slot| slot.path.clone()));
                continue;
            }
            if let Some(old) = sharding.take_share(bucket) {
                let new = self.update_share(bucket, Some(old), sharding.shard_of(bucket));
                sharding.put_updated_share(bucket, new, allows_fp8)?;
                continue;
            }
            let whole = self.update_share(bucket, None, 0..bucket.len);
            started.push((bucket, sharding.send(bucket, whole, allows_fp8)?));
        }
        for (bucket, started) in started {
            let whole = sharding.gathered(bucket, started);
            for slot in &bucket.slots {
                let value = whole.clone().narrow(0, slot.start, slot.len);
                self.params.get_mut(&slot.path).expect("it was taken").value = value;
            }
        }
        Ok(())
    }

    /// Updates this rank's shard of a bucket, and drops the old values. `old` is the shard if that
    /// is all this rank keeps. Returns the range `range` of the bucket with the new values at
    /// their offsets; the rest of it is uninitialized.
    fn update_share(
        &mut self,
        bucket: &Bucket,
        old: Option<Tensor<1>>,
        range: Range<usize>,
    ) -> Tensor<1> {
        let place = match &old {
            Some(old) => (old.device(), old.dtype()),
            None => {
                let first = &self.params[&bucket.slots[0].path];
                (first.value.device(), first.leaf.dtype)
            }
        };
        let empty = |len| Tensor::empty([len], (&place.0, place.1));
        let share = self.grads.sharding.shard_of(bucket);
        let mut starts = Vec::with_capacity(bucket.slots.len());
        for slot in &bucket.slots {
            let kept = slot.within(&share);
            if kept.is_empty() {
                let entry = &self.grads.entries[&slot.path];
                self.optimizer.set_empty_state(&slot.path, entry, empty(0));
                continue;
            }
            let at = slot.start + kept.start;
            let value = || match &old {
                Some(old) => old.clone().narrow(0, at - share.start, kept.len()),
                None => self.params[&slot.path]
                    .value
                    .clone()
                    .narrow(0, kept.start, kept.len()),
            };
            let start = self.optimizer.start(&slot.path, place.1, value);
            let at = at - range.start;
            starts.push((slot, at..at + kept.len(), start));
        }
        // Free what is no longer needed before allocating the same amount.
        drop(old);
        for slot in &bucket.slots {
            if let Some(taken) = self.params.get_mut(&slot.path) {
                taken.value = empty(0);
            }
        }
        let mut new = empty(range.len());
        let mut starts = starts.into_iter().peekable();
        while starts.peek().is_some() {
            let mut places = Vec::new();
            let mut updates = Vec::new();
            let mut weight = 0;
            while weight < MULTI_TENSOR_CHUNK
                && let Some((slot, at, start)) = starts.next()
            {
                let room = match &start {
                    Start::Param(_) => None,
                    Start::Master { .. } | Start::Joined(_) => bf16_out_slice(&new, at.clone()),
                };
                weight += self.weight(&slot.path, at.len());
                places.push((room.is_none(), at));
                updates.push(self.update_of(slot.path.clone(), start, room));
            }
            let values = places
                .into_iter()
                .zip(self.optimizer.update(updates, self.grads));
            // Collecting first drops the values that are in place already, before the others are
            // copied to `new`.
            let others = values.filter(|((is_elsewhere, _), _)| *is_elsewhere);
            for ((_, at), value) in others.collect::<Vec<_>>() {
                new = new.slice_assign([at], value);
            }
        }
        new
    }
}

/// Takes the parameters that have gradients out of a module, so that nothing else holds their
/// memory.
struct Take<'a> {
    path: Path,
    grads: &'a GradientAccumulator,
    taken: BTreeMap<String, TakenParam>,
}

impl ModuleMapper for Take<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.path.text();
        if !self.grads.entries.contains_key(&path) || self.grads.sharding.is_param_sharded(&path) {
            return param;
        }
        param.map(|tensor| {
            let leaf = Leaf::of(&tensor);
            let nothing = Tensor::empty([0; D], &tensor.device());
            self.taken.insert(
                path,
                TakenParam {
                    leaf,
                    value: flat(tensor),
                },
            );
            nothing
        })
    }
}
