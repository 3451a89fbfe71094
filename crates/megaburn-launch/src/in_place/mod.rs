//! Restarts in place: the processes of ranks that only lost a peer stay, and train again.
//!
//! With [`LaunchOptions::restart_in_place`](crate::LaunchOptions::restart_in_place), the standard
//! input of each rank is a connection to its launcher ([`RankLink`], [`RestartInPlace`]):
//!
//! ```text
//! rank                                  launcher
//! Enrolled                              (it may restart in place)
//! ...another rank dies...
//! Waits, once its groups are closed     waits for all ranks to end or to wait
//!                                       Restart: the new number, port and token, to those that wait;
//!                                       starts the others anew
//! ```
//!
//! If the number of hosts is to change, the launcher sends `Regroup`: the rank saves at the end of a
//! step, and then waits. If the ranks of another host have ended, it sends `Leave`: the rank ends its
//! collectives, and waits.
//!
//! A rank that does not wait in time, or whose GPU has failed, ends as without this option, and is
//! started anew. If the launcher closes the connection, a rank that waits ends with its error.

mod link;
mod rejoin;
mod requests;
mod wire;

pub(crate) use link::RankLink;
pub use rejoin::RestartInPlace;
pub use requests::LauncherRequests;
pub use wire::WaitReason;
pub(crate) use wire::{FromRank, Restart, ToRank};

/// The environment variable that says that standard input is a connection to the launcher.
pub(crate) const VARIABLE: &str = "MEGABURN_RESTART_IN_PLACE";
