//! Limits the bytes of memory that the encoding of texts needs at a time.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Of texts up to this size nothing else is looked at.
const FEW_BYTES: usize = 1 << 14;

/// A number of bytes that may be in use. What does not fit waits, except for something that is
/// larger than everything: that is let through alone.
#[derive(Clone, Debug)]
pub(super) struct Budget(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    limit: usize,
    in_use: Mutex<usize>,
    released: Condvar,
}

/// Bytes in use, until it is dropped.
#[derive(Debug)]
pub(super) struct Reserved {
    shared: Arc<Shared>,
    num_bytes: usize,
}

impl Budget {
    pub(super) fn new(limit: usize) -> Self {
        Self(Arc::new(Shared {
            limit,
            in_use: Mutex::new(0),
            released: Condvar::new(),
        }))
    }

    /// Waits until `num_bytes` more may be in use.
    pub(super) fn reserve(&self, num_bytes: usize) -> Reserved {
        let Shared {
            limit, released, ..
        } = &*self.0;
        let is_too_much = |in_use: &mut usize| *in_use > 0 && *in_use + num_bytes > *limit;
        let in_use = released.wait_while(self.0.in_use(), is_too_much);
        *in_use.unwrap_or_else(PoisonError::into_inner) += num_bytes;
        Reserved {
            shared: self.0.clone(),
            num_bytes,
        }
    }
}

/// The bytes of the longest part of a text in which no space follows something else, nor something
/// else a space. Of a text of a few bytes it is all of them: it need not be known.
pub(super) fn longest_word(text: &[u8]) -> usize {
    if text.len() <= FEW_BYTES {
        return text.len();
    }
    let parts = text.chunk_by(|left, right| (*left == b' ') == (*right == b' '));
    parts.map(<[u8]>::len).max().unwrap_or(0)
}

impl Shared {
    fn in_use(&self) -> MutexGuard<'_, usize> {
        self.in_use.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        *self.shared.in_use() -= self.num_bytes;
        self.shared.released.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread;

    use super::*;

    #[test]
    fn the_longest_word_or_run_of_spaces_counts() {
        let text =
            |word: &str, spaces: usize| "a bc ".repeat(FEW_BYTES) + word + &" ".repeat(spaces);
        assert_eq!(longest_word(text("größer", 3).as_bytes()), 8);
        assert_eq!(longest_word(text("x", 9).as_bytes()), 9);
        assert_eq!(longest_word(b"a bc"), 4);
        assert_eq!(longest_word(b""), 0);
    }

    #[test]
    fn what_does_not_fit_waits_and_what_is_larger_than_everything_passes_alone() {
        let budget = Budget::new(10);
        let (first, second) = (budget.reserve(6), budget.reserve(4));
        let (send, passed) = channel();
        let waiting = budget.clone();
        let thread = thread::spawn(move || {
            let large = waiting.reserve(100);
            send.send(()).unwrap();
            drop(large);
            waiting.reserve(10)
        });
        drop(first);
        assert!(passed.try_recv().is_err(), "something else is in use");
        drop(second);
        passed.recv().unwrap();
        assert_eq!(thread.join().unwrap().num_bytes, 10);
        assert_eq!(*budget.0.in_use(), 0);
    }
}
