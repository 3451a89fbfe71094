use std::{collections::BTreeSet, ops::Range};

use burn::{
    Tensor,
    tensor::{DType, TensorData},
};

#[cfg(test)]
use crate::offload::What;
use crate::{
    accumulator::GradientAccumulator, error::OptimError, moment::Moment, moment_bits::MomentPlace,
    optimizer::Optimizer,
};

impl Optimizer {
    /// The moments that this rank keeps, in path order.
    #[cfg(test)]
    pub(crate) fn state_tensors(&self) -> impl Iterator<Item = (&str, Moment, Tensor<1>)> {
        self.state.iter().filter_map(|(key, kept)| match key.what {
            What::Moment(moment) => Some((key.path.as_str(), moment, kept.tensor())),
            What::Master => None,
        })
    }

    /// The moments that this optimizer keeps for the parameters of `grads`.
    pub fn moments(&self, grads: &GradientAccumulator) -> BTreeSet<Moment> {
        let entries = grads.entries.iter();
        let moments = entries.flat_map(|(path, entry)| self.rule.moments(path, &entry.spec));
        moments.map(|(moment, _)| moment).collect()
    }

    /// Restores the moments that [`Optimizer::held_state`] returned after `time` steps. They are
    /// read as f32 whatever type they were stored in, and cast to the types that this optimizer is
    /// configured with. `read` gets the range of the flattened local parameter that this rank keeps;
    /// it is called for each moment of each parameter of `grads`, but not at time 0.
    ///
    /// # Errors
    /// An error of `read`; state that is not f32 or not of the size of the range; or no
    /// host memory for state that is to be offloaded.
    pub fn load_state<E: From<OptimError>>(
        &mut self,
        time: u64,
        grads: &GradientAccumulator,
        mut read: impl FnMut(&str, Moment, Range<usize>) -> Result<TensorData, E>,
    ) -> Result<(), E> {
        self.choose_for(grads);
        let mut state = self.state.masters();
        let entries = grads.entries.iter().filter(|_| time > 0);
        for (path, entry) in entries {
            for (moment, dtype) in self.rule.moments(path, &entry.spec) {
                let range = self.sharding.kept(path, entry.num_elements());
                let expected = range.len();
                let place = MomentPlace {
                    path,
                    moment,
                    dtype,
                    range: range.clone(),
                    time,
                };
                if expected == 0 {
                    let nothing = Tensor::empty([0], (&entry.device, DType::F32));
                    state.put_moment(&place, nothing);
                    continue;
                }
                let data = read(path, moment, range)?;
                let found = data.num_elements();
                let is = data.dtype();
                if found != expected || is != DType::F32 {
                    let moment = moment.name();
                    let path = path.clone();
                    let dtype = format!("{is:?}");
                    Err(OptimError::State {
                        moment,
                        path,
                        found,
                        dtype,
                        expected,
                    })?;
                }
                let data = TensorData::from_bytes(data.into_bytes(), [expected], DType::F32);
                let wide = Tensor::<1>::from_data(data, (&entry.device, DType::F32));
                state.put_moment(&place, wide);
            }
        }
        state.settle()?;
        self.time = time;
        self.state = state;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use burn::tensor::Device;

    use super::*;
    use crate::{
        rule::AdamWConfig,
        sharding::Sharding,
        testing::{Net, plan_of, values},
    };

    fn train(
        net: Net,
        optimizer: &mut Optimizer,
        grads: &mut GradientAccumulator,
        steps: u32,
    ) -> Net {
        (0..steps).fold(net, |net, _| {
            grads.reset();
            let loss = net.matrix.val().exp().sum() + net.bias.val().square().sum();
            grads.accumulate(&net, &mut loss.backward());
            optimizer.step(1e-2, net, grads).unwrap()
        })
    }

    #[test]
    fn saved_and_loaded_state_continues_bit_for_bit() {
        let device = Device::default().autodiff();
        let net = Net::new(3, 4, 0, 1, &device);
        let mut grads =
            GradientAccumulator::new(&net, &plan_of(3, 4, 0, 1), &Sharding::none()).unwrap();
        let mut optimizer = AdamWConfig::new().init(&Sharding::none()).unwrap();
        assert_eq!(optimizer.state_tensors().count(), 0);
        let net = train(net, &mut optimizer, &mut grads, 3);

        let saved: HashMap<(String, &str), TensorData> = optimizer
            .state_tensors()
            .map(|(path, moment, t)| ((path.to_string(), moment.name()), t.into_data()))
            .collect();
        assert_eq!(saved.len(), 4);
        let mut resumed = AdamWConfig::new().init(&Sharding::none()).unwrap();
        let read = |path: &str, moment: Moment, _: Range<usize>| {
            Ok::<_, OptimError>(saved[&(path.to_string(), moment.name())].clone())
        };
        resumed.load_state(optimizer.time(), &grads, read).unwrap();

        let on = train(net.clone(), &mut optimizer, &mut grads, 3);
        let again = train(net, &mut resumed, &mut grads, 3);
        assert_eq!(resumed.time(), 6);
        assert_eq!(values(on.matrix.val()), values(again.matrix.val()));
        assert_eq!(values(on.bias.val()), values(again.bias.val()));
    }

    #[test]
    fn state_of_another_size_is_refused_and_nothing_changes() {
        let net = Net::new(3, 4, 0, 1, &Device::default().autodiff());
        let grads =
            GradientAccumulator::new(&net, &plan_of(3, 4, 0, 1), &Sharding::none()).unwrap();
        let mut optimizer = AdamWConfig::new().init(&Sharding::none()).unwrap();
        let short = |_: &str, _: Moment, _: Range<usize>| {
            Ok::<_, OptimError>(TensorData::from([1.0f32; 5]))
        };
        let error = optimizer
            .load_state(2, &grads, short)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("`exp_avg` of `bias` has 5 elements of F32"),
            "{error}"
        );
        assert_eq!(optimizer.time(), 0);
        let none = |_: &str, _: Moment, _: Range<usize>| -> Result<TensorData, OptimError> {
            unreachable!()
        };
        optimizer.load_state(0, &grads, none).unwrap();
    }
}
