//! Statistics that ranks combine outside the model.

use burn::tensor::{DType, Device, Tensor};
use megaburn_collective::{CollectiveError, Group};
use megaburn_models::{DecoderConfig, decoder::StageLosses, flops::FlopShape};
use megaburn_optim::{DeviceScalar, OptimError};

use super::batch::Batch;
use crate::{error::TrainError, failure::read_all, trainer_core::sums_over};

/// Losses summed over tokens, so that they are divided only once, by all tokens, however these were
/// split.
#[derive(Clone, Debug, Default)]
pub(super) struct LossTotals {
    loss: f64,
    /// The loss of each multi-token-prediction depth.
    mtp: Vec<f64>,
    /// The loss of the binary head, and the rows that count in it.
    binary: f64,
    rows: f64,
    tokens: f64,
}

/// The losses of a step, summed over ranks, which the host has not waited for.
pub(super) struct StepLossTotals {
    pub(super) loss: DeviceScalar,
    /// The losses of this rank's micro-batches, still on the device.
    pub(super) own_losses: Tensor<1>,
    pub(super) mtp: Vec<DeviceScalar>,
    /// That of the binary head; `None` without labels for it.
    pub(super) binary: Option<DeviceScalar>,
}

/// The losses of some micro-batches, still on the device, because reading one would wait for it.
pub(super) struct Losses {
    sums: Vec<Tensor<1>>,
    /// The losses of each multi-token-prediction depth.
    mtp: Vec<Vec<Tensor<1>>>,
    /// The losses of the binary head, and the rows that count in them; `None` without one.
    binary: Option<Vec<Tensor<1>>>,
    rows: usize,
    tokens: usize,
    /// FLOPs of forward and backward, by Megatron-LM's formula.
    flops: f64,
    /// Positions of the sequences, and those without padding.
    positions: f64,
    held: f64,
}

/// What all ranks did in a step.
pub(super) struct Work {
    /// Number of tokens that count in the loss.
    pub(super) tokens: f64,
    /// Number of rows that count in the loss of the binary head.
    pub(super) rows: f64,
    /// FLOPs of forward and backward, by Megatron-LM's formula.
    pub(super) flops: f64,
    /// Number of tokens of all rows, without padding.
    pub(super) held: f64,
    /// Fraction of the positions that are padding.
    pub(super) padding: f64,
}

impl Losses {
    /// No losses yet of `model`.
    pub(super) fn of(model: &DecoderConfig) -> Self {
        Self {
            sums: Vec::new(),
            mtp: vec![Vec::new(); model.mtp_layers],
            binary: model.binary_head.then(Vec::new),
            rows: 0,
            tokens: 0,
            flops: 0.0,
            positions: 0.0,
            held: 0.0,
        }
    }

    /// Adds the losses of a micro-batch, for a model of this shape.
    pub(super) fn add(&mut self, losses: StageLosses, batch: &Batch, shape: &FlopShape) {
        self.sums.push(losses.main);
        self.mtp
            .iter_mut()
            .zip(losses.mtp)
            .for_each(|(sums, loss)| sums.push(loss));
        if let Some(sums) = &mut self.binary {
            sums.extend(losses.binary);
            self.rows += batch.counted_rows;
        }
        self.tokens += batch.counted;
        self.flops += batch.flops(shape);
        self.positions += batch.tokens.shape().num_elements() as f64;
        self.held += batch.lens.iter().sum::<usize>() as f64 / batch.ranks as f64;
    }

    /// The work of all micro-batches of all members.
    ///
    /// # Collective
    /// All members.
    pub(super) fn work_over(&self, group: &Group) -> Result<Work, CollectiveError> {
        let own = [
            self.tokens as f64,
            self.flops,
            self.positions,
            self.held,
            self.rows as f64,
        ];
        let work = sums_over(group, &own)?;
        Ok(Work {
            tokens: work[0],
            rows: work[4],
            flops: work[1],
            held: work[3],
            padding: 1.0 - work[3] / work[2].max(1.0),
        })
    }

    /// The sums over all members, without waiting for the device. A pipeline stage that computes no
    /// loss contributes a zero on its device.
    ///
    /// # Collective
    /// All members.
    pub(super) fn sum_over(
        self,
        group: &Group,
        device: &Device,
    ) -> Result<StepLossTotals, OptimError> {
        let own = |mut sums: Vec<Tensor<1>>| {
            if sums.is_empty() {
                sums.push(Tensor::zeros([1], (&device.clone().inner(), DType::F32)));
            }
            Tensor::cat(sums, 0)
        };
        let sum = |sums| DeviceScalar::of(own(sums), group);
        let own_losses = own(self.sums);
        Ok(StepLossTotals {
            loss: DeviceScalar::of(own_losses.clone(), group)?,
            own_losses,
            binary: self.binary.map(sum).transpose()?,
            mtp: self.mtp.into_iter().map(sum).collect::<Result<_, _>>()?,
        })
    }

    /// The sums of this rank. Waits for the device.
    pub(super) fn read(self) -> Result<LossTotals, TrainError> {
        let sum = |sums: Vec<Tensor<1>>| -> Result<f64, TrainError> {
            if sums.is_empty() {
                return Ok(0.0);
            }
            Ok(read_all(Tensor::cat(sums, 0))?
                .into_iter()
                .map(f64::from)
                .sum())
        };
        let mtp = self.mtp.into_iter().map(sum).collect::<Result<_, _>>()?;
        Ok(LossTotals {
            loss: sum(self.sums)?,
            mtp,
            binary: sum(self.binary.unwrap_or_default())?,
            rows: self.rows as f64,
            tokens: self.tokens as f64,
        })
    }
}

impl LossTotals {
    /// The sums over all members.
    ///
    /// # Collective
    /// All members.
    pub(super) fn over(self, group: &Group) -> Result<Self, TrainError> {
        let own = [
            &[self.loss, self.tokens, self.binary, self.rows],
            &self.mtp[..],
        ]
        .concat();
        let sums = sums_over(group, &own)?;
        Ok(Self {
            loss: sums[0],
            tokens: sums[1],
            binary: sums[2],
            rows: sums[3],
            mtp: sums[4..].to_vec(),
        })
    }

    /// The number of tokens that count in the loss.
    pub(super) fn tokens(&self) -> f64 {
        self.tokens
    }

    /// The mean loss, in nats per token.
    pub(super) fn mean(&self) -> f64 {
        self.loss / self.tokens.max(1.0)
    }

    /// The mean loss of the binary head, in nats per row; `None` if no row counts.
    pub(super) fn binary_mean(&self) -> Option<f64> {
        (self.rows > 0.0).then(|| self.binary / self.rows)
    }

    /// The mean loss of each multi-token-prediction depth, divided by the same number of tokens.
    pub(super) fn mtp_means(&self) -> Vec<f64> {
        self.mtp
            .iter()
            .map(|loss| loss / self.tokens.max(1.0))
            .collect()
    }
}
