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

// A terminal that records what is drawn, with `CLEARED` for each cleared line.
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
            line.split(['/', ' '])
                .filter(|s| !s.is_empty())
                .nth(1)
                .unwrap()
                .parse()
                .unwrap()
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
    assert!(
        text.chars().all(|c| c == '\n' || !c.is_control()),
        "{text:?}"
    );
}

#[test]
fn on_a_terminal_a_bar_shows_the_last_step_and_goes_away_at_the_end() {
    let terminal = Terminal::default();
    let target = ProgressDrawTarget::term_like(Box::new(terminal.clone()));
    let buffer = Buffer::default();
    let mut console = Console::with_target(Box::new(buffer.clone()), target, 10, 0, 5);
    (1..=4).for_each(|step| console.step(&example_step(step, 4.0)));
    assert!(console.screen.flush(Duration::from_secs(5)));
    let shown = terminal.0.text();
    assert!(shown.contains("4/10  loss 4.0000"), "{shown}");
    assert_eq!(
        buffer.text().lines().count(),
        1,
        "a line only for the first step"
    );
    console.finish();
    assert!(
        terminal.0.text().ends_with("CLEARED"),
        "{}",
        terminal.0.text()
    );
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
    assert!(
        console.screen.flush(Duration::from_secs(5)),
        "it waits for a closed pipe"
    );
}

#[test]
fn a_reader_that_pauses_holds_up_nobody_and_what_it_missed_is_said() {
    /// Blocks every write until the sender is dropped.
    struct Paused(std::sync::mpsc::Receiver<()>, Buffer);
    impl Write for Paused {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let _ = self.0.recv();
            self.1.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let (goes_on, paused) = std::sync::mpsc::channel();
    let buffer = Buffer::default();
    let mut console = Console::plain(Paused(paused, buffer.clone()), 5000, 0, 1);
    let begin = Instant::now();
    (1..=5000).for_each(|step| console.step(&example_step(step, 5.5)));
    assert!(
        begin.elapsed() < Duration::from_secs(30),
        "it waited for the reader"
    );
    assert_eq!(buffer.text(), "");
    drop(goes_on);
    drop(console);
    let text = buffer.text();
    // A slow machine may write a few lines between two gaps, each of which has a note.
    let missing: u64 = text
        .lines()
        .filter(|line| line.ends_with("lines were dropped here: the output was not being read"))
        .map(|line| {
            line.split_whitespace()
                .nth(1)
                .unwrap()
                .parse::<u64>()
                .unwrap()
        })
        .sum();
    assert!(missing > 0, "{text}");
    let lines = text
        .lines()
        .filter(|line| line.starts_with("step "))
        .count() as u64;
    assert!(
        lines >= 1024 && text.starts_with("step    1/5000"),
        "{lines} lines"
    );
    assert_eq!(lines + missing, 5000);
}
