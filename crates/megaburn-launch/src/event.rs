//! What happens to a launcher.

use crate::{agents::wire::FromCoordinator, in_place::FromRank};

/// What a launcher waits for.
#[derive(Debug)]
pub(crate) enum Event {
    /// The first process of a rank ended, either killed by a signal or not.
    Ended { serial: usize, killed: bool },
    /// All other processes of its group have ended too. If the first was not killed, this follows
    /// at once.
    GroupEnded { serial: usize },
    /// A rank said something.
    Said { serial: usize, said: FromRank },
    /// This process received a signal.
    Signal(i32),
    /// The coordinator of several hosts sent something, or is lost.
    Coordinator(FromCoordinator),
}
