use std::collections::BTreeMap;

use burn::{Tensor, tensor::DType};

use super::{choice::OffloadChoice, h2d_prefetch::H2dPrefetch, host::OffloadedTensor};
use crate::{Moment, OptimError};

/// Names a tensor of state.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) path: String,
    pub(crate) what: What,
}

/// What a tensor of state is to its parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum What {
    Master,
    Moment(Moment),
}

impl Key {
    pub(crate) fn master(path: &str) -> Self {
        Self {
            path: path.to_string(),
            what: What::Master,
        }
    }

    pub(crate) fn moment(path: &str, moment: Moment) -> Self {
        Self {
            path: path.to_string(),
            what: What::Moment(moment),
        }
    }
}

/// A tensor of state, where it is kept.
#[derive(Clone, Debug)]
pub(crate) enum HostSlot {
    Here(Tensor<1>),
    OffloadedTensor(OffloadedTensor),
}

impl HostSlot {
    /// The tensor on its device.
    pub(crate) fn tensor(&self) -> Tensor<1> {
        match self {
            Self::Here(tensor) => tensor.clone(),
            Self::OffloadedTensor(host) => host.fetch().wait(),
        }
    }

    pub(crate) fn dtype(&self) -> DType {
        match self {
            Self::Here(tensor) => tensor.dtype(),
            Self::OffloadedTensor(host) => host.dtype(),
        }
    }
}

/// What an optimizer keeps of parameters, on their device and in host memory. What is in host memory is
/// on the device from when it is taken until it is put back.
#[derive(Clone, Debug, Default)]
pub(crate) struct Store {
    choice: OffloadChoice,
    kept: BTreeMap<Key, HostSlot>,
    flight: H2dPrefetch,
    /// Why something is not in host memory that should be.
    failed: Option<OptimError>,
    /// Tensors that were taken before they were expected.
    #[cfg(test)]
    pub(crate) num_late_tensors: usize,
}

impl Store {
    /// With this fraction in host memory, once it was said of what.
    pub(super) fn set_fraction(&mut self, fraction: f64) {
        self.choice = OffloadChoice::new(fraction);
    }

    /// Whether nothing is to be in host memory, and nothing is.
    pub(crate) fn stays_on_gpu(&self) -> bool {
        self.choice.is_none()
            && self
                .kept
                .values()
                .all(|kept| matches!(kept, HostSlot::Here(_)))
    }

    /// Whether that is so of a parameter.
    pub(crate) fn stays_on_gpu_of(&self, path: &str) -> bool {
        // A master is the first of what there is of one.
        let mut kept = self
            .kept
            .range(Key::master(path)..)
            .take_while(|(key, _)| key.path == path);
        !self.choice.has(path) && kept.all(|(_, kept)| matches!(kept, HostSlot::Here(_)))
    }

    /// Says what there will be, by path and elements, in the order of updates.
    pub(super) fn choose<'a>(&mut self, params: impl IntoIterator<Item = (&'a str, usize)>) {
        self.choice.choose(params);
    }

    /// Says what will be taken, in this order: the first of what is in host memory starts to come.
    pub(super) fn expect(&mut self, order: impl Iterator<Item = Key>) {
        self.flight.expect(order);
        self.flight.start(&self.kept);
    }

    /// The tensor on its device, for [`put`](Self::put) to replace.
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
                // Its memory takes what is put back.
                self.kept
                    .insert(key.clone(), HostSlot::OffloadedTensor(host));
                self.flight.start(&self.kept);
                Some(h2d.wait())
            }
        }
    }

    /// Keeps a tensor, where it was chosen to be.
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

    /// Waits for everything that is on its way; on GPUs the host does not.
    pub(crate) fn land(&mut self) {
        self.flight = H2dPrefetch::default();
    }

    /// The same.
    ///
    /// # Errors
    /// What could not be put into host memory, and stayed on the device, since this was asked last.
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

    /// The same without moments.
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
