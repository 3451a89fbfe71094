//! Prints all output of the commands. A failed write never causes a panic: results return an error,
//! and all other lines are dropped.

use std::{
    fmt::Display,
    io::{self, ErrorKind, IsTerminal, Write},
    sync::OnceLock,
    time::Duration,
};

use megaburn_launch::{Output, OutputQueue};
use megaburn_train::TrainError;
use tracing_subscriber::{EnvFilter, fmt::MakeWriter};

/// Lines for standard error that may wait while it is not being read.
const WAITING: usize = 1024;
/// At the end of the program, waiting lines are given up when none could be written for this long.
const PATIENCE: Duration = Duration::from_secs(2);

/// Prints the result of a command. A reader that stops early, like `head`, is not an error. A slow
/// reader is waited for.
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

/// Prints a line about what was done; drops it if it cannot be written.
pub(super) fn note(text: impl Display) {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
}

/// Prints an error to standard error, after the log's lines; drops it if it cannot be written.
pub(super) fn error(text: impl Display) {
    to_stderr(format!("error: {text}\n").into_bytes());
}

/// Prints a line about progress to standard error, after the log's lines; drops it if it cannot be
/// written.
pub(super) fn progress(text: impl Display) {
    to_stderr(format!("{text}\n").into_bytes());
}

/// Waits until log lines and errors are written, as long as they are being read.
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
        Output::Dropped(lines) => writeln!(
            err,
            "{lines} lines were dropped here: the output was \
            not being read"
        ),
    };
}

/// What is logged without `RUST_LOG`: warnings, errors, and what is done to data sets before a run,
/// which may take minutes.
const FILTER: &str = "warn,megaburn_train::data=info";

/// Sends log lines to standard error: [`FILTER`], or what `RUST_LOG` selects. They are colored on a
/// terminal, unless `NO_COLOR` is set.
pub(super) fn start_logging() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(FILTER));
    let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    // This fails only if the application has its own subscriber, which then stays in use.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(io::stderr().is_terminal() && !plain)
        .with_writer(Log)
        .without_time()
        .try_init();
}

/// Creates a writer for each line of the log.
struct Log;

/// A line of the log, which is printed once it is complete.
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
