//! Pipeline-parallel schedules as data: which rank computes, sends and receives what, in which
//! order. Pure functions build the schedules, prove them by simulation before any tensor moves,
//! time them with given costs, and draw them. The crate also splits layers over stages.
//!
//! [`run`] executes a rank's list; the caller provides the computation of a stage
//! ([`StageExecutor`]).
//!
//! ```
//! use megaburn_pipeline::{Costs, Links, ScheduleConfig, ScheduleKind, draw};
//!
//! let schedule = ScheduleConfig::new(ScheduleKind::OneForwardOneBackward, 2, 3).build()?;
//! let timing = schedule.simulate(&[Costs::UNIT; 2], Links::PrePosted)?;
//! assert_eq!(
//!     draw::text(&schedule, &timing, None),
//!     "rank 0 | F0 F1 .  .  B0 =  F2 B1 =  .  B2 =\n\
//!      rank 1 | .  F0 B0 =  F1 B1 =  F2 B2 =  .  .\n"
//! );
//! assert_eq!(timing.bubble_ratio(), 1.0 / 3.0);
//! # Ok::<(), megaburn_pipeline::PipelineError>(())
//! ```

// Errors are values; the panics that remain are documented.
#![deny(clippy::unwrap_used, clippy::panic)]

mod action;
mod config;
pub mod draw;
mod error;
mod formula;
mod kind;
mod kind_text;
mod layers;
mod layout_text;
mod order;
mod p2p_groups;
mod run;
mod schedule;
mod simulate;
mod stages;
mod transfers;

pub use action::{Action, Message, Op};
pub use config::ScheduleConfig;
pub use error::{PipelineError, Waiting};
pub use kind::ScheduleKind;
pub use layers::{LayerSplit, StageLayers};
pub use p2p_groups::P2pGroups;
pub use run::{MicroBatchStep, Output, P2pSpec, StageExecutor, run};
pub use schedule::Schedule;
pub use simulate::{Costs, Links, PreparedSchedule, Proof, Span, Timing};
pub use stages::{Placement, Stages};
