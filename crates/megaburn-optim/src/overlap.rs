use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use burn::{Tensor, tensor::Float};
use megaburn_collective::{CollectiveError, tensors::Pending};
use megaburn_kernels::MainGrad;
use megaburn_mesh::ParamSpec;

use crate::{
    reduce::without_padding,
    sharding::{Bucket, Sharding},
};

/// Starts to sum a bucket over ranks inside the backward that gives its last gradient, so that it is on
/// its way while backward goes on.
///
/// Only in the order of buckets, whatever order gradients come in: all ranks send the same. How many
/// gradients a layer's weight gets in a micro-batch is seen in the first one, in which nothing is sent.
///
/// Source: Megatron-LM `--overlap-grad-reduce`.
#[derive(Clone, Debug)]
pub(crate) struct Overlap(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    sharding: Sharding,
    /// Weights whose layers sum their gradients, by path.
    direct: BTreeMap<String, Direct>,
    /// Whether sums are complete with the gradients of this micro-batch.
    is_last: bool,
    started: Vec<Pending<1, Float>>,
    error: Option<CollectiveError>,
}

#[derive(Debug)]
struct Direct {
    main_grad: MainGrad,
    spec: ParamSpec,
    /// Gradients that came in this micro-batch.
    arrived: usize,
    /// Those of a micro-batch, once one was seen.
    expected: Expected,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Expected {
    Unknown,
    Gradients(usize),
    /// It gets others, of which nobody tells.
    Others,
}

impl Direct {
    fn is_complete(&self) -> bool {
        self.arrived > 0 && self.expected == Expected::Gradients(self.arrived)
    }
}

impl Overlap {
    /// For weights that are attached already.
    pub(crate) fn new(
        sharding: Sharding,
        direct: impl IntoIterator<Item = (String, MainGrad, ParamSpec)>,
    ) -> Self {
        let direct = direct.into_iter().map(|(path, main_grad, spec)| {
            let (arrived, expected) = (0, Expected::Unknown);
            (path, Direct { main_grad, spec, arrived, expected })
        });
        let direct: BTreeMap<_, _> = direct.collect();
        let (is_last, started, error) = (false, Vec::new(), None);
        let state = State { sharding, direct, is_last, started, error };
        let overlap = Self(Arc::new(Mutex::new(state)));
        for (path, direct) in &overlap.lock().direct {
            // A layer may outlive who sums its gradients.
            let (state, path) = (Arc::downgrade(&overlap.0), path.clone());
            direct.main_grad.on_gradient(move || {
                if let Some(state) = state.upgrade() {
                    Self(state).lock().arrived(&path);
                }
            });
        }
        overlap
    }

    /// Before a micro-batch, whose gradients may complete the sums.
    pub(crate) fn begin(&self, is_last: bool) {
        let mut state = self.lock();
        state.is_last = is_last;
        state.direct.values_mut().for_each(|direct| direct.arrived = 0);
    }

    /// That the weight at `path` gets gradients beside those that its layer sums.
    pub(crate) fn exclude(&self, path: &str) {
        if let Some(direct) = self.lock().direct.get_mut(path) {
            direct.expected = Expected::Others;
        }
    }

    /// Behind the backward of a micro-batch.
    pub(crate) fn end(&self) {
        let mut state = self.lock();
        state.is_last = false;
        for direct in state.direct.values_mut() {
            if direct.expected == Expected::Unknown {
                direct.expected = Expected::Gradients(direct.arrived);
            }
        }
    }

    /// Forgets what was started.
    pub(crate) fn reset(&self) {
        let mut state = self.lock();
        (state.is_last, state.started, state.error) = (false, Vec::new(), None);
    }

    /// The sums that were started, of the first buckets.
    pub(crate) fn take(&self) -> Result<Vec<Pending<1, Float>>, CollectiveError> {
        let mut state = self.lock();
        let started = std::mem::take(&mut state.started);
        state.error.take().map_or(Ok(started), Err)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn arrived(&mut self, path: &str) {
        let Some(direct) = self.direct.get_mut(path) else { return };
        direct.arrived += 1;
        let sharding = self.sharding.clone();
        while self.is_last && self.error.is_none() {
            let next = sharding.buckets().get(self.started.len());
            let Some(bucket) = next.filter(|bucket| self.is_complete(bucket)) else { return };
            match sharding.start_sum(self.take_whole(bucket)) {
                Ok(started) => self.started.push(started),
                Err(error) => self.error = Some(error),
            }
        }
    }

    fn is_complete(&self, bucket: &Bucket) -> bool {
        let slots = bucket.slots.iter();
        slots
            .map(|slot| self.direct.get(&slot.path))
            .all(|direct| direct.is_some_and(Direct::is_complete))
    }

    /// This rank's gradients of a bucket.
    fn take_whole(&self, bucket: &Bucket) -> Tensor<1> {
        let parts = bucket.slots.iter().map(|slot| {
            let Direct { main_grad, spec, .. } = &self.direct[&slot.path];
            let sum = main_grad.take().expect("a gradient came").flatten(0, 1);
            without_padding(&spec.shard, sum)
        });
        let mut parts: Vec<Tensor<1>> = parts.collect();
        let place = (parts[0].device(), parts[0].dtype());
        let zeros = |len| Tensor::zeros([len], (&place.0, place.1));
        let mut parts = parts.drain(..);
        bucket.join(0..bucket.len, |_, _| parts.next().expect("one a slot"), zeros)
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use megaburn_collective::{GroupOptions, ProcessGroups, run_threads};
    use megaburn_kernels::{LinearOptions, linear};
    use megaburn_mesh::{Axis, Layout, ShardPlan, ShardSpec};
    use rstest::rstest;

    use super::*;
    use crate::{
        GradientAccumulator, OptimError, ShardingConfig, ShardingLevel,
        testing::{Net, values},
    };

    /// What a weight is used for in a micro-batch.
    type Use = fn(&Net, Tensor<2>, &MainGrad) -> Tensor<2>;

    fn once(net: &Net, x: Tensor<2>, main_grad: &MainGrad) -> Tensor<2> {
        let options = LinearOptions { out_in: false, main_grad: Some(main_grad.clone()) };
        linear(x, net.matrix.val(), Some(net.bias.val()), options)
    }

    fn twice(net: &Net, x: Tensor<2>, main_grad: &MainGrad) -> Tensor<2> {
        once(net, once(net, x, main_grad), main_grad)
    }

    fn beside_another(net: &Net, x: Tensor<2>, main_grad: &MainGrad) -> Tensor<2> {
        once(net, x.clone(), main_grad) + x.matmul(net.matrix.val())
    }

    /// The gradients of some micro-batches of `uses`, and how many buckets were sent in the last
    /// backward, by rank.
    fn gradients(
        level: ShardingLevel,
        begins: bool,
        uses: &[Use],
    ) -> Result<Vec<(Vec<f32>, usize)>, String> {
        let layout: Layout = "dp2".parse().unwrap();
        let ranks = run_threads(2, GroupOptions::default(), |world| {
            let groups = ProcessGroups::new(&world, layout)?;
            let device = Device::default().autodiff();
            let net = Net::new(6, 6, 0, 1, &device);
            let mut plan = ShardPlan::new();
            for (path, shape) in [("matrix", &[6, 6][..]), ("bias", &[6][..])] {
                let shard = ShardSpec::whole(shape, Axis::Tp, 0, 1);
                plan.insert(path, megaburn_mesh::ParamSpec { shard }).expect("new");
            }
            let main_grad = MainGrad::default();
            let direct = ["matrix".to_string()];
            let sharding = ShardingConfig::new(level).with_direct(direct).init(&net, &groups)?;
            let main_grads = BTreeMap::from([("matrix".to_string(), main_grad.clone())]);
            let mut grads =
                GradientAccumulator::new(&net, &plan, &sharding)?.with_main_grads(main_grads);
            let mut sent = 0;
            for (index, forward) in uses.iter().enumerate() {
                let x = Tensor::full([3, 6], (world.rank() + 1) as f32, &device);
                let loss = forward(&net, x.require_grad(), &main_grad).sum();
                if begins {
                    grads.begin_micro_batch(index + 1 == uses.len());
                }
                grads.accumulate(&net, &mut loss.backward());
                sent = grads.overlap.as_ref().unwrap().lock().started.len();
                grads.end_micro_batch()?;
            }
            grads.reduce()?;
            let both = ["matrix", "bias"].map(|path| values(grads.get(path).unwrap()));
            Ok::<_, OptimError>((both.concat(), sent))
        });
        ranks.into_iter().collect::<Result<_, _>>().map_err(|error| error.to_string())
    }

    #[rstest]
    fn a_bucket_is_sent_by_the_backward_that_completes_it_and_the_sums_are_the_same(
        #[values(ShardingLevel::None, ShardingLevel::Optimizer, ShardingLevel::Gradients)]
        level: ShardingLevel,
    ) {
        let found = gradients(level, true, &[once, once, once]).unwrap();
        let without = gradients(level, false, &[once, once, once]).unwrap();
        for ((found, sent), (expected, none)) in found.iter().zip(&without) {
            assert_eq!((*sent, *none), (1, 0));
            assert_eq!(found, expected);
        }
        // The first of a run is only looked at.
        let first = gradients(level, true, &[once]).unwrap();
        assert!(first.iter().all(|(_, sent)| *sent == 0));
    }

    #[test]
    fn a_weight_that_is_used_twice_is_waited_for_twice() {
        let found = gradients(ShardingLevel::Optimizer, true, &[twice, twice]).unwrap();
        assert!(found.iter().all(|(_, sent)| *sent == 1));
    }

    #[test]
    fn a_weight_with_other_gradients_is_sent_at_the_end() {
        let uses: [Use; 2] = [beside_another, beside_another];
        let found = gradients(ShardingLevel::None, true, &uses).unwrap();
        let expected = gradients(ShardingLevel::None, false, &uses).unwrap();
        assert!(found.iter().all(|(_, sent)| *sent == 0));
        assert_eq!(found, expected);
    }

    #[test]
    fn a_gradient_behind_the_sum_is_refused() {
        let error = gradients(ShardingLevel::None, true, &[once, twice]).unwrap_err();
        assert!(error.contains("`matrix` got more gradients in this micro-batch"), "{error}");
    }
}
