//! Shows how far the encoding of files is: a bar on a terminal, plain lines elsewhere.

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use megaburn_data::PreprocessCounts;
use megaburn_report::console::{human_duration, human_number};

use super::super::print;

/// Time between plain lines.
const INTERVAL: Duration = Duration::from_secs(10);

/// The progress of a command on standard output.
pub(super) struct ProgressDisplay {
    /// Hidden if the output is not a terminal.
    bar: ProgressBar,
    num_bytes: u64,
    /// When the first bytes were encoded, and their number.
    first: Option<(Instant, u64)>,
    /// When the last line was printed.
    printed: Instant,
}

impl ProgressDisplay {
    pub(super) fn new() -> Self {
        let terminal = io::stdout().is_terminal() && io::stderr().is_terminal();
        let target = if terminal {
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        };
        let style = ProgressStyle::with_template("{bar:30.cyan/blue} {percent}%  {msg}");
        let style = style.expect("the template is a constant");
        Self {
            bar: ProgressBar::with_draw_target(Some(0), target).with_style(style),
            num_bytes: 0,
            first: None,
            printed: Instant::now(),
        }
    }

    /// Prints a line above the bar.
    pub(super) fn note(&self, line: String) {
        self.bar.suspend(|| print::note(line));
    }

    /// Starts the bar of `num_bytes` bytes of input.
    pub(super) fn start(&mut self, num_bytes: u64) {
        self.num_bytes = num_bytes;
        self.bar.set_length(num_bytes);
    }

    /// Shows that `read_bytes` bytes of input were read.
    pub(super) fn show(&mut self, read_bytes: u64, counts: PreprocessCounts) {
        let now = Instant::now();
        // Work that is resumed does not count into the rate.
        let (start, before) = *self.first.get_or_insert((now, read_bytes));
        let rate = rate(read_bytes.saturating_sub(before), now - start);
        let left = self.num_bytes.saturating_sub(read_bytes);
        let line = line(counts, rate, left);
        if self.bar.is_hidden() {
            if now - self.printed >= INTERVAL {
                self.printed = now;
                let percent = 100.0 * read_bytes as f64 / self.num_bytes.max(1) as f64;
                print::note(format!("progress {percent:.1}%  {line}"));
            }
        } else {
            self.bar.set_position(read_bytes);
            self.bar.set_message(line);
        }
    }

    /// Removes the bar.
    pub(super) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// Bytes per second; `None` before there is something to measure.
fn rate(bytes: u64, time: Duration) -> Option<f64> {
    (bytes > 0 && !time.is_zero()).then(|| bytes as f64 / time.as_secs_f64())
}

fn line(counts: PreprocessCounts, rate: Option<f64>, left: u64) -> String {
    let documents = human_number(counts.documents as f64);
    let tokens = human_number(counts.tokens as f64);
    let mut line = format!("{documents} documents, {tokens} tokens");
    if let Some(rate) = rate {
        let time = Duration::try_from_secs_f64(left as f64 / rate).unwrap_or(Duration::MAX);
        line += &format!(", {}B/s, {} left", human_number(rate), human_duration(time));
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_the_rate_and_the_time_that_is_left() {
        let counts = PreprocessCounts {
            documents: 1234,
            tokens: 5_670_000,
            ..PreprocessCounts::default()
        };
        assert_eq!(line(counts, None, 5), "1.23k documents, 5.67M tokens");
        let rate = rate(20_000_000, Duration::from_secs(10));
        assert_eq!(
            line(counts, rate, 160_000_000),
            "1.23k documents, 5.67M tokens, 2.00MB/s, 1 m 20 s left"
        );
        assert_eq!(super::rate(0, Duration::from_secs(1)), None);
        assert_eq!(super::rate(1, Duration::ZERO), None);
    }
}
