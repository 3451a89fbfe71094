//! Profiles of runs: what each rank's host and GPU did in some steps, as a trace that Perfetto
//! opens and as a table.
//!
//! - [`Spans`] records the named parts of a rank's steps, and names them in NVIDIA's profilers.
//! - [`Trace`] is the profile of all ranks, which [`write_chrome`] writes and [`read_chrome`]
//!   reads.
//! - [`Summary`] says where the time of a step went.

mod breakdown;
mod chrome;
mod chrome_reader;
mod files;
mod kernels;
mod spans;
mod summary;
mod table;
mod trace;

pub use breakdown::{GpuTimes, HostTimes};
pub use chrome::{is_chrome_trace, write_chrome};
pub use chrome_reader::read_chrome;
pub use files::{PROFILES, is_profile_file, is_profile_name, write_profile};
pub use kernels::{KernelClass, base_name};
pub use spans::{Range, Span, Spans, now_ns, ns_of};
pub use summary::{KernelTime, RankTimes, Summary, is_summary};
pub use table::{TITLE, table};
pub use trace::{CallPlace, CallRecord, GpuRecord, RankTrace, SpanRecord, Trace};
