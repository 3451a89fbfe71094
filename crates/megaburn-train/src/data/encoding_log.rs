//! Lines about a text that is encoded into the cache.

use std::time::{Duration, Instant};

use megaburn_collective::Progress;
use megaburn_data::TextCacheEvent;

/// The time between two lines.
const INTERVAL: Duration = Duration::from_secs(5);

/// Logs what one process does to a text, and reports it to the ranks that wait.
pub(super) struct EncodingLog<'a> {
    path: &'a str,
    progress: &'a Progress,
    begun: Instant,
    /// When the last line was logged.
    logged: Instant,
    /// Number of bytes of the text, and of its part that this process has encoded.
    num_bytes: u64,
    done: u64,
}

impl<'a> EncodingLog<'a> {
    pub(super) fn new(path: &'a str, progress: &'a Progress) -> Self {
        let now = Instant::now();
        Self {
            path,
            progress,
            begun: now,
            logged: now,
            num_bytes: 0,
            done: 0,
        }
    }

    pub(super) fn event(&mut self, event: TextCacheEvent) {
        let path = self.path;
        match event {
            TextCacheEvent::Encoding { prefix, num_bytes } => {
                let prefix = prefix.display();
                let size = num_bytes as f64 / 1e6;
                tracing::info!(
                    "encoding {path} ({size:.1} MB) into {prefix}.bin, which later runs read"
                );
                self.progress.expect(num_bytes);
                self.num_bytes = num_bytes;
            }
            TextCacheEvent::Encoded(num_bytes) => {
                self.progress.add(num_bytes);
                self.done += num_bytes;
                if self.logged.elapsed() >= INTERVAL {
                    self.logged = Instant::now();
                    self.line();
                }
            }
            TextCacheEvent::Waiting => self.progress.add(0),
        }
    }

    fn line(&self) {
        let seconds = self.begun.elapsed().as_secs_f64();
        let rate = self.done as f64 / seconds;
        let percent = 100.0 * self.done as f64 / self.num_bytes.max(1) as f64;
        let left = self.num_bytes.saturating_sub(self.done) as f64 / rate.max(1.0);
        let path = self.path;
        tracing::info!(
            "encoded {percent:.0}% of {path}: {:.1} MB/s, {left:.0} s left",
            rate / 1e6
        );
    }
}
