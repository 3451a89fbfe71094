use burn::tensor::{DType, Tensor, TensorData};
use megaburn_collective::{Group, Lane, ReduceOp, tensors};
use megaburn_kernels::{is_on_gpu, total};

use crate::error::OptimError;

/// A sum over the members of a group. On CPUs it is a plain number; on GPUs it stays on the device,
/// and the host does not wait for it until it is read.
#[derive(Clone, Debug)]
pub struct DeviceScalar {
    pub(crate) value: Value,
    group: Group,
}

#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "a step has two values")]
pub(crate) enum Value {
    Known(f64),
    /// `[1]`, f32.
    OnGpu(Tensor<1>),
}

impl Value {
    pub(crate) fn times(self, factor: f32) -> Self {
        match self {
            Self::Known(sum) => Self::Known(sum * f64::from(factor)),
            Self::OnGpu(sum) => Self::OnGpu(sum * factor),
        }
    }

    pub(crate) fn known(self) -> Option<f64> {
        match self {
            Self::Known(sum) => Some(sum),
            Self::OnGpu(_) => None,
        }
    }

    pub(crate) fn on_gpu(self) -> Option<Tensor<1>> {
        match self {
            Self::Known(_) => None,
            Self::OnGpu(sum) => Some(sum),
        }
    }
}

impl DeviceScalar {
    /// Sums the numbers of all members of `group`; each member passes one or more.
    ///
    /// # Errors
    /// See [`megaburn_collective::CollectiveError`].
    /// # Collective
    /// All members of `group`; one number.
    /// # Determinism
    /// On CPUs the sum is taken in f64, each member's numbers first. On GPUs it is taken in f64 too
    /// and then rounded to f32. Either way it is bit-identical on every member.
    pub fn of(numbers: Tensor<1>, group: &Group) -> Result<Self, OptimError> {
        if is_on_gpu(&numbers) {
            let plain = if numbers.device().is_autodiff() {
                numbers.inner()
            } else {
                numbers
            };
            return Self::on_gpu(plain.cast(DType::F32), group);
        }
        let data = numbers.into_data();
        Self::known(data.iter::<f64>().sum(), group)
    }

    /// Sums one host number per member.
    pub(crate) fn known(mine: f64, group: &Group) -> Result<Self, OptimError> {
        let sum = group.all_reduce(TensorData::from([mine]), ReduceOp::Sum)?;
        let sum = sum.as_slice::<f64>().expect("the sum is f64")[0];
        Ok(Self {
            value: Value::Known(sum),
            group: group.clone(),
        })
    }

    /// Sums the members' f32 numbers on their device. The partial sums are gathered, so that every
    /// member adds them in the same order.
    pub(crate) fn on_gpu(mine: Tensor<1>, group: &Group) -> Result<Self, OptimError> {
        let mut sum = total(mine);
        if group.size() > 1 {
            sum = total(tensors::all_gather(sum, group, Lane::InOrder)?.wait());
        }
        Ok(Self {
            value: Value::OnGpu(sum),
            group: group.clone(),
        })
    }

    /// The value; on a GPU the host waits for it.
    ///
    /// # Errors
    /// The value was never computed, because the GPU is out of memory or failed on this rank or
    /// another.
    pub fn read(&self) -> Result<f64, OptimError> {
        let sum = match &self.value {
            Value::Known(sum) => return Ok(*sum),
            Value::OnGpu(sum) => sum.clone().try_into_data(),
        };
        let sum = sum.map_err(|error| OptimError::Device {
            why: error.to_string(),
        })?;
        // A failed collective leaves an arbitrary value in its output.
        match self.group.failure() {
            Some(failure) => Err(failure.into()),
            None => Ok(sum.as_slice::<f32>().expect("the sum on a GPU is f32")[0].into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use megaburn_collective::{GroupOptions, run_threads};
    use rstest::rstest;

    use super::*;

    #[rstest]
    fn the_sum_of_all_is_the_same_number_on_every_rank(
        #[values(1, 2, 3)] ranks: usize,
        #[values(DeviceScalar::of, DeviceScalar::on_gpu)] sum: fn(
            Tensor<1>,
            &Group,
        ) -> Result<
            DeviceScalar,
            OptimError,
        >,
    ) {
        let sums = run_threads(ranks, GroupOptions::default(), |world| {
            let mine = world.rank() as f32 + 0.5;
            let sum = sum(
                Tensor::from_floats([mine, 2.0, mine], &Device::flex()),
                &world,
            )?;
            Ok::<_, OptimError>([sum.read()?, sum.read()?])
        });
        let expected = (ranks * (ranks + 2)) as f64;
        sums.into_iter()
            .for_each(|sum| assert_eq!(sum.unwrap(), [expected; 2]));
    }
}
