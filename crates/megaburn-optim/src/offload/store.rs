use std::collections::BTreeMap;

use burn::Tensor;

use super::{
    choice::OffloadChoice,
    h2d_prefetch::H2dPrefetch,
    host::OffloadedTensor,
    slot::{HostSlot, Key, What},
};
use crate::error::OptimError;

/// The state of an optimizer, on the device and in host memory. An offloaded tensor is on the
/// device only from [`take`](Self::take) to [`put`](Self::put).
#[derive(Clone, Debug, Default)]
pub(crate) struct Store {
    choice: OffloadChoice,
    kept: BTreeMap<Key, HostSlot>,
    flight: H2dPrefetch,
    /// The first failure to offload a tensor.
    failed: Option<OptimError>,
    /// Tensors that were taken before their prefetch started.
    #[cfg(test)]
    pub(crate) num_late_tensors: usize,
}

impl Store {
    /// Sets the fraction to offload; [`choose`](Self::choose) chooses the parameters.
    pub(super) fn set_fraction(&mut self, fraction: f64) {
        self.choice = OffloadChoice::new(fraction);
    }

    /// Whether no state is, or will be, in host memory.
    pub(crate) fn stays_on_gpu(&self) -> bool {
        self.choice.is_none()
            && self
                .kept
                .values()
                .all(|kept| matches!(kept, HostSlot::Here(_)))
    }

    /// Whether no state of the parameter at `path` is, or will be, in host memory.
    pub(crate) fn stays_on_gpu_of(&self, path: &str) -> bool {
        // The master sorts first among the keys of a path.
        let mut kept = self
            .kept
            .range(Key::master(path)..)
            .take_while(|(key, _)| key.path == path);
        !self.choice.has(path) && kept.all(|(_, kept)| matches!(kept, HostSlot::Here(_)))
    }

    /// Chooses which parameters to offload, from pairs of path and elements in update order.
    pub(super) fn choose<'a>(&mut self, params: impl IntoIterator<Item = (&'a str, usize)>) {
        self.choice.choose(params);
    }

    /// Announces the keys that will be taken, in this order, and starts to prefetch the first
    /// offloaded ones.
    pub(super) fn expect(&mut self, order: impl Iterator<Item = Key>) {
        self.flight.expect(order);
        self.flight.start(&self.kept);
    }

    /// Takes the tensor, on its device; [`put`](Self::put) replaces it.
    pub(crate) fn take(&mut self, key: &Key) -> Option<Tensor<1>> {
        match self.kept.remove(key)? {
            HostSlot::Here(tensor) => Some(tensor),
            HostSlot::OffloadedTensor(host) => {
                let h2d = self.flight.take(key).unwrap_or_else(|| {
                    #[cfg(test)]
                    {
                        self.num_late_tensors += 1;
                    }
                    host.fetch()
                });
                // The host memory stays allocated for what `put` copies back.
                self.kept
                    .insert(key.clone(), HostSlot::OffloadedTensor(host));
                self.flight.start(&self.kept);
                Some(h2d.wait())
            }
        }
    }

    /// Stores a tensor, in host memory if its parameter was chosen for that.
    pub(crate) fn put(&mut self, key: Key, tensor: Tensor<1>) {
        let old = match self.kept.remove(&key) {
            Some(HostSlot::OffloadedTensor(host)) => Some(host),
            _ => None,
        };
        if !self.choice.has(&key.path) {
            self.kept.insert(key, HostSlot::Here(tensor));
            return;
        }
        let kept = match OffloadedTensor::store(tensor.clone(), old) {
            Ok((host, d2h)) => {
                self.flight.leave(host.bytes(), d2h);
                HostSlot::OffloadedTensor(host)
            }
            Err(error) => {
                self.failed.get_or_insert(error);
                HostSlot::Here(tensor)
            }
        };
        self.kept.insert(key, kept);
    }

    pub(crate) fn remove(&mut self, key: &Key) {
        self.kept.remove(key);
    }

    /// Waits for all copies in flight; on GPUs the host does not wait.
    pub(crate) fn land(&mut self) {
        self.flight = H2dPrefetch::default();
    }

    /// Like [`land`](Self::land), and reports failures.
    ///
    /// # Errors
    /// The first tensor since the last call that could not be moved to host memory. It stayed on
    /// the device.
    pub(crate) fn settle(&mut self) -> Result<(), OptimError> {
        self.land();
        self.failed.take().map_or(Ok(()), Err)
    }

    pub(crate) fn get(&self, key: &Key) -> Option<&HostSlot> {
        self.kept.get(key)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&Key, &HostSlot)> {
        self.kept.iter()
    }

    /// A store with the masters only, and the same choice of parameters.
    pub(crate) fn masters(&self) -> Self {
        let masters = self.kept.iter().filter(|(key, _)| key.what == What::Master);
        let kept = masters
            .map(|(key, kept)| (key.clone(), kept.clone()))
            .collect();
        Self {
            kept,
            choice: self.choice.clone(),
            ..Self::default()
        }
    }
}
