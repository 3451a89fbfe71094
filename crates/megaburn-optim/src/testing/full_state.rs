//! The optimizer state of unsharded local parameters, gathered from all ranks.

use std::{collections::BTreeMap, ops::Range};

use burn::{Tensor, tensor::DType};
use megaburn_collective::{Lane, tensors};

use crate::{
    error::OptimError,
    moment::Moment,
    offload::{HostSlot, What},
    optimizer::Optimizer,
    sharding::Slot,
    testing::values,
};

/// Masters (or sharded parameters that have none) and moments, in f32.
pub(crate) type FullState = BTreeMap<(Option<Moment>, String), Vec<f32>>;

/// The state of all parameters of this rank.
///
/// # Collective
/// All ranks that shard it.
pub(crate) fn full_state(optimizer: &Optimizer) -> Result<FullState, OptimError> {
    let sharding = &optimizer.sharding;
    let mut kept: BTreeMap<(Option<Moment>, String), HostSlot> = BTreeMap::new();
    for (key, slot) in optimizer.state.iter() {
        let moment = match key.what {
            What::Master => None,
            What::Moment(moment) => Some(moment),
        };
        kept.insert((moment, key.path.clone()), slot.clone());
    }
    for slot in sharding.buckets().iter().flat_map(|bucket| &bucket.slots) {
        if let Some(part) = sharding.part(&slot.path) {
            kept.entry((None, slot.path.clone()))
                .or_insert(HostSlot::Here(part));
        }
    }
    let mut full = FullState::new();
    let whats = [None].into_iter().chain(Moment::ALL.map(Some));
    for what in whats {
        for bucket in sharding.buckets() {
            let group = sharding.replicas(bucket.kind).share();
            let key = |slot: &Slot| (what, slot.path.clone());
            let mut parts: BTreeMap<_, Tensor<1>> = BTreeMap::new();
            for slot in &bucket.slots {
                if let Some(kept) = kept.get(&key(slot)) {
                    parts.insert(slot.path.clone(), kept.tensor());
                }
            }
            let Some(first) = parts.values().next() else {
                continue;
            };
            let paths: Vec<_> = parts.keys().cloned().collect();
            let place = (first.device(), first.dtype());
            let zeros = |len| Tensor::zeros([len], (&place.0, place.1));
            let part = |slot: &Slot, range: Range<usize>| {
                parts
                    .remove(&slot.path)
                    .unwrap_or_else(|| zeros(range.len()))
            };
            let share = bucket.join(sharding.shard_of(bucket), part, zeros);
            let whole = tensors::all_gather(share, group, Lane::InOrder)?.wait();
            for slot in bucket
                .slots
                .iter()
                .filter(|slot| paths.contains(&slot.path))
            {
                let value = whole.clone().narrow(0, slot.start, slot.len);
                full.insert(key(slot), values(value.cast(DType::F32)));
            }
        }
    }
    // Parameters outside of all buckets are not sharded.
    for (key, slot) in kept {
        full.entry(key)
            .or_insert_with(|| values(slot.tensor().cast(DType::F32)));
    }
    Ok(full)
}
