//! What a person sees of a run: a progress bar on a terminal, plain lines otherwise.

mod format;

use std::{
    fmt,
    io::{self, IsTerminal, Write},
    time::Instant,
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

pub use format::{human_duration, human_number};

use crate::metrics::{EvalMetrics, StepMetrics};
use format::{brief, step_line};

/// Prints the progress of a run. One rank has one.
///
/// Lines go to the output; where output and error are both a terminal, a coloured bar stands
/// beneath them. Output that cannot be written (a closed pipe) is ignored: a run outlives its reader.
pub struct Console {
    out: Box<dyn Write + Send>,
    bar: ProgressBar,
    steps: u64,
    log_interval: u64,
    first_step: u64,
    started: Instant,
}

impl fmt::Debug for Console {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Console").field("bar", &self.bar).field("steps", &self.steps).finish()
    }
}

impl Console {
    /// A console on standard output for a run of `steps` steps, of which `first_step` are done,
    /// with a line every `log_interval` steps.
    pub fn new(steps: u64, first_step: u64, log_interval: u64) -> Self {
        let terminal = io::stdout().is_terminal() && io::stderr().is_terminal();
        let target =
            if terminal { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        Self::with_target(Box::new(io::stdout()), target, steps, first_step, log_interval)
    }

    /// A console of plain lines on `out`.
    pub fn plain(
        out: impl Write + Send + 'static,
        steps: u64,
        first_step: u64,
        log_interval: u64,
    ) -> Self {
        let target = ProgressDrawTarget::hidden();
        Self::with_target(Box::new(out), target, steps, first_step, log_interval)
    }

    fn with_target(
        out: Box<dyn Write + Send>,
        target: ProgressDrawTarget,
        steps: u64,
        first_step: u64,
        log_interval: u64,
    ) -> Self {
        let bar = ProgressBar::with_draw_target(Some(steps), target)
            .with_position(first_step)
            .with_style(
                ProgressStyle::with_template("{bar:30.cyan/blue} {pos}/{len}  {msg}  {eta} left")
                    .expect("the template is a constant"),
            );
        let log_interval = log_interval.max(1);
        Self { out, bar, steps, log_interval, first_step, started: Instant::now() }
    }

    /// Prints any text, above the bar.
    pub fn line(&mut self, text: impl AsRef<str>) {
        let Self { out, bar, .. } = self;
        bar.suspend(|| {
            let _ = writeln!(out, "{}", text.as_ref()).and_then(|()| out.flush());
        });
    }

    /// Reports a step: the bar moves at each, a line is printed at the first, at every multiple of
    /// the interval, at the last, and where nothing was changed.
    pub fn step(&mut self, metrics: &StepMetrics) {
        self.bar.set_message(brief(metrics));
        self.bar.set_position(metrics.step);
        let step = metrics.step;
        let first = step == self.first_step + 1;
        if first || metrics.skipped || step.is_multiple_of(self.log_interval) || step == self.steps
        {
            let done = step.saturating_sub(self.first_step).max(1);
            let left = self.steps.saturating_sub(step);
            let eta = self.started.elapsed().mul_f64(left as f64 / done as f64);
            self.line(step_line(metrics, self.steps, eta));
        }
    }

    /// Reports an evaluation.
    pub fn eval(&mut self, metrics: &EvalMetrics) {
        let EvalMetrics { step, eval_loss, mtp_losses } = metrics;
        let further = mtp_losses.iter().map(|loss| format!("{loss:.4}")).collect::<Vec<_>>();
        let further = match further.is_empty() {
            true => String::new(),
            false => format!("; of further tokens {}", further.join(", ")),
        };
        self.line(format!(
            "evaluation after step {step}: loss {eval_loss:.4} on unseen data{further}"
        ));
    }

    /// Takes the bar away.
    pub fn finish(self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use indicatif::TermLike;
    use rstest::rstest;

    use super::*;
    use crate::metrics::{example_eval, example_step};

    #[derive(Clone, Debug, Default)]
    struct Buffer(Arc<Mutex<Vec<u8>>>);

    impl Buffer {
        fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    impl Write for Buffer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    // A terminal that keeps what is drawn and shows `CLEARED` where a line is wiped.
    #[derive(Clone, Debug, Default)]
    struct Terminal(Buffer);

    impl TermLike for Terminal {
        fn width(&self) -> u16 {
            120
        }

        fn write_str(&self, text: &str) -> io::Result<()> {
            self.0.clone().write_all(text.as_bytes())
        }

        fn write_line(&self, text: &str) -> io::Result<()> {
            self.write_str(&format!("{text}\n"))
        }

        fn clear_line(&self) -> io::Result<()> {
            self.write_str("CLEARED")
        }

        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    #[rstest]
    #[case(7, 0, 3, &[1, 3, 6, 7])]
    #[case(7, 4, 3, &[5, 6, 7])]
    #[case(2, 0, 10, &[1, 2])]
    #[case(3, 0, 0, &[1, 2, 3])]
    fn a_line_is_printed_first_last_and_at_the_interval(
        #[case] steps: u64,
        #[case] first_step: u64,
        #[case] interval: u64,
        #[case] expected: &[u64],
    ) {
        let buffer = Buffer::default();
        let mut console = Console::plain(buffer.clone(), steps, first_step, interval);
        (first_step + 1..=steps).for_each(|step| console.step(&example_step(step, 5.5)));
        console.finish();
        let printed: Vec<u64> = buffer
            .text()
            .lines()
            .map(|line| {
                line.split(['/', ' ']).filter(|s| !s.is_empty()).nth(1).unwrap().parse().unwrap()
            })
            .collect();
        assert_eq!(printed, expected);
    }

    #[test]
    fn plain_lines_have_no_control_characters() {
        let buffer = Buffer::default();
        let mut console = Console::plain(buffer.clone(), 1, 0, 1);
        console.step(&example_step(1, f64::NAN));
        console.eval(&example_eval(1, 1.23456));
        console.line("saved");
        console.finish();
        let text = buffer.text();
        assert!(text.ends_with("evaluation after step 1: loss 1.2346 on unseen data\nsaved\n"));
        assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{text:?}");
    }

    #[test]
    fn on_a_terminal_a_bar_shows_the_last_step_and_goes_away_at_the_end() {
        let terminal = Terminal::default();
        let target = ProgressDrawTarget::term_like(Box::new(terminal.clone()));
        let buffer = Buffer::default();
        let mut console = Console::with_target(Box::new(buffer.clone()), target, 10, 0, 5);
        (1..=4).for_each(|step| console.step(&example_step(step, 4.0)));
        console.bar.tick();
        let shown = terminal.0.text();
        assert!(shown.contains("4/10  loss 4.0000"), "{shown}");
        assert_eq!(buffer.text().lines().count(), 1, "a line only for the first step");
        console.finish();
        assert!(terminal.0.text().ends_with("CLEARED"), "{}", terminal.0.text());
    }

    #[test]
    fn a_closed_pipe_does_not_end_the_run() {
        struct Closed;
        impl Write for Closed {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }

            fn flush(&mut self) -> io::Result<()> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
        }
        let mut console = Console::plain(Closed, 2, 0, 1);
        console.step(&example_step(1, 5.5));
        console.line("still here");
        assert_eq!(console.bar.position(), 1);
    }
}
