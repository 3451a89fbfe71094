//! Numbers that ranks combine outside the model.

use burn::tensor::{DType, Device, Tensor, TensorData};
use megaburn_collective::{CollectiveError, Group, ProcessGroups, ReduceOp};
use megaburn_models::flops::FlopShape;
use megaburn_optim::{OptimError, Sum};

use super::batch::Batch;
use crate::{TrainError, failure::read_all};

/// A loss summed over tokens, so that it is divided once by all of them, however they were split.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sums {
    pub(super) loss: f64,
    pub(super) tokens: f64,
}

/// The losses of some micro-batches, still on the device: reading one would wait for it.
#[derive(Default)]
pub(super) struct Losses {
    sums: Vec<Tensor<1>>,
    tokens: usize,
    /// Of forward and backward, by Megatron's formula.
    flops: f64,
}

impl Losses {
    /// A micro-batch's loss, `[1]`, of a model of this shape.
    pub(super) fn add(&mut self, loss: Tensor<1>, batch: &Batch, shape: &FlopShape) {
        self.sums.push(loss);
        self.tokens += batch.counted;
        let flops: f64 = batch.lens.iter().map(|len| shape.training(1, *len)).sum();
        self.flops += flops / batch.ranks as f64;
    }

    /// Tokens of all micro-batches, of all members, and the FLOPs that they take.
    ///
    /// # Collective
    /// All members.
    pub(super) fn work_over(&self, group: &Group) -> Result<[f64; 2], CollectiveError> {
        let work = reduce(group, &[self.tokens as f64, self.flops], ReduceOp::Sum)?;
        Ok([work[0], work[1]])
    }

    /// The sum of all members, not waiting for the device. A stage of a pipeline that computes no losses
    /// has a zero, on its device.
    ///
    /// # Collective
    /// All members.
    pub(super) fn sum_over(mut self, group: &Group, device: &Device) -> Result<Sum, OptimError> {
        if self.sums.is_empty() {
            self.sums.push(Tensor::zeros([1], (&device.clone().inner(), DType::F32)));
        }
        Sum::of(Tensor::cat(self.sums, 0), group)
    }

    /// The sums of this rank, waiting for the device.
    pub(super) fn read(self) -> Result<Sums, TrainError> {
        let tokens = self.tokens as f64;
        if self.sums.is_empty() {
            return Ok(Sums { loss: 0.0, tokens });
        }
        let sums = read_all(Tensor::cat(self.sums, 0))?;
        Ok(Sums { loss: sums.into_iter().map(f64::from).sum(), tokens })
    }
}

impl Sums {
    /// The sums of all members.
    ///
    /// # Collective
    /// All members.
    pub(super) fn over(self, group: &Group) -> Result<Self, TrainError> {
        let sums = reduce(group, &[self.loss, self.tokens], ReduceOp::Sum)?;
        Ok(Self { loss: sums[0], tokens: sums[1] })
    }

    /// Nats per token.
    pub(super) fn mean(&self) -> f64 {
        self.loss / self.tokens.max(1.0)
    }
}

/// The largest of each number over all ranks.
///
/// # Collective
/// All ranks.
pub(super) fn world_max(groups: &ProcessGroups, values: &[f64]) -> Result<Vec<f64>, TrainError> {
    Ok(reduce(&groups.world, values, ReduceOp::Max)?)
}

/// Whether any rank was asked to stop: they leave the loop together.
///
/// # Collective
/// All ranks.
pub(crate) fn agree_to_stop(groups: &ProcessGroups, asked: bool) -> Result<bool, TrainError> {
    Ok(world_max(groups, &[f64::from(u8::from(asked))])?[0] > 0.0)
}

fn reduce(group: &Group, values: &[f64], op: ReduceOp) -> Result<Vec<f64>, CollectiveError> {
    let data = group.all_reduce(TensorData::from(values), op)?;
    Ok(data.try_to_vec().expect("f64 went in"))
}
