use std::collections::{BTreeMap, VecDeque};

use super::{
    host::{D2hCopy, H2dCopy},
    store::{HostSlot, Key},
};

/// Bytes that are on their way in each direction, and one tensor at the least: small ones take longer to be
/// started than to be copied, and of large ones more would take memory and no less time. (Those of tests
/// are smaller still.)
const BYTES: usize = if cfg!(test) { 64 } else { 256 << 20 };

/// What is between a device and host memory. There is nothing between two steps.
#[derive(Debug, Default)]
pub(super) struct H2dPrefetch {
    /// What will be asked for, in this order, and did not start.
    ahead: VecDeque<Key>,
    h2d: BTreeMap<Key, (usize, H2dCopy)>,
    /// The oldest first.
    d2h: VecDeque<(usize, D2hCopy)>,
}

impl Clone for H2dPrefetch {
    /// A clone's tensors are where the others came from.
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl H2dPrefetch {
    pub(super) fn expect(&mut self, order: impl Iterator<Item = Key>) {
        self.ahead = order.collect();
    }

    /// What was started for `key`; it is asked for now, and is not ahead any more.
    pub(super) fn take(&mut self, key: &Key) -> Option<H2dCopy> {
        let h2d = self.h2d.remove(key).map(|(_, h2d)| h2d);
        if h2d.is_none() {
            self.ahead.retain(|ahead| ahead != key);
        }
        h2d
    }

    /// Starts what is next, until enough is on its way.
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

    /// That something leaves. What left before and is too much is waited for.
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
