//! A queue with a writer thread, so that a program never waits for the reader of its output.

use std::{
    fmt, io,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
        mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

/// How often a waiting caller retries.
const TICK: Duration = Duration::from_millis(5);

/// The argument of an [`OutputQueue`]'s write function, in order.
#[derive(Debug, PartialEq, Eq)]
pub enum Output<T> {
    /// An item that was pushed.
    Item(T),
    /// This number of items was dropped here, because the queue was full.
    Dropped(u64),
}

/// A bounded queue of output. A thread takes the items and writes them. If the reader is slower
/// than the writer, items are dropped and counted, and the program continues.
///
/// Clones share the queue. The thread ends when the last clone is dropped and everything is
/// written.
pub struct OutputQueue<T> {
    items: SyncSender<(u64, T)>,
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    /// Items dropped since the last one that was accepted.
    dropped: AtomicU64,
    /// Items accepted and not yet written.
    waiting: AtomicUsize,
}

impl<T> Clone for OutputQueue<T> {
    fn clone(&self) -> Self {
        Self {
            items: self.items.clone(),
            counts: self.counts.clone(),
        }
    }
}

impl<T> fmt::Debug for OutputQueue<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OutputQueue")
            .field("counts", &self.counts)
            .finish_non_exhaustive()
    }
}

impl<T: Send + 'static> OutputQueue<T> {
    /// Creates a queue of at most `capacity` items; `write` is called with them on a thread named
    /// `name`.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn spawn(
        name: &str,
        capacity: usize,
        write: impl FnMut(Output<T>) + Send + 'static,
    ) -> io::Result<Self> {
        let (items, taken) = sync_channel(capacity);
        let counts = Arc::new(Counts::default());
        let shared = counts.clone();
        let work = move || write_all(&taken, &shared, write);
        thread::Builder::new().name(name.into()).spawn(work)?;
        Ok(Self { items, counts })
    }

    /// Adds an item; drops it if the queue is full. Never waits.
    pub fn push(&self, item: T) {
        self.offer(item)
            .err()
            .into_iter()
            .for_each(|_| self.drop_one());
    }

    /// Adds an item unless the queue is full. An item that is not added does not count as dropped.
    /// Never waits.
    pub fn push_if_room(&self, item: T) {
        let _ = self.offer(item);
    }

    /// Adds an item. If the queue is full, it waits for at most `patience` and then drops the item.
    /// Once items are being dropped, callers no longer wait, until the queue has space.
    pub fn push_within(&self, item: T, patience: Duration) {
        let until = Instant::now() + patience;
        let mut item = item;
        while let Err(back) = self.offer(item) {
            if self.counts.dropped.load(Ordering::Relaxed) > 0 || Instant::now() >= until {
                return self.drop_one();
            }
            item = back;
            thread::sleep(TICK);
        }
    }

    /// Returns when everything is written, or when nothing was written for `patience`. Returns
    /// whether everything is written.
    pub fn flush(&self, patience: Duration) -> bool {
        let mut last = usize::MAX;
        let mut since = Instant::now();
        loop {
            let waiting = self.counts.waiting.load(Ordering::Acquire);
            if waiting == 0 {
                return true;
            }
            if waiting != last {
                last = waiting;
                since = Instant::now();
            } else if since.elapsed() >= patience {
                return false;
            }
            thread::sleep(TICK);
        }
    }

    fn offer(&self, item: T) -> Result<(), T> {
        let dropped = self.counts.dropped.swap(0, Ordering::Relaxed);
        self.counts.waiting.fetch_add(1, Ordering::AcqRel);
        match self.items.try_send((dropped, item)) {
            Ok(()) => Ok(()),
            Err(
                TrySendError::Full((dropped, item)) | TrySendError::Disconnected((dropped, item)),
            ) => {
                self.counts.waiting.fetch_sub(1, Ordering::AcqRel);
                self.counts.dropped.fetch_add(dropped, Ordering::Relaxed);
                Err(item)
            }
        }
    }

    fn drop_one(&self) {
        self.counts.dropped.fetch_add(1, Ordering::Relaxed);
    }
}

fn write_all<T>(taken: &Receiver<(u64, T)>, counts: &Counts, mut write: impl FnMut(Output<T>)) {
    while let Ok((dropped, item)) = taken.recv() {
        if dropped > 0 {
            write(Output::Dropped(dropped));
        }
        write(Output::Item(item));
        // Items dropped after the last accepted one are reported as soon as the queue is empty.
        if counts.waiting.load(Ordering::Acquire) == 1 {
            let dropped = counts.dropped.swap(0, Ordering::Relaxed);
            if dropped > 0 {
                write(Output::Dropped(dropped));
            }
        }
        counts.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Mutex,
        mpsc::{Sender, channel},
    };

    use super::*;

    /// The output that a test writer wrote.
    type Written = Arc<Mutex<Vec<Output<u32>>>>;

    /// A queue whose writer waits for a signal before each item, the sender of these signals, and
    /// the written output.
    fn slow(capacity: usize) -> (OutputQueue<u32>, Sender<()>, Written) {
        let (go, turn) = channel::<()>();
        let written = Arc::new(Mutex::new(Vec::new()));
        let to = written.clone();
        let write = move |output| {
            if matches!(output, Output::Item(_)) {
                // If the sender is gone, the writer continues without waiting.
                let _ = turn.recv();
            }
            to.lock().unwrap().push(output);
        };
        (
            OutputQueue::spawn("test", capacity, write).unwrap(),
            go,
            written,
        )
    }

    #[test]
    fn nobody_waits_for_a_reader_that_pauses_and_what_is_dropped_is_told_in_its_place() {
        let (queue, go, written) = slow(2);
        queue.push(0);
        // Once the thread has taken the first item, the queue has space for two more.
        queue.push_within(1, Duration::from_secs(5));
        queue.push_within(2, Duration::from_secs(5));
        let begin = Instant::now();
        (3..100).for_each(|item| queue.push(item));
        queue.push_within(100, Duration::from_millis(50));
        assert!(
            begin.elapsed() < Duration::from_secs(2),
            "{:?}",
            begin.elapsed()
        );
        assert!(
            !queue.flush(Duration::from_millis(20)),
            "it cannot have been written"
        );
        go.send(()).unwrap();
        queue.push_within(101, Duration::ZERO);
        drop(go);
        assert!(queue.flush(Duration::from_secs(5)));
        let written = written.lock().unwrap();
        let items = written
            .iter()
            .filter(|output| matches!(output, Output::Item(_)))
            .count();
        let dropped = |output: &Output<u32>| match output {
            Output::Dropped(count) => *count,
            Output::Item(_) => 0,
        };
        let lost: u64 = written.iter().map(dropped).sum();
        assert_eq!(written[0], Output::Item(0));
        assert_eq!(items as u64 + lost, 102, "{written:?}");
        assert!(
            lost >= 97 && matches!(written[3], Output::Dropped(_)),
            "{written:?}"
        );
    }

    #[test]
    fn a_slow_reader_gets_everything_from_who_waits() {
        let (queue, go, written) = slow(1);
        let reader = thread::spawn(move || {
            for _ in 0..20 {
                thread::sleep(Duration::from_millis(1));
                go.send(()).unwrap();
            }
        });
        (0..20).for_each(|item| queue.push_within(item, Duration::from_secs(10)));
        assert!(queue.flush(Duration::from_secs(10)));
        reader.join().unwrap();
        assert_eq!(
            *written.lock().unwrap(),
            (0..20).map(Output::Item).collect::<Vec<_>>()
        );
    }
}
