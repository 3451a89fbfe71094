//! Scaling of parameters after an update, as clipping of queries and keys does.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

use burn::{
    Tensor,
    module::{Module, Param},
    tensor::{DType, Device},
};
use megaburn_collective::{Lane, tensors};

use crate::{
    accumulator::GradientAccumulator,
    error::OptimError,
    leaf::{flat, put, wide},
    optimizer::Optimizer,
    sharding::Bucket,
    visit::{FloatVisitor, visit_floats},
};

impl Optimizer {
    /// Multiplies parameters by a factor for each feature of their last dimension. `factors` has
    /// those of this rank's shard, by path; paths without a gradient are ignored. A narrow parameter
    /// stays the rounding of its f32 master, which is what is scaled. Moments stay as they are.
    ///
    /// # Errors
    /// See [`megaburn_collective::CollectiveError`]; or no host memory for offloaded state. The
    /// module is lost then.
    /// # Collective
    /// Where the optimizer's state is sharded, all ranks that shard it, with the same paths and
    /// factors. Each sends its shard of the buckets that hold these parameters.
    pub fn scale_features<M: Module>(
        &mut self,
        module: M,
        factors: &BTreeMap<String, Vec<f32>>,
        grads: &GradientAccumulator,
    ) -> Result<M, OptimError> {
        let sharding = &grads.sharding;
        sharding.settle();
        let mut values = Values {
            wanted: self.wanted(factors, grads),
            found: BTreeMap::new(),
        };
        visit_floats(&module, &mut values);
        let mut scale = Scale {
            optimizer: self,
            factors,
            grads,
            old: values.found,
        };
        let mut new = scale.run()?;
        grads.sharding.updated();
        self.state.settle()?;
        Ok(put(module, |path| Some((None, new.remove(path)?))))
    }

    /// The parameters to read: those that are scaled and those that share a bucket with them.
    fn wanted(
        &self,
        factors: &BTreeMap<String, Vec<f32>>,
        grads: &GradientAccumulator,
    ) -> BTreeSet<String> {
        let buckets = grads.sharding.buckets().iter();
        let shared = buckets
            .filter(|bucket| {
                bucket
                    .slots
                    .iter()
                    .any(|slot| factors.contains_key(&slot.path))
            })
            .flat_map(|bucket| bucket.slots.iter().map(|slot| slot.path.clone()));
        let scaled = factors
            .keys()
            .filter(|path| grads.entries.contains_key(*path));
        let all = shared.chain(scaled.cloned());
        all.filter(|path| !grads.sharding.is_param_sharded(path))
            .collect()
    }
}

/// Reads parameters, flat and without autodiff, in their own type.
struct Values {
    wanted: BTreeSet<String>,
    found: BTreeMap<String, Tensor<1>>,
}

impl FloatVisitor for Values {
    fn visit<const D: usize>(&mut self, path: String, param: &Param<Tensor<D>>) {
        if self.wanted.contains(&path) {
            let value = flat(param.val());
            self.found.insert(path, value);
        }
    }
}

struct Scale<'a> {
    optimizer: &'a mut Optimizer,
    factors: &'a BTreeMap<String, Vec<f32>>,
    grads: &'a GradientAccumulator,
    /// The values of parameters that are not sharded.
    old: BTreeMap<String, Tensor<1>>,
}

impl Scale<'_> {
    /// The new values of the parameters that are not sharded.
    fn run(&mut self) -> Result<BTreeMap<String, Tensor<1>>, OptimError> {
        let sharding = &self.grads.sharding;
        let mut new = BTreeMap::new();
        if !sharding.is_sharded() {
            for path in self.old.keys().cloned().collect::<Vec<_>>() {
                let value = self.kept(&path, self.old[&path].clone());
                new.insert(path, value);
            }
            return Ok(new);
        }
        let is_scaled = |bucket: &&Bucket| {
            bucket
                .slots
                .iter()
                .any(|slot| self.factors.contains_key(&slot.path))
        };
        let buckets = sharding.buckets().iter().rev().filter(is_scaled);
        for bucket in buckets.cloned().collect::<Vec<_>>() {
            self.scale_bucket(&bucket, &mut new)?;
        }
        Ok(new)
    }

    fn scale_bucket(
        &mut self,
        bucket: &Bucket,
        new: &mut BTreeMap<String, Tensor<1>>,
    ) -> Result<(), OptimError> {
        let sharding = &self.grads.sharding;
        let group = sharding.replicas(bucket.kind).share();
        if group.size() == 1 {
            for slot in &bucket.slots {
                let value = self.kept(&slot.path, self.old[&slot.path].clone());
                new.insert(slot.path.clone(), value);
            }
            return Ok(());
        }
        let range = sharding.shard_of(bucket);
        let old = sharding.take_share(bucket);
        let place = match &old {
            Some(old) => (old.device(), old.dtype()),
            None => {
                let first = &self.old[&bucket.slots[0].path];
                (first.device(), first.dtype())
            }
        };
        let zeros = |len: usize| Tensor::zeros([len], (&place.0, place.1));
        let share = bucket.join(
            range.clone(),
            |slot, kept| {
                let value = match &old {
                    Some(old) => {
                        let at = slot.start + kept.start - range.start;
                        old.clone().narrow(0, at, kept.len())
                    }
                    None => self.old[&slot.path]
                        .clone()
                        .narrow(0, kept.start, kept.len()),
                };
                self.kept(&slot.path, value)
            },
            zeros,
        );
        let has_new = |path: &str| old.is_some() || self.factors.contains_key(path);
        let new_ones = bucket.slots.iter().filter(|slot| has_new(&slot.path));
        new_ones.for_each(|slot| sharding.forget_fp8(&slot.path));
        if old.is_some() {
            sharding.put_share(bucket, share);
            return Ok(());
        }
        let whole = tensors::all_gather(share, group, Lane::InOrder)?.wait();
        for slot in &bucket.slots {
            let value = whole.clone().narrow(0, slot.start, slot.len);
            new.insert(slot.path.clone(), value);
        }
        Ok(())
    }

    /// The new values of the part that this rank keeps of a parameter, whose old ones are `old`.
    fn kept(&mut self, path: &str, old: Tensor<1>) -> Tensor<1> {
        let Some(factors) = self.factors.get(path) else {
            return old;
        };
        let entry = &self.grads.entries[path];
        let factors = spread(factors, entry.kept.clone(), &old.device());
        let dtype = old.dtype();
        match self.optimizer.take_master(path, &old) {
            Some(master) => {
                let master = master * factors;
                self.optimizer.put_master(path, master.clone(), dtype);
                master.cast(dtype)
            }
            None => (wide(old) * factors).cast(dtype),
        }
    }
}

/// The factors of the elements `range` of a flat parameter whose rows have `factors`.
fn spread(factors: &[f32], range: Range<usize>, device: &Device) -> Tensor<1> {
    let row = Tensor::<1>::from_data(factors, (device, DType::F32));
    let width = factors.len();
    let first = range.start / width;
    let rows = range.end.div_ceil(width) - first;
    let all: Tensor<1> = row
        .reshape([1, width])
        .expand([rows, width])
        .reshape([rows * width]);
    all.narrow(0, range.start - first * width, range.len())
}

#[cfg(test)]
mod tests {
    use burn::tensor::FloatDType;
    use rstest::rstest;

    use super::*;
    use crate::{
        rule::AdamWConfig,
        sharding::Sharding,
        testing::{Net, plan_of, unused, values},
    };

    #[rstest]
    fn a_parameter_is_the_rounding_of_its_scaled_master(
        #[values(FloatDType::BF16, FloatDType::F32)] dtype: FloatDType,
    ) {
        let net = Net::new(3, 4, 0, 1, &Device::default().autodiff());
        let [before, bias] = [values(net.matrix.val()), values(net.bias.val())];
        let mut optimizer = AdamWConfig::new().init(&Sharding::none()).unwrap();
        let net = optimizer.cast_params(net, dtype);
        let grads =
            GradientAccumulator::new(&net, &plan_of(3, 4, 0, 1), &Sharding::none()).unwrap();
        let row = [0.3, 1.0, 0.7, 0.9f32];
        let factors = [("matrix", row.to_vec()), ("other", vec![0.0; 4])];
        let factors = factors.map(|(path, of)| (path.to_string(), of)).into();
        let net = optimizer.scale_features(net, &factors, &grads).unwrap();
        let expected: Vec<f32> = before
            .iter()
            .zip(row.iter().cycle())
            .map(|(x, f)| x * f)
            .collect();
        assert!(net.matrix.val().is_require_grad() && net.matrix.val().dtype() == dtype.into());
        if dtype == FloatDType::BF16 {
            assert_eq!(
                values(optimizer.master("matrix", unused).unwrap()),
                expected
            );
        }
        let rounded = Tensor::<1>::from_floats(expected.as_slice(), &Device::default());
        let found: Tensor<1> = net.matrix.val().inner().flatten(0, 1);
        assert_eq!(
            found.into_data(),
            rounded.cast(DType::from(dtype)).into_data()
        );
        let rounded = Tensor::<1>::from_floats(bias.as_slice(), &Device::default());
        let found = net.bias.val().inner();
        assert_eq!(
            found.into_data(),
            rounded.cast(DType::from(dtype)).into_data()
        );
    }

    #[test]
    fn factors_are_spread_from_any_element_on() {
        let device = Device::default();
        for (range, expected) in [
            (0..6, vec![1.0, 2.0, 3.0, 1.0, 2.0, 3.0]),
            (2..5, vec![3.0, 1.0, 2.0]),
            (4..5, vec![2.0]),
        ] {
            assert_eq!(values(spread(&[1.0, 2.0, 3.0], range, &device)), expected);
        }
    }
}
