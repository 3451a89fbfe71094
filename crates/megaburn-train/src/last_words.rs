//! Ends a process without waiting for its threads.

use std::{
    io::{self, Write},
    sync::mpsc::channel,
    thread,
    time::Duration,
};

use signal_hook::low_level::exit;

/// How long writing the last message may take; its reader may be blocked.
const PATIENCE: Duration = Duration::from_millis(500);

/// Writes `words` directly to standard error, because the queue of the log is lost with the
/// process, and ends the process at once.
pub(crate) fn end_process(words: String, code: i32) -> ! {
    let (said, end) = channel();
    let say = move || {
        let _ = writeln!(io::stderr(), "{words}");
        let _ = said.send(());
    };
    if thread::Builder::new().spawn(say).is_ok() {
        let _ = end.recv_timeout(PATIENCE);
    }
    exit(code)
}
