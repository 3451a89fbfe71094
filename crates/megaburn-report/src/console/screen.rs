//! The console's thread, which alone writes lines and draws the bar.

use std::io::Write;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use megaburn_launch::Output;

/// A request to the console's thread.
#[derive(Debug)]
pub(super) enum Show {
    /// Print a line.
    Line(String),
    /// Move the bar to a step.
    Bar {
        /// The last completed step.
        step: u64,
        /// The text next to the bar.
        message: String,
    },
    /// Remove the bar; nothing more follows.
    End,
}

/// The output and the bar below it.
pub(super) struct Screen {
    out: Box<dyn Write + Send>,
    bar: ProgressBar,
}

impl Screen {
    pub(super) fn new(
        out: Box<dyn Write + Send>,
        target: ProgressDrawTarget,
        steps: u64,
        first_step: u64,
    ) -> Self {
        let bar = ProgressBar::with_draw_target(Some(steps), target)
            .with_position(first_step)
            .with_style(
                ProgressStyle::with_template("{bar:30.cyan/blue} {pos}/{len}  {msg}  {eta} left")
                    .expect("the template is a constant"),
            );
        Self { out, bar }
    }

    pub(super) fn show(&mut self, output: Output<Show>) {
        match output {
            Output::Item(Show::Line(text)) => self.line(&text),
            Output::Item(Show::Bar { step, message }) => {
                self.bar.set_message(message);
                self.bar.set_position(step);
            }
            Output::Item(Show::End) => self.bar.finish_and_clear(),
            Output::Dropped(lines) => {
                self.line(&format!(
                    "note     {lines} lines were dropped here: the output was not being read"
                ));
            }
        }
    }

    fn line(&mut self, text: &str) {
        let Self { out, bar } = self;
        bar.suspend(|| {
            let _ = writeln!(out, "{text}").and_then(|()| out.flush());
        });
    }
}
