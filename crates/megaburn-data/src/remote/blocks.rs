//! The blocks of an object that are in memory, or on the way.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Number of readers whose last reads are remembered, such as training and validation.
const NUM_READERS: usize = 8;
/// A read follows another one if it begins at most this many bytes before or after its end.
/// Samples overlap by a token.
const NEAR: u64 = 1 << 16;

/// At most a fixed number of blocks, of which the one that was not read for longest is replaced.
#[derive(Clone, Debug)]
pub(super) struct Blocks(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    capacity: usize,
    state: Mutex<State>,
    /// A block arrived, or a request for one failed.
    arrived: Condvar,
}

#[derive(Debug, Default)]
struct State {
    blocks: HashMap<u64, Block>,
    /// Number of reads so far, which says when a block was read last.
    num_reads: u64,
    /// Where the last reads ended, with their numbers.
    ends: Vec<(u64, u64)>,
}

#[derive(Debug)]
enum Block {
    Requested,
    Ready { bytes: Vec<u8>, last_read: u64 },
}

/// What to do for a block.
pub(super) enum Found {
    /// Its bytes were copied.
    Copied,
    /// It has to be requested, and there is a place for it.
    Reserved(Reserved),
    /// It has to be requested, and every place is taken by a block on the way.
    NoPlace,
}

/// The place of a block that is requested. It is given up if it is dropped.
#[derive(Debug)]
pub(super) struct Reserved {
    blocks: Blocks,
    block: u64,
}

impl Blocks {
    pub(super) fn new(capacity: usize) -> Self {
        Self(Arc::new(Shared {
            capacity,
            state: Mutex::default(),
            arrived: Condvar::new(),
        }))
    }

    pub(super) fn capacity(&self) -> usize {
        self.0.capacity
    }

    /// Notes a read of bytes, and says whether it follows another one.
    pub(super) fn follows(&self, begin: u64, end: u64) -> bool {
        let mut state = self.state();
        state.num_reads += 1;
        let number = state.num_reads;
        let mut ends = state.ends.iter_mut();
        if let Some(reader) = ends.find(|(last, _)| begin.abs_diff(*last) <= NEAR) {
            *reader = (end, number);
            return true;
        }
        if state.ends.len() == NUM_READERS {
            let oldest = state.ends.iter_mut().min_by_key(|(_, number)| *number);
            if let Some(oldest) = oldest {
                *oldest = (end, number);
            }
        } else {
            state.ends.push((end, number));
        }
        false
    }

    /// Copies bytes of a block, from `offset` on, waiting if it is on the way.
    pub(super) fn copy_or_reserve(&self, block: u64, offset: usize, to: &mut [u8]) -> Found {
        let mut state = self.state();
        loop {
            if state.copy(block, offset, to) {
                return Found::Copied;
            }
            if !state.blocks.contains_key(&block) {
                return match self.reserve_in(&mut state, block) {
                    Some(reserved) => Found::Reserved(reserved),
                    None => Found::NoPlace,
                };
            }
            let waited = self.0.arrived.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Copies bytes of a block if it is in memory.
    pub(super) fn copy(&self, block: u64, offset: usize, to: &mut [u8]) -> bool {
        self.state().copy(block, offset, to)
    }

    /// A place for a block that is neither in memory nor on the way.
    pub(super) fn reserve(&self, block: u64) -> Option<Reserved> {
        let mut state = self.state();
        if state.blocks.contains_key(&block) {
            return None;
        }
        self.reserve_in(&mut state, block)
    }

    fn reserve_in(&self, state: &mut State, block: u64) -> Option<Reserved> {
        if state.blocks.len() >= self.0.capacity {
            let ready = state.blocks.iter().filter_map(|(block, of)| match of {
                Block::Ready { last_read, .. } => Some((*last_read, *block)),
                Block::Requested => None,
            });
            let (_, oldest) = ready.min()?;
            state.blocks.remove(&oldest);
        }
        state.blocks.insert(block, Block::Requested);
        Some(Reserved {
            blocks: self.clone(),
            block,
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        let state = self.0.state.lock();
        state.unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of bytes in memory, and of blocks in memory or on the way.
    #[cfg(test)]
    pub(super) fn size(&self) -> (usize, usize) {
        let state = self.state();
        let ready = state.blocks.values().map(|block| match block {
            Block::Ready { bytes, .. } => bytes.capacity(),
            Block::Requested => 0,
        });
        (ready.sum(), state.blocks.len())
    }
}

impl State {
    fn copy(&mut self, block: u64, offset: usize, to: &mut [u8]) -> bool {
        let Some(Block::Ready { bytes, last_read }) = self.blocks.get_mut(&block) else {
            return false;
        };
        let Some(from) = bytes.get(offset..offset + to.len()) else {
            return false;
        };
        to.copy_from_slice(from);
        self.num_reads += 1;
        *last_read = self.num_reads;
        true
    }
}

impl Reserved {
    /// Puts the block into its place.
    pub(super) fn fill(self, bytes: Vec<u8>) {
        let mut state = self.blocks.state();
        state.num_reads += 1;
        let last_read = state.num_reads;
        let ready = Block::Ready { bytes, last_read };
        state.blocks.insert(self.block, ready);
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let mut state = self.blocks.state();
        if let Some(Block::Requested) = state.blocks.get(&self.block) {
            state.blocks.remove(&self.block);
        }
        drop(state);
        self.blocks.0.arrived.notify_all();
    }
}
