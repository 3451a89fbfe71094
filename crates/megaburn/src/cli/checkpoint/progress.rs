//! Shows on standard error how far the reading of files is: a bar on a terminal, plain lines
//! elsewhere.

use std::{
    io::{self, IsTerminal},
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use megaburn_report::console::human_duration;

use super::{super::print, units::size};

/// Time between plain lines.
const INTERVAL: Duration = Duration::from_secs(10);

/// The progress of a command that reads a known number of bytes.
pub(super) struct ReadProgress {
    /// Hidden if standard error is not a terminal.
    bar: ProgressBar,
    expected: u64,
    read: u64,
    start: Instant,
    /// When the last line was printed.
    printed: Instant,
}

impl ReadProgress {
    pub(super) fn new(expected: u64) -> Self {
        let target = if io::stderr().is_terminal() {
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        };
        let style = ProgressStyle::with_template("{bar:30.cyan/blue} {percent}%  {msg}");
        let style = style.expect("the template is a constant");
        let now = Instant::now();
        Self {
            bar: ProgressBar::with_draw_target(Some(expected), target).with_style(style),
            expected,
            read: 0,
            start: now,
            printed: now,
        }
    }

    /// Shows that further bytes were read.
    pub(super) fn add(&mut self, bytes: u64) {
        self.read += bytes;
        let now = Instant::now();
        if !self.bar.is_hidden() {
            self.bar.set_position(self.read);
            self.bar
                .set_message(rate(self.read, self.expected, now - self.start));
        } else if now - self.printed >= INTERVAL {
            self.printed = now;
            let percent = 100.0 * self.read as f64 / self.expected.max(1) as f64;
            let rate = rate(self.read, self.expected, now - self.start);
            print::progress(format!("read {:.1}%  {rate}", percent.min(100.0)));
        }
    }

    /// Prints with `f`, above the bar.
    pub(super) fn above<T>(&self, f: impl FnOnce() -> T) -> T {
        self.bar.suspend(f)
    }
}

impl Drop for ReadProgress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// The rate so far, and the time that is left at this rate.
fn rate(read: u64, expected: u64, time: Duration) -> String {
    if read == 0 || time.is_zero() {
        return size(read);
    }
    let rate = read as f64 / time.as_secs_f64();
    let left = expected.saturating_sub(read) as f64 / rate;
    let left = Duration::try_from_secs_f64(left).unwrap_or(Duration::MAX);
    format!("{}/s, {} left", size(rate as u64), human_duration(left))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_the_rate_and_the_time_that_is_left() {
        let time = Duration::from_secs(10);
        assert_eq!(
            rate(20_000_000, 180_000_000, time),
            "2.00MB/s, 1 m 20 s left"
        );
        assert_eq!(rate(10, 5, time), "1.00B/s, 0 ms left");
        assert_eq!(rate(0, 5, time), "0B");
    }
}
