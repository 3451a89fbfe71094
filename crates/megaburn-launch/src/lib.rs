//! Starts the ranks of one host as processes and makes sure that they end together.
//!
//! The ranks get torchrun's environment variables, so the same program also runs under torchrun,
//! Slurm, MPI or Kubernetes. Each rank is started through this program ([`launch_child`]), which
//! asks the kernel to kill it when the launcher dies and then becomes the command. A program that
//! starts several copies of itself ([`LaunchOptions::this_program`]) makes that request directly.
//! Processes that a command starts are killed by a guard (`guard.rs`) if the launcher dies.
//!
//! With a [`RestartPolicy`] the ranks are started again after a failure. Ranks that only lost a peer can
//! keep their processes ([`RestartInPlace`]). With several hosts, the
//! launchers then agree on it (`agents`): one of them coordinates, and spare hosts take the place
//! of those that are lost. Hosts under the same switch get consecutive node ranks
//! ([`LaunchOptions::topology`]).
//!
//! ```
//! use megaburn_launch::LaunchOptions;
//!
//! let options = LaunchOptions::new(4, vec!["my-program".into()])
//!     .with_nodes(2, 0)
//!     .with_master(Some("host-0".into()), Some(29500));
//! assert_eq!(options.nproc, 4);
//! ```

// Errors are values; the panics that remain are documented.
#![deny(clippy::unwrap_used, clippy::panic)]

mod agents;
mod child;
mod command;
mod error;
mod event;
mod gpus;
mod guard;
mod host;
mod in_place;
mod job;
mod launch;
mod launched;
mod logs;
mod options;
mod output;
mod pool;
mod port;
mod queue;
mod rank_process;
mod repeats;
mod restart;
mod signals;
mod stacks;
mod supervise;
mod survivors;
mod tied;
mod topology;
mod verdict;

pub use child::{launch_child, tie_to_launcher};
pub use error::LaunchError;
pub use in_place::{LauncherRequests, RestartInPlace, WaitReason};
pub use launch::launch;
pub use launched::{Launch, Launched};
pub use options::LaunchOptions;
pub use pool::in_own_pool;
pub use queue::{Output, OutputQueue};
pub use restart::RestartPolicy;
pub use signals::{StopRequests, stop_signals};
pub use tied::TiedChild;
pub use verdict::{EndedBy, Outcome, RankEnd};

/// Exit code of a rank that ended only because another one died, hung or disagreed.
pub const EXIT_PEER_FAILED: i32 = 4;
