//! All that the commands print goes through here. What cannot be written never makes a program
//! panic: results report it, and everything else goes on without the line.

use std::{
    fmt::Display,
    io::{self, ErrorKind, IsTerminal, Write},
    sync::OnceLock,
    time::Duration,
};

use megaburn_launch::{Output, OutputQueue};
use megaburn_train::TrainError;
use tracing_subscriber::{EnvFilter, fmt::MakeWriter};

/// Lines for standard error that may wait while nobody reads it.
const WAITING: usize = 1024;
/// At the end of the program the lines that wait are given up when none could be written for as long.
const PATIENCE: Duration = Duration::from_secs(2);

/// Prints what the command was asked for. A reader that has read enough, like `head`, changes
/// nothing; it waits for one that is slow.
///
/// # Errors
/// Standard output cannot be written for another reason, such as a full disk.
pub(super) fn result(text: impl Display) -> Result<(), TrainError> {
    let mut out = io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(source) if source.kind() != ErrorKind::BrokenPipe => Err(TrainError::Write {
            path: "standard output".into(),
            source,
        }),
        _ => Ok(()),
    }
}

/// Prints a line about what was done. It is dropped if it cannot be written.
pub(super) fn note(text: impl Display) {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
}

/// Prints an error to standard error, behind the log's lines. It is dropped if it cannot be written.
pub(super) fn error(text: impl Display) {
    to_stderr(format!("error: {text}\n").into_bytes());
}

/// Waits until the log's lines and errors are written, as far as somebody reads them.
pub(super) fn flush() {
    if let Some(Some(errors)) = ERRORS.get() {
        errors.flush(PATIENCE);
    }
}

static ERRORS: OnceLock<Option<OutputQueue<Vec<u8>>>> = OnceLock::new();

fn to_stderr(line: Vec<u8>) {
    let queue = || OutputQueue::spawn("stderr", WAITING, write_stderr).ok();
    match ERRORS.get_or_init(queue) {
        Some(errors) => errors.push(line),
        None => write_stderr(Output::Item(line)),
    }
}

fn write_stderr(output: Output<Vec<u8>>) {
    let mut err = io::stderr().lock();
    let _ = match output {
        Output::Item(line) => err.write_all(&line),
        Output::Dropped(lines) => writeln!(err, "{lines} lines are missing here: nobody read them"),
    };
}

/// Log lines go to standard error: warnings and errors, or what `RUST_LOG` asks for. They have
/// colours on a terminal only, and not where `NO_COLOR` is set.
pub(super) fn start_logging() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    // Fails only when the application has a subscriber of its own, which then stands.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(io::stderr().is_terminal() && !plain)
        .with_writer(Log)
        .without_time()
        .try_init();
}

/// Makes a writer for each line of the log.
struct Log;

/// A line of the log, which is printed when it is complete.
struct LogLine(Vec<u8>);

impl<'a> MakeWriter<'a> for Log {
    type Writer = LogLine;

    fn make_writer(&'a self) -> LogLine {
        LogLine(Vec::new())
    }
}

impl Write for LogLine {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for LogLine {
    fn drop(&mut self) {
        to_stderr(std::mem::take(&mut self.0));
    }
}
