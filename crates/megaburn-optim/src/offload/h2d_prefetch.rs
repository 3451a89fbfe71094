use std::collections::{BTreeMap, VecDeque};

use super::{
    host::{D2hCopy, H2dCopy},
    slot::{HostSlot, Key},
};

/// Bytes in flight in each direction; at least one tensor is always in flight. Starting a small
/// copy takes longer than the copy itself; more bytes of large tensors would cost memory and save
/// no time. (Tests use a lower limit.)
const BYTES: usize = if cfg!(test) { 64 } else { 256 << 20 };

/// Copies in flight between a device and host memory. None are in flight between two steps.
#[derive(Debug, Default)]
pub(super) struct H2dPrefetch {
    /// Tensors that will be taken, in this order, and whose copies have not started.
    ahead: VecDeque<Key>,
    h2d: BTreeMap<Key, (usize, H2dCopy)>,
    /// Oldest first.
    d2h: VecDeque<(usize, D2hCopy)>,
}

impl Clone for H2dPrefetch {
    /// A clone's tensors are not in flight, so it starts empty.
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl H2dPrefetch {
    pub(super) fn expect(&mut self, order: impl Iterator<Item = Key>) {
        self.ahead = order.collect();
    }

    /// Returns the copy that was started for `key`, if any, and removes `key` from `ahead`.
    pub(super) fn take(&mut self, key: &Key) -> Option<H2dCopy> {
        let h2d = self.h2d.remove(key).map(|(_, h2d)| h2d);
        if h2d.is_none() {
            self.ahead.retain(|ahead| ahead != key);
        }
        h2d
    }

    /// Starts the next copies until enough bytes are in flight.
    pub(super) fn start(&mut self, kept: &BTreeMap<Key, HostSlot>) {
        while is_little(self.h2d.values().map(|(bytes, _)| *bytes)) {
            let Some(next) = self.ahead.pop_front() else {
                return;
            };
            if let Some(HostSlot::OffloadedTensor(host)) = kept.get(&next) {
                self.h2d.insert(next, (host.bytes(), host.fetch()));
            }
        }
    }

    /// Records a copy to host memory that has started. If too many bytes are in flight, waits for
    /// the oldest copies first.
    pub(super) fn leave(&mut self, bytes: usize, d2h: D2hCopy) {
        while !is_little(self.d2h.iter().map(|(bytes, _)| *bytes)) {
            self.d2h.pop_front();
        }
        self.d2h.push_back((bytes, d2h));
    }
}

fn is_little(sizes: impl ExactSizeIterator<Item = usize>) -> bool {
    sizes.len() == 0 || sizes.sum::<usize>() < BYTES
}
