//! The losses and the metrics of a step, summed over micro-batches and ranks.

use std::collections::BTreeMap;

use burn::tensor::{DType, Device, Tensor};
use megaburn_collective::Group;
use megaburn_optim::DeviceScalar;

use super::{
    error::TaskRunError,
    model::{LossSum, TrainModel},
};
use crate::{error::TrainError, trainer_core::sums_over};

/// The losses of some micro-batches, still on the device, because reading one would wait for it.
#[derive(Debug)]
pub(super) struct Totals {
    losses: Vec<Tensor<1>>,
    names: &'static [&'static str],
    metrics: Vec<Vec<Tensor<1>>>,
    num_items: usize,
    flops: f64,
}

/// The sums over ranks, which the host has not waited for.
pub(super) struct Sums {
    pub(super) loss: DeviceScalar,
    /// The losses of this rank's micro-batches, still on the device.
    pub(super) own_losses: Tensor<1>,
    metrics: Vec<(&'static str, DeviceScalar)>,
}

/// What all ranks did in a step.
pub(super) struct Work {
    pub(super) num_items: f64,
    pub(super) flops: f64,
}

impl Totals {
    /// No losses yet of a model.
    pub(super) fn of<M: TrainModel>() -> Self {
        Self {
            losses: Vec::new(),
            names: M::METRICS,
            metrics: M::METRICS.iter().map(|_| Vec::new()).collect(),
            num_items: 0,
            flops: 0.0,
        }
    }

    /// Adds the loss of a micro-batch. Its tensors are without autodiff.
    ///
    /// # Errors
    /// A metric that the model does not name.
    pub(super) fn add(&mut self, loss: LossSum) -> Result<(), TrainError> {
        for (name, sum) in loss.metrics {
            let Some(at) = self.names.iter().position(|known| *known == name) else {
                let why = format!("the metric `{name}` is not in TrainModel::METRICS");
                return Err(TaskRunError::cannot("report a metric", why).into());
            };
            self.metrics[at].push(sum.cast(DType::F32));
        }
        self.losses.push(loss.sum.cast(DType::F32));
        self.num_items += loss.num_items;
        self.flops += loss.flops;
        Ok(())
    }

    /// The work of all members.
    ///
    /// # Errors
    /// A failed collective.
    /// # Collective
    /// All members.
    pub(super) fn work_over(&self, group: &Group) -> Result<Work, TrainError> {
        let work = sums_over(group, &[self.num_items as f64, self.flops])?;
        Ok(Work {
            num_items: work[0],
            flops: work[1],
        })
    }

    /// The sums over all members. A stage that computes no loss contributes zeros on its `device`.
    ///
    /// # Errors
    /// A failed collective.
    /// # Collective
    /// All members.
    pub(super) fn sum_over(self, group: &Group, device: &Device) -> Result<Sums, TrainError> {
        let own = |mut sums: Vec<Tensor<1>>| {
            if sums.is_empty() {
                sums.push(Tensor::zeros([1], (&device.clone().inner(), DType::F32)));
            }
            Tensor::cat(sums, 0)
        };
        let sum = |sums| DeviceScalar::of(own(sums), group);
        let own_losses = own(self.losses);
        let loss = DeviceScalar::of(own_losses.clone(), group)?;
        let mut metrics = Vec::new();
        for (name, sums) in self.names.iter().zip(self.metrics) {
            metrics.push((*name, sum(sums)?));
        }
        Ok(Sums {
            loss,
            own_losses,
            metrics,
        })
    }
}

impl Sums {
    /// The mean of each metric over `num_items` items. Waits for the device.
    ///
    /// # Errors
    /// A device that failed.
    pub(super) fn means(&self, num_items: f64) -> Result<BTreeMap<String, f64>, TrainError> {
        let mean = |(name, sum): &(&'static str, DeviceScalar)| {
            Ok((name.to_string(), sum.read()? / num_items.max(1.0)))
        };
        self.metrics.iter().map(mean).collect()
    }
}
