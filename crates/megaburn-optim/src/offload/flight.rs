use std::collections::{BTreeMap, VecDeque};

use super::{
    host::{Coming, Leaving},
    store::{Kept, Key},
};

/// Bytes that are on their way in each direction, and one tensor at the least: small ones take longer to be
/// started than to be copied, and of large ones more would take memory and no less time. (Those of tests
/// are smaller still.)
const BYTES: usize = if cfg!(test) { 64 } else { 256 << 20 };

/// What is between a device and host memory. There is nothing between two steps.
#[derive(Debug, Default)]
pub(super) struct Flight {
    /// What will be asked for, in this order, and did not start.
    ahead: VecDeque<Key>,
    coming: BTreeMap<Key, (usize, Coming)>,
    /// The oldest first.
    leaving: VecDeque<(usize, Leaving)>,
}

impl Clone for Flight {
    /// A clone's tensors are where the others came from.
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl Flight {
    pub(super) fn expect(&mut self, order: impl Iterator<Item = Key>) {
        self.ahead = order.collect();
    }

    /// What was started for `key`; it is asked for now, and is not ahead any more.
    pub(super) fn take(&mut self, key: &Key) -> Option<Coming> {
        let coming = self.coming.remove(key).map(|(_, coming)| coming);
        if coming.is_none() {
            self.ahead.retain(|ahead| ahead != key);
        }
        coming
    }

    /// Starts what is next, until enough is on its way.
    pub(super) fn start(&mut self, kept: &BTreeMap<Key, Kept>) {
        while is_little(self.coming.values().map(|(bytes, _)| *bytes)) {
            let Some(next) = self.ahead.pop_front() else {
                return;
            };
            if let Some(Kept::OnHost(host)) = kept.get(&next) {
                self.coming.insert(next, (host.bytes(), host.fetch()));
            }
        }
    }

    /// That something leaves. What left before and is too much is waited for.
    pub(super) fn leave(&mut self, bytes: usize, leaving: Leaving) {
        while !is_little(self.leaving.iter().map(|(bytes, _)| *bytes)) {
            self.leaving.pop_front();
        }
        self.leaving.push_back((bytes, leaving));
    }
}

fn is_little(sizes: impl ExactSizeIterator<Item = usize>) -> bool {
    sizes.len() == 0 || sizes.sum::<usize>() < BYTES
}
