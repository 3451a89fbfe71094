use std::{collections::BTreeMap, ops::Range};

use burn::{
    Tensor,
    tensor::{DType, TensorData},
};
use megaburn_collective::tensors;

use crate::{
    Moment, OptimError, Optimizer,
    offload::{HostSlot, What},
    sharding::Slot,
};

/// State of one whole local parameter.
#[derive(Clone, Debug)]
pub struct StateTensor(Source);

#[derive(Clone, Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "there is one a parameter, while a checkpoint is saved"
)]
enum Source {
    /// Where it is kept.
    HostSlot(HostSlot),
    /// Gathered from those that share it, or what failed then.
    Gathered(DType, Result<TensorData, OptimError>),
}

impl StateTensor {
    /// Element type.
    pub fn dtype(&self) -> DType {
        match &self.0 {
            Source::HostSlot(kept) => kept.dtype(),
            Source::Gathered(dtype, _) => *dtype,
        }
    }

    /// The values.
    ///
    /// # Shapes
    /// `[local elements]`: the local parameter, row-major, padding included.
    /// # Errors
    /// The device cannot be read.
    pub fn read(self) -> Result<TensorData, OptimError> {
        match self.0 {
            Source::HostSlot(HostSlot::Here(tensor)) => to_host(tensor),
            Source::HostSlot(HostSlot::OffloadedTensor(host)) => host.read(),
            Source::Gathered(_, data) => data,
        }
    }
}

/// What an optimizer keeps of whole local parameters, for a checkpoint, by path.
#[derive(Debug, Default)]
pub struct FullState {
    /// Of narrower parameters, in f32; and parameters that are shared out and have none.
    pub masters: BTreeMap<String, StateTensor>,
    /// Before the first step there are none.
    pub moments: BTreeMap<(Moment, String), StateTensor>,
}

impl Optimizer {
    /// Masters and moments of whole local parameters. Where they are shared out they are gathered, bucket
    /// by bucket, into the memory of the hosts of those ranks that say which, by path, are `wanted`; of the
    /// others there is nothing then.
    ///
    /// # Errors
    /// See [`megaburn_collective::CollectiveError`]. That a device cannot be read is said by
    /// [`StateTensor::read`].
    /// # Collective
    /// Where they are shared out, all ranks that share them; each sends what it keeps.
    pub fn full_state(&self, wanted: impl Fn(&str) -> bool) -> Result<FullState, OptimError> {
        let mut whole = FullState::default();
        let kept = |what: What| -> BTreeMap<String, HostSlot> {
            let kept = self.state.iter().filter(|(key, _)| key.what == what);
            kept.map(|(key, kept)| (key.path.clone(), kept.clone()))
                .collect()
        };
        let mut masters = kept(What::Master);
        let slots = self
            .sharding
            .buckets()
            .iter()
            .flat_map(|bucket| &bucket.slots);
        for path in slots.map(|slot| &slot.path) {
            if !masters.contains_key(path) {
                let part = self.sharding.part(path);
                masters.extend(part.map(|part| (path.clone(), HostSlot::Here(part))));
            }
        }
        self.gather(&masters, &wanted, |path, state| {
            whole.masters.insert(path, state);
        })?;
        for moment in Moment::ALL {
            self.gather(&kept(What::Moment(moment)), &wanted, |path, state| {
                whole.moments.insert((moment, path), state);
            })?;
        }
        Ok(whole)
    }

    /// Every rank keeps something of the same parameters, if it is nothing of them.
    fn gather(
        &self,
        kept: &BTreeMap<String, HostSlot>,
        wanted: impl Fn(&str) -> bool,
        mut give: impl FnMut(String, StateTensor),
    ) -> Result<(), OptimError> {
        for (path, kept) in kept
            .iter()
            .filter(|(path, _)| self.sharding.num_shares(path) == 1)
        {
            give(path.clone(), StateTensor(Source::HostSlot(kept.clone())));
        }
        let is_kept = |slot: &&Slot| kept.contains_key(&slot.path);
        for bucket in self.sharding.buckets() {
            let group = self.sharding.replicas(bucket.kind).share();
            if group.size() == 1 {
                continue;
            }
            // Of what is in host memory no more than a share of a bucket is on the device at once.
            let parts = bucket.slots.iter().filter(is_kept);
            let mut parts: BTreeMap<&str, Tensor<1>> = parts
                .map(|slot| (slot.path.as_str(), kept[&slot.path].tensor()))
                .collect();
            let Some(first) = parts.values().next() else {
                continue;
            };
            let place = (first.device(), first.dtype());
            let zeros = |len| Tensor::zeros([len], (&place.0, place.1));
            let part = |slot: &Slot, range: Range<usize>| {
                parts
                    .remove(slot.path.as_str())
                    .unwrap_or_else(|| zeros(range.len()))
            };
            let share = bucket.join(self.sharding.shard_of(bucket), part, zeros);
            let whole = tensors::all_gather(share, group)?;
            for slot in bucket
                .slots
                .iter()
                .filter(is_kept)
                .filter(|slot| wanted(&slot.path))
            {
                // A rank that cannot read goes on gathering with the others.
                let data = to_host(whole.clone().narrow(0, slot.start, slot.len));
                give(
                    slot.path.clone(),
                    StateTensor(Source::Gathered(whole.dtype(), data)),
                );
            }
        }
        Ok(())
    }
}

fn to_host(tensor: Tensor<1>) -> Result<TensorData, OptimError> {
    tensor.try_into_data().map_err(|error| OptimError::Device {
        why: error.to_string(),
    })
}
