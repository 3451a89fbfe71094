use std::{collections::BTreeMap, ops::Range};

use burn::{
    Tensor,
    tensor::{DType, TensorData},
};
use megaburn_collective::{Lane, tensors};

use crate::{
    error::OptimError,
    moment::Moment,
    offload::{HostSlot, What},
    optimizer::Optimizer,
    sharding::Slot,
};

/// One tensor of optimizer state, for an unsharded local parameter.
#[derive(Clone, Debug)]
pub struct StateTensor(Source);

#[derive(Clone, Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "there is one per parameter, while a checkpoint is saved"
)]
enum Source {
    /// Stored on this rank, on its device or in host memory.
    HostSlot(HostSlot),
    /// Gathered from the ranks that shard it, or the error of reading it.
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

/// The optimizer state of unsharded local parameters by path, for a checkpoint.
#[derive(Debug, Default)]
pub struct FullState {
    /// The f32 masters of narrower parameters, and sharded parameters that have no master.
    pub masters: BTreeMap<String, StateTensor>,
    /// Empty before the first step.
    pub moments: BTreeMap<(Moment, String), StateTensor>,
}

impl Optimizer {
    /// Masters and moments of unsharded local parameters. Where the state is sharded, it is
    /// gathered bucket by bucket into host memory, on those ranks whose `wanted` returns true for
    /// the path; on other ranks such a parameter has no entry.
    ///
    /// # Errors
    /// See [`megaburn_collective::CollectiveError`]. A device that cannot be read is reported by
    /// [`StateTensor::read`].
    /// # Collective
    /// Where the state is sharded: all ranks that shard it. Each sends the part that it keeps.
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

    /// Passes the full tensors of `kept` to `give`. Every rank has an entry for the same
    /// parameters, if only an empty one, so that all ranks gather the same buckets.
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
            // Offloaded state is on the device one bucket at a time, and only this rank's shard.
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
            let whole = tensors::all_gather(share, group, Lane::InOrder)?.wait();
            for slot in bucket
                .slots
                .iter()
                .filter(is_kept)
                .filter(|slot| wanted(&slot.path))
            {
                // A rank that cannot read keeps gathering, because the others wait for it.
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
