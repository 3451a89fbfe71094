//! Cleans up unfinished output when a conversion is interrupted.

use std::{
    io::{self, Write},
    thread,
};

use megaburn_checkpoint::remove_unfinished;
use megaburn_train::TrainError;
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    iterator::Signals,
    low_level,
};

/// From now on, SIGINT and SIGTERM remove unfinished output and end the process at once, with code
/// 130 (SIGINT) or 143 (SIGTERM).
///
/// # Errors
/// The operating system refuses a signal handler or a thread.
pub(super) fn end_clean_on_signals() -> Result<(), TrainError> {
    let fail = |source| TrainError::Signals { source };
    let mut signals = Signals::new([SIGINT, SIGTERM]).map_err(fail)?;
    let end = move || {
        let Some(signal) = signals.forever().next() else {
            return;
        };
        remove_unfinished();
        let name = if signal == SIGINT {
            "SIGINT"
        } else {
            "SIGTERM"
        };
        let _ = writeln!(
            io::stderr(),
            "error: stopped by {name}; nothing half-written remains"
        );
        low_level::exit(128 + signal);
    };
    thread::Builder::new()
        .name("signals".into())
        .spawn(end)
        .map_err(fail)?;
    Ok(())
}
