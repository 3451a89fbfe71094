use std::collections::BTreeMap;

use burn::{
    Tensor,
    tensor::{DType, TensorData},
};
use megaburn_collective::tensors;

use crate::{
    AdamW, Moment, OptimError,
    adamw::Moments,
    sharding::{Bucket, Sharding},
};

/// State of one whole local parameter.
#[derive(Clone, Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "there is one a parameter, while a checkpoint is saved"
)]
pub enum StateTensor {
    /// Where it is kept.
    Kept(Tensor<1>),
    /// Gathered from those that share it, or what failed then.
    Gathered(DType, Result<TensorData, OptimError>),
}

impl StateTensor {
    /// Element type.
    pub fn dtype(&self) -> DType {
        match self {
            Self::Kept(tensor) => tensor.dtype(),
            Self::Gathered(dtype, _) => *dtype,
        }
    }

    /// The values.
    ///
    /// # Shapes
    /// `[local elements]`: the local parameter, row-major, padding included.
    /// # Errors
    /// The device cannot be read.
    pub fn read(self) -> Result<TensorData, OptimError> {
        match self {
            Self::Kept(tensor) => to_host(tensor),
            Self::Gathered(_, data) => data,
        }
    }
}

/// What an optimizer keeps of whole local parameters, for a checkpoint, by path.
#[derive(Debug, Default)]
pub struct WholeState {
    /// Of narrower parameters, in f32.
    pub masters: BTreeMap<String, StateTensor>,
    /// Before the first step there are none.
    pub moments: BTreeMap<(Moment, String), StateTensor>,
}

impl AdamW {
    /// Masters and moments of whole local parameters. Where they are shared out they are gathered, bucket
    /// by bucket, into the memory of the hosts of those ranks that say they are `wanted`; on the others
    /// the result is empty then.
    ///
    /// # Errors
    /// See [`megaburn_collective::CollectiveError`]. That a device cannot be read is said by
    /// [`StateTensor::read`].
    /// # Collective
    /// Where they are shared out, all ranks that share them; each sends what it keeps.
    pub fn whole_state(&self, wanted: bool) -> Result<WholeState, OptimError> {
        let mut whole = WholeState::default();
        self.gather(&self.masters, wanted, |path, state| {
            whole.masters.insert(path, state);
        })?;
        for moment in Moment::ALL {
            let of = |moments: &Moments| match moment {
                Moment::First => moments.exp_avg.clone(),
                Moment::Second => moments.exp_avg_sq.clone(),
            };
            let kept = self.moments.iter().map(|(path, moments)| (path.clone(), of(moments)));
            self.gather(&kept.collect(), wanted, |path, state| {
                whole.moments.insert((moment, path), state);
            })?;
        }
        Ok(whole)
    }

    /// Every rank keeps something of the same parameters, if it is nothing of them.
    fn gather(
        &self,
        kept: &BTreeMap<String, Tensor<1>>,
        wanted: bool,
        mut give: impl FnMut(String, StateTensor),
    ) -> Result<(), OptimError> {
        if self.sharding.num_shares() == 1 {
            for (path, tensor) in kept {
                give(path.clone(), StateTensor::Kept(tensor.clone()));
            }
            return Ok(());
        }
        let is_kept = |bucket: &&Bucket| kept.contains_key(&bucket.slots[0].path);
        for bucket in self.sharding.buckets().iter().filter(is_kept) {
            let whole =
                tensors::all_gather(share(&self.sharding, bucket, kept), self.sharding.share())?;
            for slot in bucket.slots.iter().filter(|_| wanted) {
                // A rank that cannot read goes on gathering with the others.
                let data = to_host(whole.clone().narrow(0, slot.start, slot.len));
                give(slot.path.clone(), StateTensor::Gathered(whole.dtype(), data));
            }
        }
        Ok(())
    }
}

/// This rank's share of a bucket of what it keeps.
fn share(sharding: &Sharding, bucket: &Bucket, kept: &BTreeMap<String, Tensor<1>>) -> Tensor<1> {
    let first = &kept[&bucket.slots[0].path];
    let zeros = |len| Tensor::zeros([len], (&first.device(), first.dtype()));
    bucket.join(sharding.share_of(bucket), |slot, _| kept[&slot.path].clone(), zeros)
}

fn to_host(tensor: Tensor<1>) -> Result<TensorData, OptimError> {
    tensor.try_into_data().map_err(|error| OptimError::Device { why: error.to_string() })
}
