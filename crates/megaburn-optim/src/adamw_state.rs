use std::collections::BTreeMap;

use burn::{
    Tensor,
    tensor::{DType, TensorData},
};

use crate::{AdamW, GradientAccumulator, OptimError, adamw::Moments};

/// The two tensors of state that AdamW keeps of a parameter; named as PyTorch names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Moment {
    /// The decaying mean of gradients.
    First,
    /// The decaying mean of squared gradients.
    Second,
}

impl Moment {
    /// Both.
    pub const ALL: [Moment; 2] = [Moment::First, Moment::Second];

    /// `exp_avg` or `exp_avg_sq`.
    pub fn name(self) -> &'static str {
        match self {
            Moment::First => "exp_avg",
            Moment::Second => "exp_avg_sq",
        }
    }
}

impl AdamW {
    /// What this rank keeps of the state, in path order.
    #[cfg(test)]
    pub(crate) fn state_tensors(&self) -> impl Iterator<Item = (&str, Moment, Tensor<1>)> {
        self.moments.iter().flat_map(|(path, moments)| {
            [
                (path.as_str(), Moment::First, moments.exp_avg.clone()),
                (path.as_str(), Moment::Second, moments.exp_avg_sq.clone()),
            ]
        })
    }

    /// Puts back the moments that [`AdamW::whole_state`] gave after `time` steps, in f32 whatever it was; it is
    /// kept in what this optimizer keeps. `read` is asked for both moments of each parameter of `grads`;
    /// at time 0 for none.
    ///
    /// # Errors
    /// Those of `read`, or state that is not f32 of the parameter's local size.
    pub fn load_state<E: From<OptimError>>(
        &mut self,
        time: u64,
        grads: &GradientAccumulator,
        mut read: impl FnMut(&str, Moment) -> Result<TensorData, E>,
    ) -> Result<(), E> {
        let mut moments = BTreeMap::new();
        let entries = grads.entries.iter().filter(|_| time > 0);
        for (path, entry) in entries {
            let mut load = |moment: Moment| {
                let data = read(path, moment)?;
                let expected = entry.num_elements();
                let (found, dtype) = (data.num_elements(), data.dtype());
                if found != expected || dtype != DType::F32 {
                    let (moment, path) = (moment.name(), path.clone());
                    let dtype = format!("{dtype:?}");
                    Err(OptimError::State { moment, path, found, dtype, expected })?;
                }
                let data = TensorData::from_bytes(data.into_bytes(), [expected], DType::F32);
                let dtype = match moment {
                    Moment::First => self.config().exp_avg,
                    Moment::Second => self.config().exp_avg_sq,
                };
                let wide = Tensor::<1>::from_data(data, (&entry.device, DType::F32));
                Ok::<_, E>(self.sharding.cut(path, wide).cast(dtype))
            };
            let (exp_avg, exp_avg_sq) = (load(Moment::First)?, load(Moment::Second)?);
            moments.insert(path.clone(), Moments { exp_avg, exp_avg_sq });
        }
        (self.time, self.moments) = (time, moments);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use burn::tensor::Device;

    use super::*;
    use crate::{
        AdamWConfig, Sharding,
        testing::{Net, plan_of, values},
    };

    fn train(net: Net, optimizer: &mut AdamW, grads: &mut GradientAccumulator, steps: u32) -> Net {
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
        let read = |path: &str, moment: Moment| {
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
        let short = |_: &str, _: Moment| Ok::<_, OptimError>(TensorData::from([1.0f32; 5]));
        let error = optimizer.load_state(2, &grads, short).unwrap_err().to_string();
        assert!(error.contains("`exp_avg` of `bias` has 5 elements of F32"), "{error}");
        assert_eq!(optimizer.time(), 0);
        let none = |_: &str, _: Moment| -> Result<TensorData, OptimError> { unreachable!() };
        optimizer.load_state(0, &grads, none).unwrap();
    }
}
