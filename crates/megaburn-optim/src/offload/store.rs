use std::collections::BTreeMap;

use burn::{Tensor, tensor::DType};

use super::{choice::Choice, flight::Flight, host::OnHost};
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
pub(crate) enum Kept {
    Here(Tensor<1>),
    OnHost(OnHost),
}

impl Kept {
    /// The tensor on its device.
    pub(crate) fn tensor(&self) -> Tensor<1> {
        match self {
            Self::Here(tensor) => tensor.clone(),
            Self::OnHost(host) => host.fetch().wait(),
        }
    }

    pub(crate) fn dtype(&self) -> DType {
        match self {
            Self::Here(tensor) => tensor.dtype(),
            Self::OnHost(host) => host.dtype(),
        }
    }
}

/// What an optimizer keeps of parameters, on their device and in host memory. What is in host memory is
/// on the device from when it is taken until it is put back.
#[derive(Clone, Debug, Default)]
pub(crate) struct Store {
    choice: Choice,
    kept: BTreeMap<Key, Kept>,
    flight: Flight,
    /// Why something is not in host memory that should be.
    failed: Option<OptimError>,
    /// Tensors that were taken before they were expected.
    #[cfg(test)]
    pub(crate) num_late: usize,
}

impl Store {
    /// With this fraction in host memory, once it was said of what.
    pub(super) fn set_fraction(&mut self, fraction: f64) {
        self.choice = Choice::new(fraction);
    }

    /// Whether nothing is to be in host memory, and nothing is.
    pub(crate) fn stays(&self) -> bool {
        self.choice.is_none() && self.kept.values().all(|kept| matches!(kept, Kept::Here(_)))
    }

    /// Whether that is so of a parameter.
    pub(crate) fn stays_of(&self, path: &str) -> bool {
        // A master is the first of what there is of one.
        let mut kept = self
            .kept
            .range(Key::master(path)..)
            .take_while(|(key, _)| key.path == path);
        !self.choice.has(path) && kept.all(|(_, kept)| matches!(kept, Kept::Here(_)))
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
            Kept::Here(tensor) => Some(tensor),
            Kept::OnHost(host) => {
                let coming = self.flight.take(key).unwrap_or_else(|| {
                    #[cfg(test)]
                    {
                        self.num_late += 1;
                    }
                    host.fetch()
                });
                // Its memory takes what is put back.
                self.kept.insert(key.clone(), Kept::OnHost(host));
                self.flight.start(&self.kept);
                Some(coming.wait())
            }
        }
    }

    /// Keeps a tensor, where it was chosen to be.
    pub(crate) fn put(&mut self, key: Key, tensor: Tensor<1>) {
        let old = match self.kept.remove(&key) {
            Some(Kept::OnHost(host)) => Some(host),
            _ => None,
        };
        if !self.choice.has(&key.path) {
            self.kept.insert(key, Kept::Here(tensor));
            return;
        }
        let kept = match OnHost::store(tensor.clone(), old) {
            Ok((host, leaving)) => {
                self.flight.leave(host.bytes(), leaving);
                Kept::OnHost(host)
            }
            Err(error) => {
                self.failed.get_or_insert(error);
                Kept::Here(tensor)
            }
        };
        self.kept.insert(key, kept);
    }

    pub(crate) fn remove(&mut self, key: &Key) {
        self.kept.remove(key);
    }

    /// Waits for everything that is on its way; on GPUs the host does not.
    pub(crate) fn land(&mut self) {
        self.flight = Flight::default();
    }

    /// The same.
    ///
    /// # Errors
    /// What could not be put into host memory, and stayed on the device, since this was asked last.
    pub(crate) fn settle(&mut self) -> Result<(), OptimError> {
        self.land();
        self.failed.take().map_or(Ok(()), Err)
    }

    pub(crate) fn get(&self, key: &Key) -> Option<&Kept> {
        self.kept.get(key)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&Key, &Kept)> {
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
